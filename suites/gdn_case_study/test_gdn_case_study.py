"""The case study of the gated delta rule: naive, stages and expert of its three phases, and what each stage brings.

pytest suites/gdn_case_study --platform sm90
pytest suites/gdn_case_study --platform sm90 -k kkt_solve              # a part; other rows of the table are kept
pytest suites/gdn_case_study --platform sm90 --klineage-stage compile  # builds every kernel, without a device

All kernels of a phase are compared with one reference, PyTorch, so that two speedups over it give one over another
kernel. The expert is compared with FLA's kernels as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tabulate import tabulate

from pytest_klineage import KernelCase, KernelGate, KlineageSession, paper_case
from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.lab.library.lineages import HAND_MADE, StoredLineage, load_lineage
from pytest_klineage.records import INSTRUCTIONS, Interval, KernelSource, Verdict
from pytest_klineage.results.packed import read_lines

ROOT = Path(__file__).parents[2]
OPERATORS = ("gdn_cumsum", "gdn_kkt_solve", "gdn_fused_fwd")
"""In the order in which one feeds the next."""
REFERENCE = "torch"
VENDOR = "fla"
NAIVE, EXPERT = "naive", "expert"
AT_LEAST = {"gdn_cumsum": 1.0, "gdn_kkt_solve": 1.0, "gdn_fused_fwd": 1.0}
"""Speedup over FLA that an expert must reach. Other comparisons are measured, not held to a speed."""
BASELINE_AT_LEAST = 1e-5
MAX_SPILLS = 0
"""Bytes per thread that an expert may spill."""


class Kernel(NamedTuple):
    """One kernel of a chain, and whom it is compared with."""

    expert: Expert
    lineage: StoredLineage
    """The expert's own, hand-made."""
    place: int
    """In the chain; the naive kernel's is 0."""
    name: str
    reference: str

    @property
    def id(self) -> str:
        """Name of the test."""
        suffix = "" if self.reference == REFERENCE else f"-{self.reference}"
        return f"{self.expert.operator}-{self.name}{suffix}"

    @property
    def adds(self) -> str:
        """The optimization that it adds to the kernel before it."""
        return self.lineage.lineage.transitions[self.place - 1].category.value if self.place else NAIVE

    def source(self) -> KernelSource:
        """Its files; states that are variants as well bear the variant's name."""
        return self.expert.source(self.name) if self.name in self.expert.variants else self.lineage.sources[self.place]

    def case(self) -> KernelCase:
        """The paper's case, with what the kernel must reach."""
        chosen = paper_case(self.expert.operator, "gpu", self.reference)
        held = self.reference == VENDOR
        chosen = msgspec.structs.replace(chosen, at_least=AT_LEAST[self.expert.operator] if held else BASELINE_AT_LEAST)
        if self.name != EXPERT:
            return chosen
        words = tuple(word for word in self.expert.variants[EXPERT].techniques if word in INSTRUCTIONS)
        return msgspec.structs.replace(chosen, requires=words, max_spills=MAX_SPILLS)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted kernel of the study."""

    platform: str
    operator: str
    place: int
    kernel: str
    adds: str
    reference: str
    candidate_ms: float
    speedup: Interval
    """Over the reference."""
    device: str
    digest: str

    @property
    def key(self) -> tuple[str, int, str]:
        """What is measured only once."""
        return self.operator, self.place, self.reference


def chain(expert: Expert) -> list[Kernel]:
    """The kernels of one folder, naive first; the expert also against the vendor."""
    lineage = load_lineage(expert.directory / HAND_MADE)
    of_variant = {expert.source(name).digest: name for name in expert.variants}
    kernels = [
        Kernel(expert, lineage, place, of_variant.get(source.digest, source.label), REFERENCE)
        for place, source in enumerate(lineage.sources)
    ]
    return [*kernels, kernels[-1]._replace(reference=VENDOR)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each kernel and reference; in the compile stage one for each kernel."""
    from pytest_klineage.plugin.session import SESSION_KEY

    if "kernel" not in metafunc.fixturenames:
        return
    session = metafunc.config.stash[SESSION_KEY]
    on_gpu = session.platform != "cpu"
    found = {item.operator: item for item in find_experts(ROOT / "experts") if on_gpu and item.platform != "cpu"}
    kernels = [kernel for operator in OPERATORS if operator in found for kernel in chain(found[operator])]
    if session.gate_settings.stage == "compile":
        kernels = [kernel for kernel in kernels if kernel.reference == REFERENCE]
    metafunc.parametrize("kernel", kernels, ids=[kernel.id for kernel in kernels])


