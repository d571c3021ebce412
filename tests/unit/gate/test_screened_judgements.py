"""A screening through the whole gate: what it checks, what its record says, and that it is no figure to publish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.gate import Gate
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.records import Code, KernelCase, KernelSource
from pytest_klineage.references.functions import named_file
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


REFERENCES = """
from pathlib import Path
import time

def fast(a, b):
    return a @ b

def slow(a, b):
    with (Path(__file__).parent / "calls").open("a") as calls:
        calls.write("x")
    time.sleep(0.003)
    return a @ b
"""


def test_variants_are_compared_once_for_screenings(gate: Gate, case: Case, cpp: Cpp, tmp_path: Path) -> None:
    """What a screening keeps is judged in full, and there the variants of the reference are compared again."""
    (tmp_path / "refs.py").write_text(REFERENCES)
    written = [f"{named_file(tmp_path / 'refs.py', 'refs.py')}:{name}" for name in ("slow", "fast")]
    asked = msgspec.structs.replace(case(), reference=written[0], reference_variants=tuple(written[1:]))
    calls, verdicts = [0], []
    for screen_against in (1e6, 1e6, None):
        verdicts.append(gate.judge(asked, cpp(), screen_against=screen_against))
        assert verdicts[-1].ranked, verdicts[-1].reasons
        calls.append(len((tmp_path / "calls").read_text()))
    assert calls[0] < calls[1] == calls[2] < calls[3]
    assert {verdict.reference["variant"] for verdict in verdicts} == {"refs.py:fast"}
    assert verdicts[0].reference == verdicts[1].reference
    assert "variant_ms.refs.py:slow" in verdicts[1].reference


def test_a_wrong_kernel_is_not_screened(gate: Gate, case: Case, cpp: Cpp) -> None:
    """It was never timed: its verdict is the one that a full judgement gives."""
    wrong = cpp(after="cp[0] += 1;")
    verdict = gate.judge(case(), wrong, screen_against=1.0)
    assert (verdict.code, verdict.screened, verdict.ranked) == (Code.MISMATCH, None, False)


def test_a_fixed_count_cannot_screen(case: Case, cpp: Cpp) -> None:
    with Gate("cpu", GateSettings(policy="paper")) as gate, pytest.raises(UsageError, match="screening needs paired"):
        gate.judge(case(), cpp(), screen_against=1.0)
