"""Tests whose turn ends at something that has not come yet: how they are counted, said, and run again.

Those that wait for verdicts of a Ray cluster are run again in the same session, when their verdicts have come. A first
pass asks for everything, so that every judge has work; a turn that ended at a verdict leaves no trace.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

from pytest_klineage.errors import Waiting, WaitsForReply
from pytest_klineage.plugin.options import is_ray

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_klineage.plugin.session import KlineageSession
    from pytest_klineage.records import Verdict

WAITS_KEY = pytest.StashKey[tuple[str, str]]()
"""What a test waits for, and where that is expected."""
REQUEST_KEY = pytest.StashKey[str]()
"""Digest of the request whose verdict a test waits for."""
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
        commands = ", ".join(_judged_by(where, base) for where in dict.fromkeys(verdicts))
        parts.append(f"{_wait(len(verdicts))} for verdicts ({commands})")
    if replies:
        folders = list(dict.fromkeys(_shown(str(Path(where).parent), base) for where in replies))
        parts.append(f"{_wait(len(replies))} for replies ({', '.join(f'{folder}/...' for folder in folders)})")
    chains = "chain" if count == 1 else "chains"
    return f"klineage: {count} {chains}: {', '.join(parts)}; then the same command goes on"


def _wait(count: int) -> str:
    return f"{count} {'waits' if count == 1 else 'wait'}"


def _judged_by(where: str, base: Path) -> str:
    return f"pytest-klineage judges {where}" if is_ray(where) else f"pytest-klineage judge {_shown(where, base)}"


def _shown(text: str, base: Path) -> str:
    path = Path(text)
    return str(path.relative_to(base)) if path.is_relative_to(base) and path != base else text


WAIT_S = 1.0
SAY_EVERY_S = 30.0


class SessionTurns:
    """pytest's hooks of a run whose verdicts come from a cluster."""

    def __init__(self, session: KlineageSession, write: Callable[[str, Verdict], None]) -> None:
        self.session = session
        self._write = write
        self._waiting: list[pytest.Item] = []
        self._verdicts: list[tuple[str, Verdict]] = []
        self._doubts: list[str] = []
        self._said_at = time.monotonic()
        session.write_with(lambda nodeid, verdict: self._verdicts.append((nodeid, verdict)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """One turn of a test. Without a next one its module and session stay set up: tests may come back."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        follower = nextitem or item.parent
        reports = runtestprotocol(item, log=False, nextitem=follower)  # type: ignore[arg-type]  # any node has a chain
        verdicts, self._verdicts = self._verdicts, []
        if any(getattr(report, WAITING_ATTRIBUTE, [""])[0] == VERDICT for report in reports):
            self._waiting.append(item)
        else:
            for nodeid, verdict in verdicts:
                self._write(nodeid, verdict)
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, bool, bool]:
        """After the first pass, go on until nothing waits for a verdict."""
        result = yield
        while self._waiting and not (session.shouldstop or session.shouldfail):
            came = self.session.cluster.collect(WAIT_S)
            self._say()
            ready = [item for item in self._waiting if item.stash.get(REQUEST_KEY, "") in ("", *came)]
            self._run(session, ready)
        self._finish()
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Verdicts of judges that went into quarantine after them."""
        for line in self._doubts:
            terminalreporter.write_line(line, yellow=True, bold=True)

    def _run(self, session: pytest.Session, items: Sequence[pytest.Item]) -> None:
        for index, item in enumerate(items):
            self._waiting.remove(item)
            renew(item)
            following = items[index + 1] if index + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldstop or session.shouldfail:
                return

    def _finish(self) -> None:
        """Keep the answers of an interrupted run for the next call; those of a finished one become its record."""
        cluster = self.session.joined_cluster
        if cluster is not None and not self._waiting:
            cluster.collect(0.0)
            self._doubts = cluster.doubt_lines()
            cluster.finish()

    def _say(self) -> None:
        if time.monotonic() < self._said_at + SAY_EVERY_S:
            return
        self._said_at = time.monotonic()
        reporter = self.session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None and self.session.settings.progress != "off":
            reporter.ensure_newline()
            reporter.write_line(self.session.cluster.progress())


def renew(item: pytest.Item) -> None:
    """Have a test that was run begin again, with fixtures of its own."""
    if WAITS_KEY in item.stash:
        del item.stash[WAITS_KEY], item.stash[REQUEST_KEY]
    item._report_sections.clear()
    if isinstance(item, pytest.Function):
        item._initrequest()