@pytest.fixture(scope="module")
def rows(
    klineage_session: KlineageSession, request: pytest.FixtureRequest
) -> Iterator[dict[tuple[str, int, str], Row]]:
    """Rows by key, those of earlier runs too; a table of all of them is written when the last kernel is judged."""
    folder = ROOT / "results" / "runs" / "gdn_case_study"
    path = folder / f"{klineage_session.platform}.jsonl"
    kept = read_rows(path)
    before = dict(kept)
    yield kept
    if kept == before:
        return
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(kept.values(), key=lambda row: (OPERATORS.index(row.operator), row.place, row.reference))
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ordered))
    table = table_of(ordered)
    path.with_suffix(".md").write_text(f"{table}\n")
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("")
        for line in table.splitlines():
            reporter.write_line(line)


def read_rows(path: Path) -> dict[tuple[str, int, str], Row]:
    """Rows of an earlier run. Raises BadRecord for a file of another form: it is not written over."""
    return {row.key: row for row in read_lines(path, Row)}


def row_of(kernel: Kernel, verdict: Verdict) -> Row:
    """What the table keeps of a scored verdict."""
    timing, machine = verdict.timing, verdict.machine
    if timing is None or machine is None:
        pytest.fail(f"{kernel.id}: a scored verdict without its times or its machine", pytrace=False)
    return Row(
        platform=machine.platform, operator=kernel.expert.operator, place=kernel.place, kernel=kernel.name,
        adds=kernel.adds, reference=kernel.reference, candidate_ms=timing.candidate_ms, speedup=timing.speedup,
        device=machine.device, digest=verdict.source_digest,
    )  # fmt: skip


def over(row: Row, base: Row | None) -> str:
    """How many times faster than `base`; both were paired with the same reference."""
    if base is None:
        return ""
    ratio = row.speedup.estimate / base.speedup.estimate
    low, high = row.speedup.low / base.speedup.high, row.speedup.high / base.speedup.low
    return f"{ratio:.3g}x [{low:.3g}, {high:.3g}]"


def table_of(rows: list[Row]) -> str:
    """Every kernel with its time, its speedup over naive, over the kernel before it, and over its reference."""
    by_key = {row.key: row for row in rows}
    cells = []
    for row in rows:
        own = row.reference == REFERENCE
        naive = by_key.get((row.operator, 0, REFERENCE)) if own and row.place else None
        before = by_key.get((row.operator, row.place - 1, REFERENCE)) if own else None
        cells.append(
            [
                row.operator,
                row.kernel,
                row.adds,
                f"{row.candidate_ms * 1000:.4g}",
                over(row, naive),
                over(row, before),
                f"{row.speedup.estimate:.3g}x {row.reference}",
            ]
        )
    headers = ["phase", "kernel", "adds", "us", "over naive", "over the kernel before", "over the reference"]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def test_gdn_case_study(kernel_gate: KernelGate, kernel: Kernel, rows: dict[tuple[str, int, str], Row]) -> None:
    """The gate accepts the kernel; what it takes goes into the table."""
    platforms = kernel.lineage.platforms_of(kernel.lineage.lineage.states[kernel.place])
    verdict = kernel_gate(kernel.source(), case=kernel.case(), platforms=platforms)
    if verdict.scored:
        row = row_of(kernel, verdict)
        rows[row.key] = row
