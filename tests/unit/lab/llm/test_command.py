"""Real programs as models: the prompt goes in whole, the reply comes out whole, and every bad end has a name."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.command import CommandBackend
from pytest_klineage.lab.llm.conversation import Conversation, Prefix, Role, Turn, as_markdown
from pytest_klineage.lab.llm.faults import BackendFailed, Failure
from pytest_klineage.lab.llm.prices import Prices

QUESTION = Conversation(
    prefix=Prefix(system="be brief", context=("x" * 300_000,)), turns=(Turn(Role.USER, "wärum?\n"),)
)  # fmt: skip
MAKE = Callable[..., CommandBackend]


@pytest.fixture
def make(prices: Prices, tmp_path: Path) -> MAKE:
    """Makes a backend that runs a piece of Python."""

    def make_backend(program: str, **options: Any) -> CommandBackend:
        path = tmp_path / "program.py"
        path.write_text("import os, sys, time\n" + textwrap.dedent(program))
        return CommandBackend([sys.executable, str(path)], prices, **{"model": "toy", "timeout_s": 30.0, **options})

    return make_backend


def failure(backend: CommandBackend) -> BackendFailed:
    with pytest.raises(BackendFailed) as caught:
        backend.reply(QUESTION, max_output_tokens=100, call=1)
    return caught.value


def test_the_prompt_goes_in_and_the_reply_comes_out(make: MAKE) -> None:
    backend = make("sys.stdout.buffer.write(sys.stdin.buffer.read())")
    reply = backend.reply(QUESTION, max_output_tokens=100, call=1)
    assert reply.text == as_markdown(QUESTION)
    assert reply.model == "toy"


def test_usage_is_estimated_and_labelled(make: MAKE) -> None:
    reply = make("print('abcde', end='')").reply(QUESTION, max_output_tokens=100, call=1)
    assert reply.usage.estimated
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (QUESTION.estimated_tokens, 2)
    assert reply.usage.cost_usd == pytest.approx((reply.usage.input_tokens + 2 * 5) / 1e6)


def test_the_reservation_covers_a_reply_within_the_limit(make: MAKE) -> None:
    backend = make("print('abc' * 100, end='')")
    reserved = backend.worst_case_usd(QUESTION, 100)
    assert backend.reply(QUESTION, max_output_tokens=100, call=1).usage.cost_usd == pytest.approx(reserved)


def test_a_bad_status_shows_the_end_of_stderr(make: MAKE) -> None:
    found = failure(make("print('never a reply'); sys.stderr.write('x' * 100_000 + '\\x1b[31mno credit'); sys.exit(3)"))
    assert (found.failure, found.billed) == (Failure.COMMAND, True)
    assert "ended with status 3" in str(found)
    assert "no credit" in str(found)
    assert "\x1b" not in str(found)
    assert len(str(found)) < 4000


def test_a_signal_is_a_bad_status(make: MAKE) -> None:
    assert "status -9" in str(failure(make("os.kill(os.getpid(), 9)")))


def test_a_slow_program_is_ended_with_its_children(make: MAKE, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    found = failure(
        make(
            f"""
            child = os.fork()
            if child: open({str(mark)!r}, 'w').write(str(child))
            time.sleep(60)
            """,
            timeout_s=1.0,
        )
    )
    assert (found.failure, found.billed) == (Failure.TIMEOUT, True)
    assert_gone(int(mark.read_text()))


def assert_gone(pid: int) -> None:
    """The process has ended, or is about to be reaped."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def test_a_grandchild_that_holds_the_pipe_does_not_hold_us(make: MAKE, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    backend = make(
        f"""
        child = os.fork()
        if child == 0: time.sleep(60); os._exit(0)
        open({str(mark)!r}, 'w').write(str(child))
        print('reply', flush=True)
        os._exit(0)
        """
    )
    started = time.monotonic()
    assert backend.reply(QUESTION, max_output_tokens=100, call=1).text == "reply\n"
    assert time.monotonic() - started < 20
    assert_gone(int(mark.read_text()))


def test_output_closed_early_does_not_hold_us(make: MAKE) -> None:
    found = failure(make("os.close(1); os.close(2); time.sleep(60)", timeout_s=1.0))
    assert found.failure is Failure.TIMEOUT


def test_a_flood_is_cut_off(make: MAKE) -> None:
    found = failure(make("\nwhile True: os.write(1, b'x' * 65536)", limit_bytes=1_000_000))
    assert (found.failure, found.billed) == (Failure.TOO_LONG, True)


def test_what_is_no_text_is_no_reply(make: MAKE) -> None:
    assert failure(make("os.write(1, b'\\xff\\xfe')")).failure is Failure.NOT_TEXT


def test_a_program_that_reads_nothing_is_fine(make: MAKE) -> None:
    assert make("print('ok')").reply(QUESTION, max_output_tokens=1, call=1).text == "ok\n"


@pytest.mark.parametrize("argv", [[], ["no-such-program-anywhere"], [__file__]])
def test_a_missing_program_is_reported_before_reserving(argv: list[str], prices: Prices) -> None:
    with pytest.raises(UsageError, match="names no program"):
        CommandBackend(argv, prices, model="toy")


def test_a_program_that_cannot_be_started_costs_nothing(prices: Prices, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    found = failure(CommandBackend([str(program)], prices, model="toy"))
    assert (found.failure, found.billed) == (Failure.COMMAND, False)
