"""Imported problems before the gate: their own code, and zeros, as kernels; what became of each, and a table."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pytest_klineage import Gate, UsageError
from pytest_klineage.formats import Imported
from pytest_klineage.formats.imported import is_lintable
from pytest_klineage.lab.library.lineages import RIGHT
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.distributions import TORCH_DTYPES
from pytest_klineage.records import Code, KernelCase, KernelSource, LibraryPolicy, SourceFile, Status, Surface, Timing
from pytest_klineage.results.packed import append_line, read_lines

RUNS = Path(__file__).resolve().parents[2] / "results" / "runs" / "gate_quality"
AT_LEAST = 0.01
"""Of the reference's speed. The same code on both sides is judged for being right: calls of microseconds say nothing of
its speed, and the samples are there."""
SETTINGS = {"time_limit_s": 2.0, "precision": 0.5, "seeds": 1, "busy_limit": 1.0, "spread_limit": 1e6}
NULL_MODELS = (
    "A case is a problem whose null models (zeros, one constant, the inputs' bytes, the answer to other inputs, rows "
    "in another order) are all refused before a kernel is judged."
)
HOW = (
    f"It is required to reach {AT_LEAST:g}x; the gate's settings are "
    f"{', '.join(f'{name} = {value:g}' for name, value in SETTINGS.items())}. {NULL_MODELS}"
)


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one problem."""

    group: str
    """Its level, or its kind of operator."""
    problem: str
    case: str = ""
    """Empty where it became none."""
    at_most: int = 0
    training: bool = True
    sizes: dict[str, str] = {}
    refused: str = ""
    code: str = ""
    """Of the problem's own Model as a kernel."""
    accepted: bool = False
    zeros: str = ""
    """Code of a kernel that writes zeros."""
    worst: float = 0.0
    """The own Model's largest error, as a share of the bound."""
    speedup: tuple[float, float, float] | None = None
    reference_samples_ms: tuple[float, ...] = ()
    candidate_samples_ms: tuple[float, ...] = ()
    seconds: float = 0.0


class Progress:
    """Rows of a survey in a file of results/runs: a survey that was cut off goes on behind them."""

    def __init__(self, name: str) -> None:
        self.path = RUNS / f"{name}.part.jsonl"
        self.rows = read_lines(self.path, Row)

    def keep(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Each row, once it is on disk."""
        for row in rows:
            self.rows.append(row)
            append_line(self.path, row)
            yield row

    def end(self) -> None:
        """The survey is whole, and published."""
        self.path.unlink(missing_ok=True)


def zeros_of(case: KernelCase) -> KernelSource:
    """A kernel that computes nothing."""
    signature = operator_of(case).signature(case)
    made = "".join(f"torch.zeros({spec.shape}, dtype=torch.{TORCH_DTYPES[spec.dtype]})," for spec in signature.outputs)
    names = ", ".join(spec.name for spec in signature.inputs)
    results = f"({made})" if len(signature.outputs) > 1 else made.rstrip(",")
    text = f"import torch\n\n\ndef run({names}):\n    return {results}\n"
    return KernelSource(surface=Surface.PYTHON, files=(SourceFile("zeros.py", text),), entry="run", label="zeros")


def judged(gate: Gate, row: Row, imported: Imported, own: KernelSource) -> Row:
    """The row with what became of the problem's own code, and of zeros, as kernels.

    Raises UsageError for a case that cannot be judged.
    """
    began = time.monotonic()
    if not is_lintable(imported.case):
        raise UsageError("its tensors are too large for this survey")
    case = msgspec.structs.replace(imported.case, at_least=AT_LEAST, library=LibraryPolicy.ALLOW)
    verdict = gate.judge(case, own)
    zeros = gate.judge(case, zeros_of(case))
    accepted = verdict.status is Status.ACCEPTED
    row = msgspec.structs.replace(
        row, case=case.id, sizes=imported.sizes, code=verdict.code.value, accepted=accepted, zeros=zeros.code.value,
        refused="" if accepted else verdict.reasons[0].message,
        worst=max((round(check.error / check.bound, 4) for check in verdict.checks if check.bound), default=0.0),
    )  # fmt: skip
    row = timed(row, verdict.timing) if verdict.timing is not None else row
    return msgspec.structs.replace(row, seconds=round(time.monotonic() - began, 2))


def timed(row: Row, timing: Timing) -> Row:
    """The row with a timing's figures."""
    found = timing.speedup
    return msgspec.structs.replace(
        row, speedup=(round(found.low, 4), round(found.estimate, 4), round(found.high, 4)),
        reference_samples_ms=tuple(round(ms, 5) for ms in timing.reference_samples_ms),
        candidate_samples_ms=tuple(round(ms, 5) for ms in timing.candidate_samples_ms),
    )  # fmt: skip


def refuses_zeros(row: Row) -> bool:
    """Whether the kernel that writes zeros was rejected, for whatever reason."""
    return bool(row.zeros) and Code(row.zeros).status not in RIGHT


def table_of(rows: list[Row]) -> str:
    """Counts by group, and by name what is no case, or is not accepted."""
    lines = [
        "| group | problems | become cases | accept their own Model | refuse zeros | "
        "largest error of an own Model, of its bound |",
        "|---|---|---|---|---|---|",
    ]
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        cases = [row for row in own if row.case]
        refuse = sum(refuses_zeros(row) for row in cases)
        worst = max((row.worst for row in cases), default=0.0)
        accepted = sum(row.accepted for row in cases)
        lines.append(f"| {group} | {len(own)} | {len(cases)} | {accepted} | {refuse} | {worst:.2f} |")
    lines += ["", "| no case | why |", "|---|---|"]
    lines += [f"| {row.group}/{row.problem} | {in_short(row.refused)} |" for row in rows if not row.case]
    lines += ["", "| case, but its own Model is not accepted | why |", "|---|---|"]
    lines += [f"| {row.group}/{row.problem} | `{row.code}`: {row.refused} |" for row in rows
              if row.case and not row.accepted]  # fmt: skip
    return "\n".join(lines)


def in_short(why: str) -> str:
    """A refusal without the place that it names, which is a file of this run."""
    return re.sub(r"^(unsupported: \S+: |\S+\.py:\d+: operator \S+: )+", "", why).replace("|", "/")
