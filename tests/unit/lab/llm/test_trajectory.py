"""A trajectory is read back as it was written, wherever it was cut, and tells what was spent at most."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import BadRecord, StoreError, UsageError
from pytest_klineage.lab.llm.conversation import Prefix
from pytest_klineage.lab.llm.prices import Budget
from pytest_klineage.lab.llm.trajectory import Trajectory, read_trajectory, recorded_calls
from pytest_klineage.records import (
    Answered,
    Asked,
    Begun,
    Code,
    Event,
    Failed,
    Judged,
    Noted,
    StopReason,
    Usage,
    charged_usd,
    cost_curve,
    parse_trajectory,
    unanswered,
)

BEGUN = Begun(name="test", backend="scripted", model="toy", budget_usd=10.0)


def asked(call: int, reserved_usd: float = 0.5) -> Asked:
    return Asked(
        call=call, chat="main", digest="d", text="?\n\u2028ü", history=0, max_output_tokens=9, reserved_usd=reserved_usd
    )  # fmt: skip


def answered(call: int, cost_usd: float = 0.25) -> Answered:
    usage = Usage(model="toy", cost_usd=cost_usd)
    return Answered(call=call, text="!\n", stop_reason=StopReason.END, model="toy", usage=usage, ids={"message": "m"})


def judged(speedup: float | None, best: float | None) -> Judged:
    code = Code.MISMATCH if speedup is None else Code.ACCEPTED_FASTER
    return Judged(source_digest="s", code=code, verdict="records.jsonl:1", speedup=speedup, best_speedup=best)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "trajectory.jsonl"


def written(path: Path, *events: Event) -> None:
    with Trajectory.create(path, BEGUN) as trajectory:
        for event in events:
            trajectory.append(event)


def test_what_is_written_is_read_back(path: Path) -> None:
    events = (Noted(topic="a", text="line\nbreak \u2028 ü"), judged(None, None), Failed(
        call=3, reason="lost", message="m", cost_usd=1.0))  # fmt: skip
    written(path, *events)
    lines, warnings = read_trajectory(path)
    assert tuple(line.event for line in lines) == (BEGUN, *events)
    assert warnings == ()
    assert all(line.at.endswith("Z") for line in lines)
    with Trajectory.resume(path) as trajectory:
        assert trajectory.events == (BEGUN, *events)


def test_a_file_is_begun_once_and_written_by_one(path: Path) -> None:
    with Trajectory.create(path, BEGUN), pytest.raises(UsageError, match="another run"):
        Trajectory.resume(path)
    with pytest.raises(UsageError, match="exists: resume it"):
        Trajectory.create(path, BEGUN)
    Trajectory.resume(path).close()
    with pytest.raises(UsageError, match="no trajectory"):
        Trajectory.resume(path.with_name("absent"))
    with pytest.raises(UsageError, match="no trajectory"):
        read_trajectory(path.with_name("absent"))


def test_a_torn_last_line_is_reported_and_taken_away(path: Path) -> None:
    written(path, Noted(topic="a", text="b"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event":{"type":"Noted","to')
    assert "cut short" in read_trajectory(path)[1][0]
    with Trajectory.resume(path) as trajectory:
        assert "cut short" in trajectory.warnings[0]
        trajectory.append(Noted(topic="c", text="d"))
    lines, warnings = read_trajectory(path)
    assert [line.event for line in lines] == [BEGUN, Noted(topic="a", text="b"), Noted(topic="c", text="d")]
    assert warnings == ()


@pytest.mark.parametrize("bad", [b"{}\n", b"half\n", b"\n", b'{"event":{"type":"Nobody"},"at":""}\n'])
def test_a_line_that_was_changed_is_refused_by_number(path: Path, bad: bytes) -> None:
    written(path)
    path.write_bytes(path.read_bytes() + bad)
    with pytest.raises(BadRecord, match=r"trajectory\.jsonl, line 2"):
        read_trajectory(path)
    for _ in range(2):  # the first failure must not keep the file locked
        with pytest.raises(BadRecord):
            Trajectory.resume(path)


def test_another_schema_is_refused_with_both_versions(path: Path) -> None:
    written(path)
    path.write_bytes(path.read_bytes().replace(b'"schema_version":1', b'"schema_version":99'))
    with pytest.raises(BadRecord, match="99"):
        read_trajectory(path)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 2 kB, so that a write stops in the middle as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_leaves_the_file_as_it_was(path: Path) -> None:
    with Trajectory.create(path, BEGUN) as trajectory:
        before = path.read_bytes()
        for _ in range(2):
            with pytest.raises(StoreError):
                trajectory.append(Noted(topic="long", text="x" * 4000))
            assert path.read_bytes() == before
        assert trajectory.events == (BEGUN,)
        trajectory.append(Noted(topic="short", text="x"))
    assert len(read_trajectory(path)[0]) == 2


OUTCOMES = st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1), st.booleans()), max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(outcomes=OUTCOMES, share=st.floats(0, 1))
def test_a_file_cut_anywhere_tells_at_least_what_was_billed(
    tmp_path_factory: pytest.TempPathFactory, outcomes: list[tuple[float, float, bool]], share: float
) -> None:
    path = tmp_path_factory.mktemp("cut") / "t.jsonl"
    billed_usd = 0.0
    billed_from: list[tuple[int, float]] = [(0, 0.0)]
    with Trajectory.create(path, BEGUN) as trajectory:
        for call, (reserved_usd, part, fails) in enumerate(outcomes, start=1):
            trajectory.append(asked(call, reserved_usd))
            cost_usd = reserved_usd * part
            billed_usd += cost_usd
            billed_from.append((path.stat().st_size, billed_usd))
            failed = Failed(call=call, reason="timeout", message="", cost_usd=reserved_usd)
            trajectory.append(failed if fails else answered(call, cost_usd))
    data = path.read_bytes()
    kept = round(share * len(data))
    lines, _ = parse_trajectory(data[:kept])
    budget = Budget.restored(1000.0, [line.event for line in lines])
    billed_then = max(usd for size, usd in billed_from if size <= kept)
    assert budget.spent_usd + budget.reserved_usd >= billed_then - 1e-9


def test_sums_over_events() -> None:
    events = (
        BEGUN, asked(1), answered(1), judged(None, None), asked(2),
        Failed(call=2, reason="timeout", message="", cost_usd=0.5), asked(3), answered(3), judged(2.0, 2.0), asked(4),
    )  # fmt: skip
    assert charged_usd(events) == 1.0
    assert cost_curve(events) == ((0.25, None), (1.0, 2.0))
    assert unanswered(events) == {4: asked(4)}


def test_a_text_that_was_changed_by_hand_is_noticed() -> None:
    with pytest.raises(UsageError, match="does not fit its digest"):
        recorded_calls((BEGUN, asked(1), answered(1)))


def test_a_chat_has_one_prefix_and_one_owner(path: Path) -> None:
    with Trajectory.create(path, BEGUN) as trajectory:
        trajectory.open_chat("main", Prefix(system="a"))
        with pytest.raises(UsageError, match="open already"):
            trajectory.open_chat("main", Prefix(system="a"))
    with Trajectory.resume(path) as trajectory:
        trajectory.open_chat("main", Prefix(system="a"))
        assert len(trajectory.events) == 2
    with Trajectory.resume(path) as trajectory, pytest.raises(UsageError, match="another system prompt"):
        trajectory.open_chat("main", Prefix(system="b"))


def test_verdicts_are_recalled_once_and_in_order(path: Path) -> None:
    written(path, judged(1.0, 1.0), judged(2.0, 2.0))
    with Trajectory.resume(path) as trajectory:
        assert [trajectory.recall_verdict("s") for _ in range(3)] == [judged(1.0, 1.0), judged(2.0, 2.0), None]
        assert trajectory.recall_verdict("other") is None
