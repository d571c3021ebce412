"""Which point the arms blind and card take for each row, which kernel the arm expert: the fastest of short judgements.

pytest suites/flaggems/test_sweep.py --platform sm90 --for 9 [--klineage-method blind] [-k "09- or 10-"]
pytest suites/flaggems/test_sweep.py --platform sm90 --klineage-executor batch:DIR      # on a GPU elsewhere

A judgement ends once its interval excludes the arm's best, or after a second; points of a row share FlagGems' process.
Elsewhere all points are asked for at once, so there it ends once the interval excludes FlagGems' time; the estimates
that decide are then of six pairs at the least.
The same command goes on where the last one stopped: points that are in results/runs/flaggems/sweep-<platform>.jsonl are
not judged again. The verdicts with their samples lie beside it, and choices-<platform>.json; test_flaggems.py judges
what was chosen in another run, with other inputs, and only its times are reported. A point that fails is data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from string import digits

import msgspec
import pytest
from arms import SWEPT, Chosen, at_point, card_points, points_of
from rows import ROWS, Row
from table import Key, Measured, append, known, measured, on_device, read, skip_unless_due

from pytest_klineage import Gate, GateSettings, KlineageSession
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.plugin.session import SESSION_KEY
from pytest_klineage.records import to_json

SHORT = {"precision": 0.02, "seeds": 1}
"""Of a point's judgement: what is chosen is judged again in full. What the user gives counts."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each row, arm and point; none on a CPU, without --for or an executor, or of cards that are missing."""
    session = metafunc.config.stash[SESSION_KEY]
    asked = session.platform != "cpu" and (metafunc.config.getoption("--for") or session.elsewhere)
    arms = session.methods if "method" in session.settings.given else SWEPT
    found = [
        (row, arm, i) for row in ROWS if asked for arm in SWEPT if arm in arms
        for i in range(len(points_of(arm, row)))
    ]  # fmt: skip
    metafunc.parametrize(
        ("row", "arm", "position"), found, ids=[f"{row.name(session.platform)}-{arm}-{i}" for row, arm, i in found]
    )


@pytest.fixture(scope="module")
def short_gate(klineage_session: KlineageSession) -> Iterator[Gate | ExecutorGate]:
    """The gate with little time for each judgement."""
    with klineage_session.gate_with(GateSettings(**(SHORT | klineage_session.settings.gate))) as gate:
        yield gate


@pytest.fixture(scope="module")
def swept(klineage_session: KlineageSession, device: str) -> Iterator[Path]:
    """The file of all points; when the last one is judged, the choices are written beside it."""
    platform = klineage_session.platform
    path = klineage_session.settings.results / "runs" / "flaggems" / f"sweep-{platform}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path
    made = choices(on_device(read(path), device), platform)
    if made:
        (path.parent / f"choices-{platform}.json").write_bytes(msgspec.json.format(msgspec.json.encode(made)))


def choices(found: dict[Key, Measured], platform: str) -> list[Chosen]:
    """The fastest point of each row and arm. A configuration that two arms share was judged once."""
    made = []
    for row in ROWS:
        for arm in SWEPT:
            points = points_of(arm, row)
            judged = [(known(found, row, at_point(row, arm, point, arm).digest), point) for point in points]
            timed = [(one.speedup.estimate, point) for one, point in judged if one is not None and one.speedup]
            if timed:
                speedup, best = max(timed, key=lambda item: item[0])
                cards = card_points()[row.number].cards if arm == "card" else ()
                made.append(
                    Chosen(row=row.number, arm=arm, point=best, speedup=speedup, platform=platform, cards=cards)
                )
    return made


def best_so_far(found: dict[Key, Measured], row: Row, arm: str) -> float:
    """The largest speedup of a row's points of an arm; 1 before the first."""
    own = (one for one in found.values() if one.row == row.number and one.arm.rstrip(digits) == arm)
    return max((one.speedup.estimate for one in own if one.speedup is not None), default=1.0)


def test_point(
    klineage_session: KlineageSession, short_gate: Gate, swept: Path, until: float, device: str,
    write_line: Callable[[str], None], row: Row, arm: str, position: int,
) -> None:  # fmt: skip
    """Judge one point, unless it is known or time is up."""
    source = at_point(row, arm, points_of(arm, row)[position], f"{arm}{position}")
    skip_unless_due(swept, device, row, f"{arm}{position}", source.digest, until)
    case = row.case(klineage_session.platform, "flaggems", arm)
    known_best = 1.0 if klineage_session.elsewhere else best_so_far(on_device(read(swept), device), row, arm)
    verdict = short_gate.judge(case, source, screen_against=known_best)
    # Not among the runs: a report shows what was chosen, from its own run.
    with swept.with_name(f"sweep-{klineage_session.platform}-verdicts.jsonl").open("ab") as file:
        file.write(to_json(verdict) + b"\n")
    one = measured(row, f"{arm}{position}", klineage_session.platform, verdict)
    append(swept, one)
    said = f"{one.speedup.estimate:.3f}x FlagGems" if one.speedup else one.code
    write_line(f"{row.name(klineage_session.platform)} {arm}{position} {points_of(arm, row)[position]}: {said}")
