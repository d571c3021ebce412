"""What the GPU measurements of the gate's quality share: platform, kernels, and results that grow part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import pytest

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.records import KernelCase, KernelSource, LibraryPolicy, SourceFile, Surface, Verdict
from pytest_klineage.results.packed import read_lines

ROOT = Path(__file__).resolve().parents[2]
LIBRARY_KERNELS = Path(__file__).parent / "library_kernels"
OPERATORS = ("gemm", "conv2d", "topk", "fmha", "gdn")
"""In the order of their cost: when time runs out, the short ones are there."""

Row = TypeVar("Row", bound=msgspec.Struct)


class Judged(Protocol):
    """One judgement of many, as a table keeps it."""

    @property
    def device_uuid(self) -> str: ...

    @property
    def judged_at(self) -> str:
        """When it ended, to the second."""

    @property
    def seconds(self) -> float:
        """From its begin to its end."""


def ended(row: Judged) -> float:
    """When a judgement ended, in seconds of the epoch."""
    return datetime.fromisoformat(row.judged_at).timestamp()


def span_s(rows: Sequence[Judged]) -> float:
    """Seconds from the begin of the first judgement to the end of the last."""
    return max(map(ended, rows)) - min(ended(row) - row.seconds for row in rows)


def at_once(rows: Sequence[Judged]) -> int:
    """How many judgements of one GPU were under way at the same time, at most; ends are known to a second."""
    return max(
        sum(ended(other) - other.seconds + 1 < ended(one) <= ended(other) for other in rows if is_beside(one, other))
        for one in rows
    )


def is_beside(one: Judged, other: Judged) -> bool:
    """Whether two judgements were made on the same GPU."""
    return one.device_uuid == other.device_uuid


def gpu_platform(session: KlineageSession) -> str:
    """The GPU platform that is judged on; skips on a CPU."""
    if session.platform == "cpu":
        pytest.skip("measures on a GPU: pass --platform sm90 on a machine that has one")
    return session.platform


def results_file(config: pytest.Config, name: str) -> Path:
    """Where `publish` puts the raw records of a table."""
    base = ROOT / "results" if config.getoption("--publish") else ROOT / "results" / "runs"
    return base / "gate_quality" / f"{name}.jsonl"


def kept_rows(path: Path, kind: type[Row], *, without: Callable[[Row], bool]) -> list[Row]:
    """Rows of earlier parts, less those that are measured again.

    A last line that was cut short is left out. Raises BadRecord for a file of another form: it is not written over.
    """
    return [row for row in read_lines(path, kind) if not without(row)]


def sources(operator: str, platform: str) -> Iterator[KernelSource]:
    """Kernels of an operator that should be right: the library's own first, then the experts for this platform."""
    path = LIBRARY_KERNELS / f"{operator}.py"
    yield KernelSource(
        surface=Surface.PYTHON, files=(SourceFile(name=path.name, text=path.read_text()),), entry="run",
        label=f"{operator} by the library",
    )  # fmt: skip
    for expert in find_experts(ROOT / "experts", platform):
        if expert.operator == operator:
            yield from (expert.source(name) for name in ("expert", "naive") if name in expert.variants)


def with_library(case: KernelCase) -> KernelCase:
    """The case with libraries allowed and no speed demanded."""
    return msgspec.structs.replace(case, library=LibraryPolicy.ALLOW, at_least=1e-4)


def first_right(gate: Gate, case: KernelCase, *, against_itself: bool) -> tuple[KernelSource, Verdict]:
    """The first kernel of the operator that the gate scores, with its verdict. Fails the test without one."""
    refused = []
    for source in sources(case.operator, gate.platform):
        verdict = gate.judge(case, source, reference_source=source if against_itself else None)
        if verdict.scored:
            return source, verdict
        refused.append(f"{source.label}: {verdict.code}: {verdict.reasons[0].message}")
    pytest.fail(f"no kernel of {case.id} is right here: {'; '.join(refused)}", pytrace=False)


def machine_of(verdict: Verdict) -> str:
    """The machine in words."""
    machine = verdict.machine
    if machine is None:
        return ""
    versions = ", ".join(f"{name} {machine.software[name]}" for name in ("torch", "driver") if name in machine.software)
    return f"{machine.device}, {versions}" if versions else machine.device
