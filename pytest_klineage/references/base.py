"""What a reference is: a vendor's implementation, prepared untimed and called timed. No reference lives here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from pytest_klineage.records import KernelCase

if TYPE_CHECKING:
    import torch

    Tensors: TypeAlias = dict[str, torch.Tensor]
    Call: TypeAlias = Callable[[Tensors, Tensors], dict[str, torch.Tensor] | None]


class Reference(ABC):
    """One vendor library. Decides what is fast, never what is right."""

    name: ClassVar[str]
    platforms: ClassVar[tuple[str, ...]]

    @abstractmethod
    def operators(self) -> tuple[str, ...]:
        """Names of the operators that this library implements."""

    @abstractmethod
    def prepare(self, case: KernelCase) -> Call:
        """The timed call for a case; everything that need not be timed happens here.

        The call takes inputs and preallocated outputs by name. It fills the outputs and returns None, or, where the
        library has no destination argument, returns new outputs by name.
        """

    @abstractmethod
    def describe(self, case: KernelCase) -> dict[str, str]:
        """Label, versions, thread count and backend flags, for the record."""
