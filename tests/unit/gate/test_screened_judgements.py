"""A screening through the whole gate: what it checks, what its record says, and that it is no figure to publish."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.gate import Gate
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.records import Code, KernelCase, KernelSource
from pytest_klineage.report.tables import speedup_text

Case = Callable[..., KernelCase]
Cpp = Callable[..., KernelSource]


def test_a_right_kernel_is_screened(gate: Gate, case: Case, cpp: Cpp) -> None:
    """All input distributions are checked; the record says against what it was screened, and counts for nothing but a
    search."""
    full, screened = gate.judge(case(), cpp()), gate.judge(case(), cpp(), screen_against=1e6)
    assert [check.input_distribution for check in screened.checks[: len(full.checks)]] == [
        check.input_distribution for check in full.checks
    ]
    assert screened.timing is not None
    assert (screened.screened, screened.timing.stopped) == (1e6, "excluded")
    assert (screened.ranked, screened.scored) == (True, False)
    assert (full.screened, full.ranked, full.scored) == (None, True, True)
    assert speedup_text(screened) == "-"


def test_a_wrong_kernel_is_not_screened(gate: Gate, case: Case, cpp: Cpp) -> None:
    """It was never timed: its verdict is the one that a full judgement gives."""
    wrong = cpp(after="cp[0] += 1;")
    verdict = gate.judge(case(), wrong, screen_against=1.0)
    assert (verdict.code, verdict.screened, verdict.ranked) == (Code.MISMATCH, None, False)


def test_a_fixed_count_cannot_screen(case: Case, cpp: Cpp) -> None:
    with Gate("cpu", GateSettings(policy="paper")) as gate, pytest.raises(UsageError, match="screening needs paired"):
        gate.judge(case(), cpp(), screen_against=1.0)
