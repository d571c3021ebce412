"""A screening through the whole gate: what it checks, what its record says, and that it is no figure to publish."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import HarnessError, UsageError
from pytest_klineage.gate import Gate
from pytest_klineage.gate.context import JudgementContext
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.records import Code, KernelCase, KernelSource, KernelTime
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


def kept(gate: Gate) -> int | None:
    """The process of the reference that is kept for the next screening."""
    found = gate._context.shared._kept
    return None if found is None else found.worker.id


def test_screenings_of_a_case_share_a_reference(gate: Gate, case: Case, cpp: Cpp) -> None:
    """Whatever their kernels do: only the candidate is a new process."""
    gate.judge(case(), cpp(), screen_against=1e6)
    first = kept(gate)
    assert first is not None
    for changed, code in (
        ({"after": "cp[0] += 1;"}, Code.MISMATCH), ({"after": "abort();"}, Code.CRASH), ({"after": "x"}, Code.COMPILE),
    ):  # fmt: skip
        assert gate.judge(case(), cpp(**changed), screen_against=1e6).code is code
        assert kept(gate) == first
    assert gate.judge(case(), cpp(), screen_against=1e6).ranked
    assert kept(gate) == first


@pytest.mark.parametrize("why", ["a full judgement", "another case", "a kernel for a reference"])
def test_a_shared_reference_ends_before_others_start(gate: Gate, case: Case, cpp: Cpp, why: str) -> None:
    gate.judge(case(), cpp(), screen_against=1e6)
    process = kept(gate)
    assert process is not None
    other = msgspec.structs.replace(case(), shape={"M": 8, "N": 8, "K": 8}) if why == "another case" else case()
    screened = None if why == "a full judgement" else 1e6
    stands_in = cpp(before="rows = rows + 0;") if why == "a kernel for a reference" else None
    assert gate.judge(other, cpp(), screen_against=screened, reference_source=stands_in).ranked
    assert kept(gate) != process
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_closed_gate_keeps_nothing(case: Case, cpp: Cpp, tmp_path: Path) -> None:
    settings = GateSettings(
        time_limit_s=0.3, precision=0.3, busy_limit=1.0, spread_limit=1e6, flush_bytes=1 << 20, cache_dir=tmp_path
    )
    with Gate("cpu", settings) as gate:
        gate.judge(case(), cpp(), screen_against=1e6)
        process, found = kept(gate), gate._context.shared._kept
        assert process is not None
        assert found is not None
        gate.close()
        assert kept(gate) is None
        assert not Path(found.worker.workdir).exists()
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        assert gate.judge(case(), cpp(), screen_against=1e6).ranked


def test_a_shared_reference_that_died_costs_one_judgement(gate: Gate, case: Case, cpp: Cpp) -> None:
    """It is our fault and no verdict; the next judgement starts another."""
    gate.judge(case(), cpp(), screen_against=1e6)
    process = kept(gate)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    with pytest.raises(HarnessError):
        gate.judge(case(), cpp(), screen_against=1e6)
    assert kept(gate) is None
    assert gate.judge(case(), cpp(), screen_against=1e6).ranked


def test_a_reference_is_traced_once_for_screenings(gate: Gate, case: Case, cpp: Cpp) -> None:
    """Without a GPU: its kernels' names are those of the variant that is screened against, and of that case."""
    executed = (KernelTime(name="k", calls=1, total_ns=5),)
    first = JudgementContext(gate._context, case(), cpp(), None, screen_against=1.0)
    first.reference_facts = {"variant": "a"}
    assert first.named_before() == ()
    first.name_reference(executed)
    assert first.reference_traced
    other = msgspec.structs.replace(case(), shape={"M": 8, "N": 8, "K": 8})
    for asked, variant, against, known in (
        (case(), "a", 1.0, executed), (case(), "b", 1.0, ()), (other, "a", 1.0, ()), (case(), "a", None, ()),
    ):  # fmt: skip
        again = JudgementContext(gate._context, asked, cpp(), None, screen_against=against)
        again.reference_facts = {"variant": variant}
        assert again.named_before() == known
