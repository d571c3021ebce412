"""The 22 instances of FlagGems that no lineage comes from: four kernels for each, beside FlagGems at its best.

pytest suites/flaggems --platform cpu                                   # small shapes against PyTorch, on any machine
pytest suites/flaggems --platform sm90 --klineage-stage compile -n 8    # every kernel and point, without a device
pytest suites/flaggems/test_steering.py --platform cpu                  # the points are what the cards say
python suites/flaggems/tune.py --for 5                                  # FlagGems' tuner, three times a row
pytest suites/flaggems/test_sweep.py --platform sm90 --for 9            # points of the arms blind and card
pytest suites/flaggems/test_flaggems.py --platform sm90 [--for 9] [--klineage-method idiom] [-k 09-]
pytest suites/flaggems/test_flaggems.py --platform sm90 --for 9 --publish
pytest-klineage report --paper results/runs --figures build/figures     # Tables 7 and 9 beside the paper's

--for is in minutes, and --klineage-artifacts keeps what was built. With --for, what was judged on this device is not
judged again, and the same command goes on when time was up. The table has what earlier runs measured on the device too
(results/runs/flaggems). --publish copies tables and verdicts with their samples to results/flaggems-<platform>. arms.py
says what the arms are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from string import digits

import pytest
from arms import ARMS, NO_CARDS, card_points, read_choices, source_of, to_build
from rows import ROWS, Row
from table import TEXT, Measured, append, measured, on_device, publish, read, skip_unless_due, tables

from pytest_klineage import KernelGate, KlineageSession, UnknownName
from pytest_klineage.plugin.session import SESSION_KEY
from pytest_klineage.records import KernelSource, to_json
from pytest_klineage.results.runs import Record

REFERENCE = {"cpu": "torch"}
"""By platform; FlagGems on the others."""
CPU_ARMS = ("cpu",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each row and arm; in the compile stage one for each kernel and configuration."""
    session = metafunc.config.stash[SESSION_KEY]
    arms = arms_of(session)
    if session.gate_settings.stage == "compile" and session.platform != "cpu":
        found = [(row, name, source) for row, name, source in to_build(ROWS) if name.rstrip(digits) in arms]
    else:
        found = [(row, arm, None) for row in ROWS for arm in arms]
    metafunc.parametrize(
        ("row", "arm", "built"), found, ids=[f"{row.name(session.platform)}-{arm}" for row, arm, _ in found]
    )


def arms_of(session: KlineageSession) -> tuple[str, ...]:
    """The arms that --klineage-method names, else all of the platform."""
    known = CPU_ARMS if session.platform == "cpu" else ARMS
    if "method" not in session.settings.given:
        return known
    for name in session.methods:
        if name not in known:
            pytest.fail(f"klineage: {UnknownName('arm', name, known)}", pytrace=False)
    return session.methods


@pytest.fixture(scope="module")
def results(klineage_session: KlineageSession) -> Path:
    """Where this suite keeps what it measures."""
    folder = klineage_session.settings.results / "runs" / "flaggems"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def kept(klineage_session: KlineageSession, results: Path, request: pytest.FixtureRequest) -> Iterator[list[Measured]]:
    """Takes what is measured; at the end all of it, with earlier runs', is printed by family."""
    new: list[Measured] = []
    yield new
    platform = klineage_session.platform
    goes_on = request.config.getoption("--for") and klineage_session.gate_settings.stage == "all"
    device = new[-1].device if new else klineage_session.gate.machine().device if goes_on else ""
    everything = on_device(read(results / f"{platform}.jsonl"), device)
    if not everything:
        return
    arms = CPU_ARMS if platform == "cpu" else ARMS
    absent = {} if platform == "cpu" or card_points() else {"card": NO_CARDS}
    text = tables(everything.values(), arms, absent)
    (results / f"{platform}.md").write_text(f"{text}\n")
    request.config.stash[TEXT] = text
    if request.config.getoption("--publish"):
        publish(results, klineage_session.settings.results / f"flaggems-{platform}", platform)


def test_flaggems(
    kernel_gate: KernelGate, row: Row, arm: str, built: KernelSource | None, kept: list[Measured], results: Path,
    until: float, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """The gate accepts the kernel; what it takes goes into the table."""
    platform = kernel_gate.session.platform
    chosen = read_choices(results / f"choices-{platform}.json").get((row.number, arm))
    source = built or source_of(row, arm, chosen)
    if isinstance(source, str):
        pytest.skip(f"{row.name(platform)}, {arm}: {source}")
    if until:
        device = request.getfixturevalue("device")
        skip_unless_due(results / f"{platform}.jsonl", device, row, arm, source.digest, until)
    verdict = kernel_gate(source, case=row.case(platform, REFERENCE.get(platform, "flaggems"), arm.rstrip(digits)))
    if verdict.scored:
        with (results / f"{platform}-verdicts.jsonl").open("ab") as file:
            file.write(to_json(Record(nodeid=request.node.nodeid, verdict=verdict)) + b"\n")
        one = measured(row, arm, platform, verdict)
        kept.append(one)
        append(results / f"{platform}.jsonl", one)
