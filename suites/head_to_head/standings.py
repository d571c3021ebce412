"""From recorded runs to the tables: by method, by workload, and every run. Only trajectories are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pytest_klineage.lab.optimizers.accelopt.policy import AccelOptSettings
from pytest_klineage.lab.optimizers.methods import ACCELOPT, METHOD_NAMES
from pytest_klineage.lab.optimizers.replaying import has_own_cards, repeats_of, steps_of
from pytest_klineage.lab.optimizers.session import EndReason
from pytest_klineage.records import Answered, Interval, Machine
from pytest_klineage.report.aggregate import geometric_mean
from pytest_klineage.report.collect import ReadTrajectory, collect
from pytest_klineage.report.document import Mark
from pytest_klineage.report.steps import ReportedStep, optimization_of
from pytest_klineage.results.packed import line_files

NONE = "none was right"
LABEL = ", own cards"
"""Of runs that were shown cards which had been lifted from the workload's own operator and shape."""
FAILURES = (
    "A method's kernels alone count: the naive one that every run begins with does not. What has no speedup is no "
    "1.0x: it lowers the share of workloads with a kernel, and is not in the mean. The best kernel is the one whose "
    "interval begins highest. *Own cards*: some of the cards were lifted from the workload's own operator and shape."
)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One run, read from its trajectory."""

    method: str
    case: str
    number: int
    best: Interval | None
    """Reference's time over the best kernel's; None when none was right."""
    best_ms: float | None
    reference_ms: float | None
    best_step: int
    best_usd: float
    """Dollars that were charged when it was there."""
    steps: int
    right: int
    failed: int
    """Wrong, not built, crashed; malformed replies among them."""
    wrappers: int
    repeated: int
    """Kernels that were sent before, and were not judged again."""
    calls: int
    """Model calls that were answered."""
    usd: float
    ended: str
    model: str
    budget_usd: float
    step_limit: str
    cards: str
    language: str
    reference: str
    machine: Machine | None


def standings_in(folder: Path) -> tuple[list[Standing], list[str]]:
    """All runs below a folder by workload, method and number, and what could not be read."""
    if not any(line_files(folder)):
        return [], []
    material = collect([folder])
    found = [_standing(read) for read in material.trajectories]
    found.sort(key=lambda one: (one.case, *_method_order(one.method), one.number))
    return found, [f"{problem.where}: {problem.what}; {problem.next_step}" for problem in material.problems]


def tables(found: Sequence[Standing], problems: Sequence[str], platform: str) -> str:
    """The document: conditions, three tables, and what is missing in them."""
    methods = list(dict.fromkeys(sorted((one.method for one in found), key=_method_order)))
    lines = [
        f"# Head to head, {platform}", "", conditions(found), "", FAILURES, "",
        "## By method", "", *by_method(found, methods), "", *ended_early(found, methods), "",
        "## By workload", "", *by_workload(found, methods), "",
        "## Every run", "", *every_run(found),
    ]  # fmt: skip
    if problems:
        lines += ["", "## Not read", "", *(f"- {problem}" for problem in problems)]
    return "\n".join(lines) + "\n"


def conditions(found: Sequence[Standing]) -> str:
    """What the runs were made with and on; limits that differ are all named."""
    budgets = sorted({one.budget_usd for one in found})
    limits = sorted({one.step_limit for one in found})
    machines = [one.machine for one in found if one.machine is not None]
    devices = sorted({f"{machine.device}, {machine.cores} cores" for machine in machines})
    references = sorted({one.reference for one in found})
    return (
        f"Model: {', '.join(sorted({one.model for one in found}))}. Machine: {'; '.join(devices) or 'unknown'}. "
        f"Language: {', '.join(sorted({one.language for one in found}))}. Reference: {', '.join(references)}. "
        f"Limits of each run: {' or '.join(f'${budget:g}' for budget in budgets)}, {' or '.join(limits)} steps."
    )


def by_method(found: Sequence[Standing], methods: Sequence[str]) -> Iterator[str]:
    """One row for each method: means over workloads, sums over runs."""
    cases = sorted({one.case for one in found})
    yield (
        "| method | geomean of the best | workloads with a kernel | runs with a kernel | steps | right | failed | "
        "wrappers | calls | USD |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for method in methods:
        own = [one for one in found if one.method == method]
        best = [one for case in cases if (one := _best(own, case)) is not None and one.best is not None]
        mean = geometric_mean(one.best.estimate for one in best if one.best is not None)
        yield (
            f"| {method} | {'-' if mean is None else f'{mean:.2f}x'} | {len(best)}/{len(cases)} | "
            f"{sum(one.best is not None for one in own)}/{len(own)} | {_sum(own, 'steps')} | {_sum(own, 'right')} | "
            f"{_sum(own, 'failed')} | {_sum(own, 'wrappers')} | {_sum(own, 'calls')} | "
            f"{sum(one.usd for one in own):.2f} |"
        )


def ended_early(found: Sequence[Standing], methods: Sequence[str]) -> Iterator[str]:
    """What ended runs before their dollars did, and whether AccelOpt came to its second generation."""
    for method in methods:
        own = [one for one in found if one.method == method]
        cut = [one for one in own if one.ended == EndReason.STEP_LIMIT]
        if cut:
            spent = sum(one.usd for one in cut) / sum(one.budget_usd for one in cut)
            runs = f"{len(cut)} of {len(own)} runs"
            yield f"- {method}: the number of steps ended {runs}, at {spent:.0%} of their dollars"
        if method == ACCELOPT:
            wanted = AccelOptSettings().kernels(2)
            whole = sum(one.steps >= wanted for one in own)
            yield f"- {method}: {whole} of {len(own)} runs made two whole iterations, {wanted} kernels"


def by_workload(found: Sequence[Standing], methods: Sequence[str]) -> Iterator[str]:
    """One row for each workload and method: the best run with its interval, and the best of each run."""
    yield (
        "| workload | method | best speedup | ms | reference ms | in run | at step | at USD | best of each run | USD |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for case in sorted({one.case for one in found}):
        for method in methods:
            own = [one for one in found if (one.case, one.method) == (case, method)]
            if not own:
                continue
            best = _best(own, case)
            where = " | ".join(["-"] * 5)
            if best is not None:
                where = (
                    f"{_ms(best.best_ms)} | {_ms(best.reference_ms)} | {best.number} | {best.best_step} | "
                    f"{best.best_usd:.2f}"
                )
            runs = ", ".join(NONE if one.best is None else f"{one.best.estimate:.2f}x" for one in own)
            shown = speed(best.best) if best is not None else NONE
            yield f"| {case} | {method} | {shown} | {where} | {runs} | {sum(one.usd for one in own):.2f} |"


def every_run(found: Sequence[Standing]) -> Iterator[str]:
    """One row for each run, with every step that came to nothing."""
    yield (
        "| workload | method | run | best speedup | steps | right | failed | wrappers | sent again | calls | USD | "
        "ended by |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for one in found:
        yield (
            f"| {one.case} | {one.method} | {one.number} | {NONE if one.best is None else speed(one.best)} | "
            f"{one.steps} | {one.right} | {one.failed} | {one.wrappers} | {one.repeated} | {one.calls} | "
            f"{one.usd:.2f} | {one.ended} |"
        )


def speed(interval: Interval) -> str:
    """A speedup with its interval."""
    return f"{interval.estimate:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"


def _standing(read: ReadTrajectory) -> Standing:
    one = optimization_of(read)
    made = [step for step in one.steps if not step.is_root]
    best = one.best
    timing = best.verdict.timing if best is not None and best.verdict is not None else None
    verdict = next((step.verdict for step in one.steps if step.verdict is not None), None)
    known = one.settings
    return Standing(
        method=one.method + (LABEL if has_own_cards(read.events) else ""), case=one.case_id,
        number=int(known.get("run", 0)),
        best=best.interval if best is not None else None,
        best_ms=timing.candidate_ms if timing is not None else None,
        reference_ms=timing.reference_ms if timing is not None else None,
        best_step=best.number if best is not None else 0, best_usd=best.cost_usd if best is not None else 0.0,
        steps=steps_of(read.events), right=_count(made, Mark.SCORED, Mark.SCREENED), failed=_count(made, Mark.FAILED),
        wrappers=_count(made, Mark.WRAPPER), repeated=repeats_of(read.events),
        calls=sum(isinstance(event, Answered) for event in read.events), usd=one.spent_usd,
        ended=one.stopped.partition(":")[0] or "not ended", model=one.model, budget_usd=one.budget_usd,
        step_limit=known.get("steps", "?"), cards=known.get("cards", ""), language=known.get("surface", "?"),
        reference=known.get("reference", "?"), machine=verdict.machine if verdict is not None else None,
    )  # fmt: skip


def _best(found: Sequence[Standing], case: str) -> Standing | None:
    """The run with the fastest kernel for a workload; None when none was right."""
    own = [one for one in found if one.case == case and one.best is not None]
    return max(own, key=lambda one: one.best.low if one.best is not None else 0.0, default=None)


def _method_order(method: str) -> tuple[int, str]:
    name = method.removesuffix(LABEL)
    return (METHOD_NAMES.index(name) if name in METHOD_NAMES else len(METHOD_NAMES)), method


def _count(steps: Sequence[ReportedStep], *marks: Mark) -> int:
    return sum(step.mark in marks for step in steps)


def _sum(found: Sequence[Standing], field: str) -> int:
    return sum(getattr(one, field) for one in found)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
