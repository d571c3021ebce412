"""What an import comes to: a file that defines an operator, and a case of it; or a refusal by name. And the lint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.records import KernelCase

LARGEST_BYTES = 1e8
"""Up to here a case is linted on import: seconds on a CPU. A larger one is linted by the gate, when it is judged."""
HEAD = """\
# {name}, as an operator. Written by `pytest-klineage import`: {origin}
# The text up to the last import is the problem's own. It is trusted: it runs where the gate makes inputs and answers.
"""


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
    file: Path
    """What defines the case's operator: the problem, and after it what makes an operator of it."""
    arguments: tuple[str, ...]
    """What the problem's function takes, in its order: inputs, and options of the case."""
    weights: dict[str, str] = {}
    """By name of a parameter in the problem's module: the input that takes its place."""
    constructor: str = "[]"
    """What the problem's module is made with, as text."""
    training: bool = True
    """Whether the problem's module is in training mode."""
    sizes: dict[str, str] = {}
    """The problem's sizes that were set to others, as text."""


def identifier(prefix: str, name: str) -> str:
    """A problem's name as an operator's."""
    return f"{prefix}_{re.sub(r'[^0-9A-Za-z_]', '_', name).strip('_')}"


def write_file(into: Path, name: str, text: str) -> Path:
    """Write a defining file. Raises UsageError when that cannot be."""
    path = into / f"{name}.py"
    try:
        into.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def keywords(numbers: Mapping[str, object]) -> str:
    """Options of a definition as they stand after its inputs; empty when there are none."""
    return "".join(f", {name}={value!r}" for name, value in numbers.items()).replace(", ", ", *, ", 1)


def lint_imported(imported: Imported, seed: int = 0) -> tuple[str, ...]:
    """Why the case measures nothing, as names of accepted null models; empty when it is fit to be scored, or too large.

    Runs the problem's own code, in this process, on the CPU.
    """
    import torch

    case = imported.case
    if not is_lintable(case):
        return ()
    return tuple(lint_case(operator_of(case), case, torch.Generator().manual_seed(seed)))


def is_lintable(case: KernelCase) -> bool:
    """Whether a case is small enough to be linted on import."""
    signature = operator_of(case).signature(case)
    return sum(spec.num_elements for spec in (*signature.inputs, *signature.outputs)) * 4 <= LARGEST_BYTES


def check_scorable(imported: Imported, seed: int = 0) -> Imported:
    """The same, when no null model passes. Raises Unsupported, which names those that do."""
    if findings := lint_imported(imported, seed):
        raise Unsupported(imported.name, f"answers that compute nothing would pass: {', '.join(findings)}")
    return imported
