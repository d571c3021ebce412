"""Tests whose turn ends at something that has not come yet: how they are counted, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_klineage.errors import Waiting, WaitsForReply

WAITING_EXIT = 8
"""Exit status of a run in which nothing failed and something waits; pytest itself uses 0 to 5."""
WAITING_ATTRIBUTE = "klineage_waiting"
"""Where a test report says for what the test waits, as plain data."""
VERDICT, REPLY = "verdict", "reply"


def ending_turn(waiting: Waiting) -> tuple[str, str]:
    """What a test waits for, VERDICT or REPLY, and where that is expected."""
    return (REPLY if isinstance(waiting, WaitsForReply) else VERDICT), waiting.where


def waiting_line(waiting: Sequence[tuple[str, str]], base: Path) -> str:
    """How many wait for what, and what to do; `base` is the directory that shown paths are relative to."""
    count = len(waiting)
    verdicts = [where for kind, where in waiting if kind == VERDICT]
    replies = [where for kind, where in waiting if kind == REPLY]
    parts = []
    if verdicts:
        commands = ", ".join(f"pytest-klineage judge {_shown(where, base)}" for where in dict.fromkeys(verdicts))
        parts.append(f"{_wait(len(verdicts))} for verdicts ({commands})")
    if replies:
        folders = list(dict.fromkeys(_shown(str(Path(where).parent), base) for where in replies))
        parts.append(f"{_wait(len(replies))} for replies ({', '.join(f'{folder}/...' for folder in folders)})")
    chains = "chain" if count == 1 else "chains"
    return f"klineage: {count} {chains}: {', '.join(parts)}; then the same command goes on"


def _wait(count: int) -> str:
    return f"{count} {'waits' if count == 1 else 'wait'}"


def _shown(text: str, base: Path) -> str:
    path = Path(text)
    return str(path.relative_to(base)) if path.is_relative_to(base) and path != base else text
