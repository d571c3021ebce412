"""What the admission suite reads at collection: trajectories as they begin and end."""

from __future__ import annotations

from pathlib import Path

from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.records import Begun, Event, Noted


def events_of(trajectory: Path) -> list[Event]:
    """Everything in a stored trajectory."""
    lines, _ = read_trajectory(trajectory)
    return [line.event for line in lines]


def begun_of(trajectory: Path) -> Begun:
    """How a stored trajectory begins."""
    return next(event for event in events_of(trajectory) if isinstance(event, Begun))


def noted(trajectory: Path, *topics: str) -> Noted | None:
    """The last note on one of these topics."""
    notes = [event for event in events_of(trajectory) if isinstance(event, Noted) and event.topic in topics]
    return notes[-1] if notes else None
