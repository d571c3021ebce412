"""Trials of a card with scripted models against the real gate on small cases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from admission_trials import (
    BAD,
    BY_COLUMN,
    BY_COLUMN_AGAIN,
    BY_ROW,
    FAST,
    NO_KERNEL,
    SLOW,
    Scripted,
    block,
    source_of,
    verdict_of,
)

from pytest_klineage.errors import Waiting, WaitsForReply, WaitsForVerdict
from pytest_klineage.lab.induction.admit import Compare, basis, problem_with, roundtrip, settled, shows_effect
from pytest_klineage.lab.induction.admit_targets import AdmissionTarget, targets_for
from pytest_klineage.lab.library.cards import with_trials
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.lab.library.lint import lint_card
from pytest_klineage.lab.llm.faults import BackendFailed, Failure
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.records import (
    AdmissionRule,
    CardStatus,
    Code,
    Interval,
    KernelCase,
    KernelSource,
    SkillCard,
    TrialOutcome,
    Verdict,
)


def test_a_success_admits_the_card(run: Any, card: SkillCard, stored: StoredLineage, target: AdmissionTarget) -> None:
    done = run(block(FAST))
    trial = done.trial
    assert done.message.startswith("success")
    assert (trial.outcome, trial.held_out) == (TrialOutcome.SUCCESS, True)
    assert trial.code is Code.ACCEPTED_FASTER
    assert trial.speedup == Interval(5.0, 4.8, 5.2)
    assert (trial.source_digest, trial.method) == (done.kernel.digest, "scripted:toy")
    assert trial.context == target.context
    assert (trial.rule, trial.expected) == (AdmissionRule.STRICT, 2.25)
    assert "expected 1.875x at least; 1 replies; gemm/cpu-cpp step 2" in trial.note
    admitted = with_trials(card, [trial])
    assert admitted.status is CardStatus.ADMITTED
    assert lint_card(admitted, {stored.lineage.name: stored.lineage}) == []


def test_the_model_gets_card_contract_and_state_and_nothing_else(run: Any, card: SkillCard) -> None:
    run(block(FAST), machine="A machine of tests.")
    shown = run.backend.asked[0]
    text = "\n".join((shown.prefix.system, *shown.prefix.context, *(turn.text for turn in shown.turns)))
    for piece in (card.carrier.text, card.anchor, "M = 96", BY_COLUMN_AGAIN, "A machine of tests."):
        assert piece in text
    # The next state of the lineage would be the answer.
    assert BY_ROW not in text
    assert BY_COLUMN not in text


def test_a_wrong_kernel_is_repaired(run: Any) -> None:
    done = run(block(BAD), block(FAST))
    assert done.message.startswith("success")
    assert "wrong_value" in run.backend.asked[1].turns[-1].text


def test_a_kernel_that_stays_wrong_is_rejected(run: Any, card: SkillCard) -> None:
    done = run(block(BAD), block(BAD), repairs=1)
    assert (done.trial.outcome, done.trial.code) == (TrialOutcome.REJECTED, Code.MISMATCH)
    assert done.trial.speedup is None
    logged = with_trials(card, [done.trial])
    assert logged.status is CardStatus.CANDIDATE
    assert logged.log[0].outcome is TrialOutcome.REJECTED


def test_a_right_kernel_without_the_effect_is_no_success(run: Any) -> None:
    done = run(block(SLOW.replace("run(const", "run (const")), repairs=0)
    assert done.trial.outcome is TrialOutcome.NO_EFFECT
    assert done.trial.speedup == Interval(1.0, 0.98, 1.02)
    assert done.trial.code is Code.SLOWER_THAN_REQUIRED


def test_an_instructing_reply_is_no_kernel(run: Any, card: SkillCard) -> None:
    done = run(NO_KERNEL, NO_KERNEL, NO_KERNEL)
    assert (done.trial.outcome, done.trial.code) == (TrialOutcome.NOT_MATERIALIZED, None)
    assert "no code block" in done.trial.note
    assert done.kernel is None
    assert with_trials(card, [done.trial]).status is CardStatus.CANDIDATE


def test_a_budget_that_ends_in_the_middle(run: Any) -> None:
    done = run(block(BAD), limit_usd=0.15)
    assert (done.trial.outcome, done.trial.code) == (TrialOutcome.OUT_OF_BUDGET, Code.MISMATCH)


def test_a_failed_call_is_no_trial_and_is_resumed(run: Any) -> None:
    done = run(block(BAD), BackendFailed(Failure.OVERLOADED, "busy", billed=False))
    assert done.trial is None
    assert "backend_failed" in done.message
    run.session.close()
    again = run(block(FAST))
    assert again.message.startswith("success")
    assert len(run.backend.asked) == 1


def test_a_trial_that_waits_for_both_is_the_same_trial(
    run: Any, judge: Compare, card: SkillCard, target: AdmissionTarget
) -> None:
    """To the byte, but for times: a wrong kernel and its repair, each verdict and each reply asked for twice."""
    known: dict[str, Verdict] = {}
    asked: set[str] = set()

    def kept(case: KernelCase, source: KernelSource, against: KernelSource) -> Verdict:
        if source.digest not in known:
            known[source.digest] = judge(case, source, against)
        return known[source.digest]

    def later(case: KernelCase, source: KernelSource, against: KernelSource) -> Verdict:
        if source.digest not in asked:
            asked.add(source.digest)
            raise WaitsForVerdict("folder", "not yet")
        return kept(case, source, against)

    whole = run(block(BAD), block(FAST), compare=kept)
    path: Path = run.trajectory
    one_go = content(path)
    run.session.close()
    path.unlink()
    not_yet = WaitsForReply("exchange", "not yet")
    backend, waits, done = Scripted([not_yet, block(BAD), not_yet, block(FAST)], resumable=True), [], None
    while done is None:
        opened = (
            Session.resume(path, backend, note=False)
            if path.exists()
            else Session.begin(path, backend, limit_usd=10.0, name="trial")
        )
        with opened as session:
            try:
                done = roundtrip(card, target, session, later)
            except Waiting as waiting:
                waits.append(type(waiting))
    assert waits == [WaitsForReply, WaitsForVerdict, WaitsForReply, WaitsForVerdict]
    assert content(path) == one_go
    assert done.trial == whole.trial


def content(path: Path) -> bytes:
    """A trajectory without the times at which things happened."""
    return re.sub(rb'"(at|seconds)":("[^"]*"|[\d.e-]+)', rb'"\1":0', path.read_bytes())


def test_a_state_that_is_wrong_at_the_shape_proves_nothing(judge: Compare, target: AdmissionTarget) -> None:
    assert problem_with(target, basis(target, judge)) == ""
    broken = msgspec.structs.replace(target, state=source_of(BAD))
    assert "the state is of no use at gemm-96x48x64-fp32: wrong_value" in problem_with(broken, basis(broken, judge))


def test_what_a_step_gives_is_timed_where_it_was_not(target: AdmissionTarget) -> None:
    """The state is timed against the kernel that its own lineage's step leads to: half as fast is 2x."""
    open_yet = msgspec.structs.replace(target, expected=None, after=source_of(FAST))
    asked: list[KernelSource] = []

    def compare(case: KernelCase, source: KernelSource, against: KernelSource) -> Verdict:
        asked.append(against)
        verdict = verdict_of(source, case, Code.SLOWER_THAN_REQUIRED)
        timing = msgspec.structs.replace(verdict.timing, speedup=speedup)
        return msgspec.structs.replace(verdict, timing=timing)

    speedup = Interval(0.5, 0.48, 0.52)
    found = settled(open_yet, basis(open_yet, compare))
    assert asked == [source_of(FAST)]
    assert (found.expected, found.case.at_least) == (2.0, 1.7)
    speedup = Interval(0.98, 0.95, 1.01)
    assert "shows no effect of its own" in problem_with(open_yet, basis(open_yet, compare))
    assert settled(target, basis(target, compare)) == target


def test_the_papers_rule_admits_nothing(run: Any, card: SkillCard, stored: StoredLineage) -> None:
    (own,) = [found for found in targets_for(card, [stored], {}) if found.rule is AdmissionRule.PREDECESSOR]
    done = run(block(FAST), target=own)
    assert (done.trial.outcome, done.trial.rule) == (TrialOutcome.SUCCESS, AdmissionRule.PREDECESSOR)
    logged = with_trials(card, [done.trial])
    assert logged.log == (done.trial,)
    assert (logged.status, logged.successes) == (CardStatus.CANDIDATE, ())
    assert lint_card(logged, {stored.lineage.name: stored.lineage}) == []


def test_success_needs_the_lower_end_of_the_interval(target: AdmissionTarget) -> None:
    source, case = source_of(FAST), target.case
    assert shows_effect(verdict_of(source, case, Code.ACCEPTED_FASTER, 1.5), 1.5)
    assert not shows_effect(verdict_of(source, case, Code.ACCEPTED_MEETS_TARGET, 1.49), 1.5)
    assert not shows_effect(verdict_of(source, case, Code.INCONCLUSIVE_BUSY, 1.6), 1.5)
    assert not shows_effect(verdict_of(source, case, Code.MISMATCH, 1.6), 1.5)
