"""The PR gate by pair on a CPU: kernels with a busy loop of 3 to 20 % against themselves without, margin 3 %.

pytest suites/gate_quality/test_detection.py --platform cpu -k topk --trials 5     five more rounds of one kernel
pytest suites/gate_quality/test_detection.py --platform cpu --publish --reuse results/runs/gate_quality/detection.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from detection import UNCHANGED, Judged, found_of, run_round, short_of, slowed_on_cpu, table, was_disturbed
from on_gpu import kept_rows, results_file

from pytest_klineage import GateSettings
from pytest_klineage.gate import Gate
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelSource, Verdict
from pytest_klineage.report.compare import MARGIN, precision_for

OPERATORS = ("topk", "gdn", "fmha", "conv2d", "gemm")
LEVELS = (0.03, 0.05, 0.1, 0.2)
TARGETS = (0.0, 0.5, 0.95, 1.0)
ROUNDS = 5
"""Of each kernel, unless --trials says otherwise: five trials of each slowdown, twenty of the unchanged kernel."""
TIME_LIMIT_S = 3.0
NAME = "detection"


def report_of(judged: list[Judged]) -> str:
    """The page with its table."""
    machine = judged[-1].verdict.machine
    where = f"{machine.device}, {machine.cores} cores" if machine else ""
    days = " and ".join(sorted({one.verdict.judged_at[:10] for one in judged}))
    false = found_of(judged, UNCHANGED, MARGIN)
    return "\n".join(
        [
            f"# The PR gate by pair on a CPU: what it finds at a margin of {100 * MARGIN:g} %",
            "",
            f"{where}, {days}. An expert kernel with a busy loop behind its work against the same kernel with one "
            f"of 0 ns, as `--klineage-base` judges, `--klineage-time-limit={TIME_LIMIT_S:g}`; a change that one "
            "judgement finds has to be confirmed by the next one of the same kernels. False alarms: "
            f"{false.slower} slower, {false.changed - false.slower} faster in {false.trials}. On a busy machine, or "
            f"with unstable times, were {was_disturbed(judged)} of {len(judged)} judgements; a trial with one of them "
            "is `unclear`.",
            "",
            *table(judged, LEVELS, TARGETS, MARGIN, OPERATORS),
            "",
            f"Raw samples: `{NAME}.jsonl`.",
        ]
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_detection(
    operator: str, request: pytest.FixtureRequest, expert_source: Callable[[str], KernelSource],
    publish: Callable[[str, str, list[Judged]], None],
) -> None:  # fmt: skip
    """Adds rounds of one kernel to what has been measured, and publishes all of it."""
    if request.config.getoption("--reuse"):
        pytest.skip("measures nothing")
    case, source = paper_case(operator, "cpu", "torch"), expert_source(operator)
    case = msgspec.structs.replace(case, at_least=1.0)
    path = results_file(request.config, NAME)
    path.parent.mkdir(parents=True, exist_ok=True)

    def keep(one: Judged) -> None:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(one) + b"\n")

    with Gate("cpu", GateSettings(time_limit_s=TIME_LIMIT_S)) as gate:
        base = slowed_on_cpu(source, 0)
        first = gate.judge(case, base, reference_source=base)
        assert first.timing is not None, f"{first.code}: {first.reasons[0].message}"
        slowed = {by: slowed_on_cpu(source, 1e6 * by * first.timing.reference_ms) for by in LEVELS}

        def judge(by: float) -> Verdict:
            head = slowed.get(by, base)
            return gate.judge(case, head, reference_source=base, precision=precision_for(MARGIN))

        for number in range(request.config.getoption("--trials") or ROUNDS):
            run_round(judge, LEVELS, operator, number, keep)
    judged = kept_rows(path, Judged, without=lambda row: False)
    publish(NAME, report_of(judged), judged)


def test_what_is_asked_is_found(
    request: pytest.FixtureRequest, publish: Callable[[str, str, list[Judged]], None]
) -> None:
    """Kernels slowed by 5, 10 and 20 % are found in 50, 95 and 100 %; no unchanged kernel is accused."""
    reuse = request.config.getoption("--reuse")
    path = Path(reuse) if reuse else results_file(request.config, NAME)
    judged = kept_rows(path, Judged, without=lambda row: False) if path.exists() else []
    if {one.operator for one in judged} != set(OPERATORS):
        pytest.skip("not every kernel has been measured yet")
    publish(NAME, report_of(judged), judged)
    assert not short_of(judged, LEVELS, TARGETS, MARGIN)
