"""What an import comes to: a case with what differs in it, or a named refusal; and the lint. No format is here."""

from __future__ import annotations

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.records import KernelCase

LARGEST_FLOPS, LARGEST_BYTES = 2e10, 1e9
"""Up to here a case is linted on import: seconds on a CPU. A larger one is linted by the gate, when it is judged."""


class Unsupported(UsageError):
    """Something of another format that has no place here; the message says what, and where."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why
        super().__init__(f"unsupported: {name}: {why}")


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A case that was made of a foreign problem."""

    name: str
    """What the format calls the problem."""
    case: KernelCase
    digest: str
    """SHA-256 of the problem: of its syntax tree, so that comments and layout do not count."""
    arguments: tuple[str, ...]
    """Our name of each input that the problem's function takes, in its order."""
    weights: dict[str, str] = {}
    """By name of a parameter in the problem's module: our name of the input that takes its place."""
    constructor: tuple[int | float | bool | str | None, ...] = ()
    """What the problem's module is made with."""
    notes: tuple[str, ...] = ()
    """Where the case asks for more, or for something else, than the problem."""


def lint_imported(imported: Imported, seed: int = 0) -> tuple[str, ...]:
    """Why the case measures nothing, as names of accepted null models; empty when it is fit to be scored, or too large.

    Runs the operator's oracle, with PyTorch on the CPU, and nothing of the problem's own code.
    """
    import torch

    case = imported.case
    chosen = operator_of(case)
    if not is_lintable(case):
        return ()
    return tuple(lint_case(chosen, case, torch.Generator().manual_seed(seed)))


def is_lintable(case: KernelCase) -> bool:
    """Whether a case is small enough to be linted on import."""
    chosen = operator_of(case)
    return chosen.flops(case) <= LARGEST_FLOPS and chosen.min_bytes(case) <= LARGEST_BYTES


def check_scorable(imported: Imported, seed: int = 0) -> Imported:
    """The same, when no null model passes. Raises Unsupported, which names those that do."""
    if findings := lint_imported(imported, seed):
        raise Unsupported(imported.name, f"answers that compute nothing would pass: {', '.join(findings)}")
    return imported
