"""In which order both sides of a timing are ended and started again."""

from __future__ import annotations

from types import SimpleNamespace

from pytest_klineage.gate.context import JudgementContext
from pytest_klineage.records.messages import Job
from pytest_klineage.records.template_messages import WorkerExit


def restarted() -> list[str]:
    """What one restart does, in its order: "end", "launch" or "attach" and the side."""
    did: list[str] = []

    def worker(role: str) -> SimpleNamespace:
        def end() -> WorkerExit:
            did.append(f"end {role}")
            return WorkerExit()

        return SimpleNamespace(end=end, log=SimpleNamespace(text=lambda: ""))

    sides = ("reference", "candidate")
    JudgementContext.restart(
        SimpleNamespace(  # type: ignore[arg-type]  # what a restart touches
            workers={role: worker(role) for role in sides},
            jobs={role: (Job(surface="python"), "none") for role in sides},
            processes=SimpleNamespace(ask_oracle=lambda *_: None),
            libraries=set(),
            log="",
            reference_facts={},
            _launch=lambda role, *_: did.append(f"launch {role}"),
            _attach=lambda role: did.append(f"attach {role}"),
        )
    )
    return did


def test_both_sides_end_before_one_starts_and_the_first_is_drawn() -> None:
    orders = [restarted() for _ in range(40)]
    for did in orders:
        assert did[:2] == ["end reference", "end candidate"]
        launched = [one.removeprefix("launch ") for one in did[2:4]]
        assert sorted(launched) == ["candidate", "reference"]
        assert did[4:] == [f"attach {role}" for role in launched]
    # Forty draws agree once in 5e11 runs.
    assert len({did[2] for did in orders}) == 2
