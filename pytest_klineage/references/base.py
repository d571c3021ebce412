"""What a reference is: a vendor's implementation, prepared untimed and called timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.records import KernelCase, covers
from pytest_klineage.references.refusals import UnsupportedCase

if TYPE_CHECKING:
    import torch

    Tensors: TypeAlias = dict[str, torch.Tensor]
    Call: TypeAlias = Callable[[Tensors, Tensors], dict[str, torch.Tensor] | None]
    Convert: TypeAlias = Callable[[Tensors], Tensors]


COMPILERS = ("torch._dynamo", "torch._inductor.compile_fx", "triton.language")
"""What torch.compile and libraries in Triton import first, in a second or two."""
AS_FAST = 1.03
"""Medians of one plan of a library differ by less; those of different plans mostly by more."""


@dataclass(frozen=True)
class TrialTensors:
    """Tensors of a case's signature on the GPU that it will run on, for warming up and for comparing variants."""

    platform: str
    """Canonical name of the platform, such as "sm90"."""
    inputs: Tensors
    outputs: Tensors
    only: str = ""
    """Name of a variant that was chosen before; empty to compare all."""
    only_ms: float = 0.0
    """Its median when it was compared, in milliseconds; 0 where that is not known."""
    definition: Callable[..., tuple[torch.Tensor, ...]] | None = None
    """Of a user's operator: its definition on the inputs in order, with results in their declared types."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """Axes, options and scalars by name, for functions that take them."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute paths of files that references are functions of, by the names in the case."""

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return next(iter(self.inputs.values())).device


@dataclass(frozen=True)
class Variant:
    """One way in which a library computes a case. It is a call itself, one that converts first."""

    call: Call
    """Timed: takes inputs as `convert` left them, and preallocated outputs."""
    convert: Convert | None = None
    """Untimed: inputs in the library's own convention, which its users keep them in; see docs/reference/references.md.

    It allocates what it makes and changes none of the inputs.
    """
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Switches of the process that belong to this variant, by name of `flags.switches`."""
    forget: Callable[[Tensors], None] | None = None
    """Has the library forget what it has found for these inputs in this thread, so that the next call searches again.

    Of a library whose search does not find the same every time; None for all others.
    """

    def __call__(self, inputs: Tensors, outputs: Tensors) -> Tensors | None:
        """Convert and call."""
        return self.call(inputs if self.convert is None else self.convert(inputs), outputs)


class Reference(ABC):
    """One vendor library. Decides what is fast, never what is right."""

    name: ClassVar[str]
    platforms: ClassVar[tuple[str, ...]]
    remedy: ClassVar[str]
    """The command that installs what it needs."""
    needs_trial: ClassVar[bool] = False
    """Whether it wants tensors to try itself on, on a CPU too."""

    @abstractmethod
    def operators(self) -> tuple[str, ...]:
        """Names of the operators that this library implements."""

    def limits(self, case: KernelCase, platform: str) -> str:
        """What the library supports, where that leaves out this case on this platform; empty where it does not."""
        return ""

    def asks(self, operator: str) -> tuple[str, ...]:
        """Names of the references whose calls it may take for an operator: its own, unless it asks others."""
        return (self.name,)

    def ahead(self, case: KernelCase) -> tuple[str, ...]:
        """Modules that its libraries import, in order, and that touch no GPU: imported once, not at every start."""
        return ()

    def check(self, case: KernelCase, platform: str) -> None:
        """Raise UnknownName for an operator, UsageError for a platform, UnsupportedCase for a case that it has not.

        Needs neither the library nor torch, so that a judge can ask before it starts anything.
        """
        if case.operator not in self.operators():
            raise UnknownName(f"operator of reference {self.name}", case.operator, self.operators())
        if not covers(self.platforms, platform):
            names = ", ".join(self.platforms)
            raise UsageError(f"the reference {self.name} runs on {names}, not on {platform}; on a CPU use ref='torch'")
        if limits := self.limits(case, platform):
            raise UnsupportedCase.of(self.name, case, platform, limits)

    @abstractmethod
    def prepare(self, case: KernelCase, trial: TrialTensors | None = None) -> Call:
        """The timed call for a case; everything that need not be timed happens here.

        The call takes inputs and preallocated outputs by name. It fills the outputs and returns None, or, where the
        library has no destination argument, returns new outputs by name. `trial` is given on a GPU.
        """

    @abstractmethod
    def describe(self, case: KernelCase) -> dict[str, str]:
        """Label, versions, thread count and backend flags, for the record; with what `prepare` chose, once it has."""
