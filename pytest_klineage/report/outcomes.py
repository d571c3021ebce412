"""What each method came to on each case: the best of its runs, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_klineage.records import Code, Interval, KernelCase, Status, Verdict
from pytest_klineage.report.aggregate import by_kernel
from pytest_klineage.report.collect import Material
from pytest_klineage.report.steps import Optimization, ReportedStep, optimization_of
from pytest_klineage.results.runs import Record, Run

UNNAMED = "kernel"
"""The method of kernels that somebody wrote, where their labels name no methods."""
RECOVERY, GENERATED_ONLY = "roundtrip_recovery", "generated_only"
STUDIES = (RECOVERY, GENERATED_ONLY)
"""Studies in which the expert's kernel is the reference, so that their speedups are in no other table. The names are
those of their test files and of the folders of their trajectories."""
VARIANTS = ("naive", "expert")
"""Words for kernels that somebody wrote, as `expert.toml` has them."""
METHODS = ("klineage", "adaexplore", "accelopt", "generated-only")
"""Methods that keep their place and colour in every figure."""
NO_ATTEMPT = frozenset({Code.ACCEPTED_BUILT, *(code for code in Code if code.status is Status.SKIPPED)})
"""Nothing was judged: the kernel was skipped, or only built."""
HELD_OUT_REFERENCES = ("flaggems",)
"""References that held-out instances are compared with."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One judged kernel, or one optimization's best, on one case."""

    method: str
    case_id: str
    platform: str
    study: str = ""
    verdict: Verdict | None = None
    code: Code | None = None
    """None when no kernel ever reached the gate."""
    speedup: float | None = None
    trial: str = ""
    """What distinguishes repeated attempts."""
    optimization: Optimization | None = None
    step: ReportedStep | None = None
    """The step of the optimization that is meant."""
    kernel: str = ""
    """The kernel's label, where kernels are compared one by one and not by methods."""

    @property
    def name(self) -> str:
        """What a row of a table calls it: the kernel's label, or the method."""
        return self.kernel or self.method

    @property
    def device(self) -> str:
        """Product name of the CPU or GPU; the platform where it is not known."""
        machine = self.verdict.machine if self.verdict is not None else None
        return machine.device if machine is not None else self.platform

    @property
    def lower_bound(self) -> float:
        """The speedup that it has at least, by which the best of several is chosen; 0 unless scored."""
        return self.interval.low if self.interval is not None else self.speedup or 0.0

    @property
    def case(self) -> KernelCase | None:
        """The case, where a whole verdict is there."""
        return self.verdict.case if self.verdict is not None else None

    @property
    def operator(self) -> str:
        """The operator's name; the first part of the case's name where the case itself is not there."""
        return self.case.operator if self.case is not None else self.case_id.partition("-")[0]

    @property
    def surface(self) -> str:
        """The language of the kernel, if known."""
        if self.verdict is not None and self.verdict.surface:
            return self.verdict.surface
        return self.optimization.settings.get("surface", "") if self.optimization is not None else ""

    @property
    def interval(self) -> Interval | None:
        """The speedup's interval, if the kernel was scored."""
        timing = self.verdict.timing if self.verdict is not None else None
        return timing.speedup if timing is not None and self.speedup is not None else None

    @property
    def milliseconds(self) -> tuple[float, float] | None:
        """Medians of reference and kernel, if the kernel was scored."""
        timing = self.verdict.timing if self.verdict is not None else None
        return (timing.reference_ms, timing.candidate_ms) if timing is not None and self.speedup is not None else None


@dataclass(frozen=True, slots=True)
class Result:
    """The best attempt of one method on one case and device, and how many there were."""

    best: Attempt
    attempts: int
    succeeded: int


def optimizations(material: Material) -> list[Optimization]:
    """Every trajectory of a method, with the verdicts that runs hold about its kernels.

    Trajectories without a method are of a walk to a lineage, or of a trial of a card, not of an optimization.
    """
    verdicts = {
        record.verdict.source_digest: record.verdict
        for run in material.runs
        for record in run.records
        if record.verdict.source_digest
    }
    every = [optimization_of(read, verdicts) for read in material.trajectories]
    return [one for one in every if one.settings.get("method")]


def in_order(found: Iterable[Optimization]) -> list[Optimization]:
    """Optimizations by platform and case, known methods first in each."""
    every = list(found)
    methods = method_order(one.method for one in every)
    return sorted(every, key=lambda one: (one.platform, one.case_id, methods.index(one.method), one.path))


