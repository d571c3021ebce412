"""Options of all suites, registered once: pytest refuses an option that two suites bring. What they mean is theirs.

Beside them what several suites need: progress lines, and the gate of replays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pytest_klineage import Gate, GateSettings, KlineageSession
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.lab.library.retrieval import DEFAULT_K
from pytest_klineage.lab.optimizers.recording import Rejudged, disagreements, lacks_instructions
from pytest_klineage.records import Verdict

ROOT = Path(__file__).resolve().parents[1]
QUICK = {"time_limit_s": 0.5, "precision": 0.2, "seeds": 1, "busy_limit": 1.0, "spread_limit": 1e6}
"""Of the gate of replays, which need only see whether a kernel is right. What the user gives counts."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("klineage suites")
    _optimizing(group)
    _admission(group)
    _gate_quality(group)
    group.addoption(
        "--for", type=float, metavar="MIN",
        help="Minutes after which flaggems, lineage/test_retime.py and gate_quality's A/A and detection on a CPU begin "
        "nothing further; the same command goes on. Needed to sweep points, and to time steps again.",
    )  # fmt: skip
    group.addoption(
        "--lineages", metavar="DIR", type=Path, default=ROOT / "experts",
        help="Where lineage/test_derive.py and test_spans.py read and write. Default: this repository's experts.",
    )  # fmt: skip


def _optimizing(group: pytest.OptionGroup) -> None:
    """Of ablations and head_to_head."""
    group.addoption(
        "--trials", type=int, metavar="N",
        help="Trials: of each kernel in ablations (default: 5), in all in an A/A of gate_quality (default: 200); "
        "problems of each level in gate_quality/test_imported_problems.py (default: 100).",
    )  # fmt: skip
    group.addoption(
        "--steps", type=int, metavar="N",
        help="Steps of each optimization, attempts of each trial in admission. Default: 8 in ablations, 256 in "
        "head_to_head, so that dollars end a run, 3 in admission.",
    )  # fmt: skip
    group.addoption(
        "--cards", type=int, default=DEFAULT_K, metavar="K",
        help="Cards retrieved in each dimension. Default: %(default)s.",
    )  # fmt: skip
    group.addoption("--skills", metavar="DIR", help="The library of cards. Default: skills in this repository.")
    group.addoption(
        "--ablation", action="append", metavar="NAME",
        help="Methods of ablations/test_generated_only.py, such as labels-only; repeatable. Default: generated-only.",
    )  # fmt: skip
    group.addoption("--runs", type=int, metavar="N", help="Runs of each method in head_to_head. Default: 3.")
    group.addoption(
        "--methods", action="append", metavar="NAME",
        help="Methods of head_to_head; repeatable, or between commas. Default: klineage, generated-only, adaexplore, "
        "accelopt.",
    )  # fmt: skip
    group.addoption(
        "--own-cards", action="store_true",
        help="In head_to_head, also cards that were lifted from the workload's own operator and shape; such runs are "
        "kept and shown apart.",
    )  # fmt: skip
    group.addoption(
        "--held-out-cards", action="store_true",
        help="In ablations/test_roundtrip_recovery.py, no cards that were lifted from the target's own operator and "
        "shape; such trials are kept and shown apart.",
    )  # fmt: skip
    group.addoption(
        "--rules", type=Path, metavar="FILE", help="Rules of other workloads that adaexplore-shared begins with."
    )
    group.addoption(
        "--language", metavar="SURFACE",
        help="Language of the kernels of head_to_head. Default: cpp on a CPU, cuda on a GPU.",
    )  # fmt: skip


def _admission(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--admission-skills", metavar="DIR", type=Path, default=ROOT / "skills",
        help="Where cards are read and written. Default: this repository's.",
    )  # fmt: skip
    group.addoption(
        "--admission-experts", metavar="DIR", type=Path, default=ROOT / "experts",
        help="Where lineages are read. Default: this repository's.",
    )  # fmt: skip
    group.addoption(
        "--admission-outlines", metavar="DIR", type=Path, default=ROOT / "results" / "foreign-sm90",
        help="Where outlines of lineages from kernels of others are read. Default: this repository's.",
    )  # fmt: skip
    group.addoption(
        "--admission-targets", metavar="FILE", type=Path, default=ROOT / "suites" / "admission" / "targets.toml",
        help="Shapes to try cards at. Default: suites/admission/targets.toml.",
    )  # fmt: skip


def _gate_quality(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--publish", action="store_true", help="Write tables and raw samples to results/, not results/runs/."
    )
    group.addoption("--reuse", metavar="FILE", help="Make the A/A table of the trials in FILE; measure nothing.")
    group.addoption(
        "--problems", metavar="DIR", type=Path,
        help="Of gate_quality/test_imported_problems.py: the folder KernelBench of a checkout of KernelBench.",
    )  # fmt: skip
    group.addoption(
        "--definitions", metavar="DIR", type=Path,
        help="Of gate_quality/test_imported_definitions.py: a folder of FlashInfer-Trace.",
    )  # fmt: skip
    group.addoption(
        "--verdicts", type=int, default=5, metavar="N",
        help="Verdicts by each evaluator, 2 at least. Default: %(default)s.",
    )  # fmt: skip


@pytest.fixture
def agree() -> Callable[[Sequence[Rejudged]], None]:
    """Holds a replay to the recorded classes. Skips the test where this processor cannot run a recorded kernel."""

    def hold(rejudged: Sequence[Rejudged]) -> None:
        if why := lacks_instructions(rejudged):
            pytest.skip(why)
        assert not (found := disagreements(rejudged)), found

    return hold


@pytest.fixture
def write_line(request: pytest.FixtureRequest, klineage_session: KlineageSession) -> Callable[[str], None]:
    """Writes a line to the terminal, past pytest's capture; silent with --klineage-progress=off and under xdist."""
    plugins = request.config.pluginmanager
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    silent = reporter is None or klineage_session.is_worker or klineage_session.settings.progress == "off"

    def write(line: str) -> None:
        if silent:
            return
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            reporter.ensure_newline()
            reporter.write_line(line)

    return write


@pytest.fixture(scope="session")
def quick_gate(klineage_session: KlineageSession) -> Iterator[Gate | ExecutorGate]:
    """The gate that replays of optimizations are judged by. Its processes start when it is first asked."""
    settings = GateSettings(**(QUICK | klineage_session.settings.gate))
    with klineage_session.gate_with(settings) as quick:
        yield quick


@pytest.fixture(scope="session")
def judged_before() -> dict[tuple[str, str], Verdict]:
    """Verdicts of this session's replays by case and source."""
    return {}