def attempts(runs: Iterable[Run], optimized: Iterable[Optimization]) -> list[Attempt]:
    """Kernels of runs, and the best of each optimization.

    Skips and mere builds are none, nor are records of what a trajectory holds as well: they are one judgement.
    """
    best = [_of_optimization(one) for one in optimized if one.case_id]
    already_shown = {_judgement(step.verdict) for one in best if one.optimization for step in one.optimization.steps}
    already_shown.discard(None)
    found = [one for run in runs for one in _of_run(run) if _judgement(one.verdict) not in already_shown]
    known = {one.study for one in best if one.study}
    return [*(one for one in found if one.study not in known), *best]


def results(found: Iterable[Attempt]) -> list[Result]:
    """One result for each device, case, method, kernel and language, in the order of first appearance."""
    groups: dict[tuple[str, ...], list[Attempt]] = {}
    for one in found:
        key = (one.platform, one.device, one.case_id, reference_of(one), one.method, one.kernel, one.surface)
        groups.setdefault(key, []).append(one)
    return [
        Result(
            best=max(group, key=lambda one: (one.speedup is not None, one.lower_bound)),
            attempts=len(group),
            succeeded=sum(one.speedup is not None for one in group),
        )
        for group in groups.values()
    ]


def reference_of(one: Attempt) -> str:
    """Name of the implementation that an attempt was compared with."""
    if one.verdict is None:
        return one.optimization.settings.get("reference", "") if one.optimization is not None else ""
    return one.verdict.reference.get("label") or one.verdict.case.reference


def study_of(name: str) -> str:
    """The study that a test or a file belongs to, by its name; empty for none."""
    return next((study for study in STUDIES if study in name), "")


def method_order(names: Iterable[str]) -> list[str]:
    """Known methods first, then the others by name."""
    return sorted(set(names), key=lambda name: (METHODS.index(name) if name in METHODS else len(METHODS), name))


def beside_a_kernel(one: Attempt) -> bool:
    """Whether the attempt was timed beside another kernel instead of its case's reference."""
    return one.verdict is not None and "digest" in one.verdict.reference


def held_out(one: Attempt) -> bool:
    """Whether the attempt is on an instance of the held-out tier."""
    return one.case is not None and one.case.reference in HELD_OUT_REFERENCES


def _of_run(run: Run) -> list[Attempt]:
    judged = [record for record in run.records if record.verdict.code not in NO_ATTEMPT]
    verdicts = [record.verdict for record in judged]
    labels = {verdict.label for verdict in verdicts}
    named = len(labels) == 1 or "" not in by_kernel(verdicts)
    return [_of_record(record, (record.verdict.label if named else "") or _variant(record)) for record in judged]


def _variant(record: Record) -> str:
    """The kernel's variant, where its test names one: test_main_tier[gemm-expert]."""
    last = record.nodeid.rpartition("-")[2].rstrip("]")
    return last if last in VARIANTS else UNNAMED


def _of_record(record: Record, method: str) -> Attempt:
    verdict = record.verdict
    study = study_of(record.nodeid)
    scored = verdict.timing.speedup.estimate if verdict.scored and verdict.timing is not None else None
    return Attempt(
        method=method, case_id=verdict.case.id, platform=verdict.machine.platform if verdict.machine else "",
        study=study, verdict=verdict, code=verdict.code, speedup=scored, trial=record.nodeid,
        kernel=verdict.label if method == UNNAMED else "",
    )  # fmt: skip


def _of_optimization(one: Optimization) -> Attempt:
    own = [step for step in one.steps if not step.is_root]
    last = own[-1] if own else None
    step = one.best or next((item for item in reversed(own) if item.verdict is not None), last)
    attempt = Attempt(
        method=one.method, case_id=one.case_id, platform=one.platform,
        study=study_of(one.path), trial=one.path, optimization=one,
    )  # fmt: skip
    if step is None:
        # Of the root only the machine is of interest: it is no method's result.
        return replace(attempt, verdict=one.steps[-1].verdict if one.steps else None)
    return replace(attempt, verdict=step.verdict, code=step.code, speedup=step.speedup, step=step)


def _judgement(verdict: Verdict | None) -> tuple[str, str] | None:
    """What distinguishes one judgement from every other."""
    if verdict is None or not verdict.judged_at or not verdict.source_digest:
        return None
    return verdict.source_digest, verdict.judged_at


def several_languages(found: Iterable[Result]) -> bool:
    """Whether any case has kernels in more than one language on one device."""
    languages: dict[tuple[str, str], set[str]] = {}
    for one in found:
        if one.best.surface:
            languages.setdefault((one.best.device, one.best.case_id), set()).add(one.best.surface)
    return any(len(names) > 1 for names in languages.values())


def ordered_cases(found: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Platform, device and case of every result, once, in the order of platforms and names."""
    return sorted({(one.best.platform, one.best.device, one.best.case_id) for one in found})
