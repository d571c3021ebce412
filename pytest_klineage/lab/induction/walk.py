"""The walk from an expert kernel backward to a naive one: propose, gate, re-derive, gate, and record as a lineage.

It decides what is taken and when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from pytest_klineage import __version__
from pytest_klineage.errors import UsageError
from pytest_klineage.lab.induction.deoptimize import Auditor, Proposer
from pytest_klineage.lab.induction.prompts import filled, one_line
from pytest_klineage.lab.induction.rederive import FORWARD_RULE, Rederived, Rederiver, refusal_feedback
from pytest_klineage.lab.induction.replies import ProposerDone, RemainingOptimization, Simplification
from pytest_klineage.lab.induction.simplicity import objection
from pytest_klineage.lab.induction.verdicts import Judging
from pytest_klineage.lab.library.lineages import RIGHT, edit_between, state_of
from pytest_klineage.lab.llm.faults import BackendFailed, BudgetExhausted
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.recording import open_chat
from pytest_klineage.records import (
    KernelCase,
    KernelSource,
    Lineage,
    Rederivation,
    Rejection,
    Stopped,
    Termination,
    Transition,
    Verdict,
)
from pytest_klineage.records.lineage import inverse

LEAST = 1e-4
"""Speedup that the case asks of every state: a state must be right, how slow it is is recorded."""
EFFECT_RULE = "before over after, from the pairs of the simpler state's verdict: that verdict's interval inverted"


class WalkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How far a walk goes and how much patience it has. No limit says that the last state is naive."""

    max_steps: int = 40
    max_proposals: int = 5
    """Proposals at one state, whichever way they are refused."""
    max_rejections: int = 20
    """Refused simplifications in all."""
    max_repairs: int = 2
    """Further attempts at one re-derivation."""
    max_misread: int = 3
    """Replies in a row that cannot be read, of one question."""
    max_output_tokens: int = 24_000


class WalkOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """What a walk begins with."""

    case: KernelCase
    platform: str
    source: KernelSource
    """The expert's kernel."""
    contract: str
    """What the kernel promises, as text for a model."""
    name: str
    """Where the kernel is from, such as "gemm/cpu-cpp"."""


class WalkResult(msgspec.Struct, frozen=True, kw_only=True):
    """A lineage, not sealed yet, and the sources of its states."""

    lineage: Lineage
    sources: tuple[KernelSource, ...]


class _State(msgspec.Struct, frozen=True):
    source: KernelSource
    verdict: Verdict


class _End(msgspec.Struct, frozen=True):
    termination: Termination
    reason: str


Report: TypeAlias = Callable[[str], None]
"""Live progress: where the walk is, in a line."""


class Walk:
    """One walk. `run` it once; where models and verdicts were recorded, the same replies lead to the same lineage."""

    def __init__(
        self, origin: WalkOrigin, session: Session, judging: Judging, settings: WalkSettings | None = None,
        report: Report | None = None,
    ) -> None:  # fmt: skip
        self._origin, self._session, self._judging = origin, session, judging
        self._settings = chosen = settings or WalkSettings()
        self._report = report or (lambda _: None)
        self._case = msgspec.structs.replace(origin.case, at_least=LEAST)
        self._states: list[_State] = []
        """The expert's first, as the walk goes."""
        self._transitions: list[Transition] = []
        self._refused: list[Rejection] = []
        """At the state where the walk is."""
        self._all_refused: list[Rejection] = []
        categories = filled("categories")
        chat = {
            name: open_chat(session, name, system=system, context=(origin.contract,))
            for name, system in (
                ("deoptimize", filled("deoptimize-system", categories=categories)),
                ("rederive", filled("rederive-system")),
                ("audit", filled("audit-system", categories=categories)),
            )
        }
        for one in chat.values():
            one.max_output_tokens = chosen.max_output_tokens
        self._proposer = Proposer(chat["deoptimize"], attempts=chosen.max_misread)
        self._rederiver = Rederiver(chat["rederive"], judging, attempts=chosen.max_repairs + 1)
        self._auditor = Auditor(chat["audit"], attempts=chosen.max_misread)

    def run(self) -> WalkResult:
        """Walk until nothing is left, or a limit says stop. Raises UsageError when the expert is not right here.

        A budget that runs out and a model that cannot be reached end the walk with what has been validated; a step
        that was under way is not in it, its refused proposals are.
        """
        self._tell("judging the expert")
        expert = self._judging(self._case, self._origin.source, None)
        if expert.status not in RIGHT:
            raise UsageError(f"the expert {self._origin.name} is not right here: {expert.reasons[0].message}")
        self._states.append(_State(self._origin.source, expert))
        try:
            end = self._walk()
        except BudgetExhausted as error:
            end = _End(Termination.BUDGET, str(error))
        except BackendFailed as error:
            end = _End(Termination.INTERRUPTED, str(error))
        self._session.record(Stopped(reason=end.termination.value, message=end.reason))
        self._tell(f"ended: {end.termination.value}: {one_line(end.reason, 100)}")
        return self._walked(end)

    def _walk(self) -> _End:
        while len(self._transitions) < self._settings.max_steps:
            if (end := self._step()) is not None:
                return end
        return _End(Termination.STEP_LIMIT, f"the limit of {self._settings.max_steps} steps was reached")

    def _step(self) -> _End | None:
        """One step backward. None when it was made; otherwise why the walk ends at this state."""
        kernel = self._states[-1].source
        self._refused = []
        self._proposer.turn_to(kernel, self._transitions, self._all_refused)
        audited: tuple[RemainingOptimization, ...] = ()
        for attempt in range(1, self._settings.max_proposals + 1):
            if self._too_many():
                return _End(Termination.REJECTION_LIMIT, f"{len(self._backward())} simplifications were refused")
            self._tell(f"asking for a simplification, {attempt} of {self._settings.max_proposals}")
            proposal = self._proposer.ask()
            if isinstance(proposal, Simplification):
                if self._try(proposal):
                    return None
            elif isinstance(proposal, ProposerDone):
                left = self._auditor.remaining(kernel)
                if not left:
                    return _End(Termination.NAIVE_REACHED, proposal.reason)
                if audited:
                    return _End(Termination.MODEL_STOPPED, _still_seen(proposal, left))
                audited = left
                self._proposer.contradict(left)
            else:
                self._proposer.refuse(f"the reply cannot be used: {proposal}")
        return _End(
            Termination.NO_VALID_STEP, f"none of {self._settings.max_proposals} proposals at this state was accepted"
        )

    def _try(self, step: Simplification) -> bool:
        """Gate a simplification, have it re-derived, and take it. Otherwise refuse it, and say so to the proposer."""
        after = self._states[-1].source
        if reason := objection(step.source, after, (state.source.digest for state in self._states)):
            self._refuse(step, reason)
            return False
        self._tell(f"gating {step.category.value}: {one_line(step.locus, 60)}")
        verdict = self._judging(self._case, step.source, after)
        if verdict.status not in RIGHT or verdict.timing is None:
            self._refuse(step, f"it is not right: {verdict.reasons[0].message}", verdict)
            return False
        self._tell(f"re-deriving {step.category.value}: {one_line(step.locus, 60)}")
        forward = self._rederiver.rederive(self._case, step, after)
        self._keep(*forward.rejected)
        if forward.source is None or forward.verdict is None:
            reason = (
                "it is right, but whoever saw only the simpler kernel, category, locus and intent could not bring "
                f"the speed back: {forward.last_reason}. Take a smaller step, or say in the intent what was missing"
            )
            self._refuse(step, reason, verdict)
            return False
        self._take(step, verdict, forward)
        return True

    def _take(self, step: Simplification, verdict: Verdict, forward: Rederived) -> None:
        before, after = step.source, self._states[-1].source
        made, judged = forward.source, forward.verdict
        if made is None or judged is None or verdict.timing is None:
            raise RuntimeError("only a step that was re-derived and timed is taken")
        rederived = None
        if made.digest != after.digest:
            rederived = Rederivation(edit=edit_between(before, made), source_digest=made.digest)
        self._transitions.append(
            Transition(
                category=step.category, locus=step.locus, intent=step.intent, before=before.digest,
                after=after.digest, backward=edit_between(after, before), forward=edit_between(before, after),
                rederived=rederived, forward_verdict=judged, effect=inverse(verdict.timing.speedup),
                rejected=tuple(self._refused),
            )
        )  # fmt: skip
        self._states.append(_State(before, verdict))
        self._refused = []

    def _refuse(self, step: Simplification, reason: str, verdict: Verdict | None = None) -> None:
        edit = edit_between(self._states[-1].source, step.source)
        self._keep(
            Rejection(
                forward=False, category=step.category, locus=step.locus, intent=step.intent, edit=edit,
                reason=reason, verdict=verdict,
            )
        )  # fmt: skip
        wrong = verdict is not None and verdict.status not in RIGHT
        self._proposer.refuse(reason, refusal_feedback(verdict) if wrong and verdict is not None else "")

    def _keep(self, *rejections: Rejection) -> None:
        self._refused += rejections
        self._all_refused += rejections

    def _backward(self) -> list[Rejection]:
        return [rejection for rejection in self._all_refused if not rejection.forward]

    def _too_many(self) -> bool:
        return len(self._backward()) >= self._settings.max_rejections

    def _tell(self, what: str) -> None:
        spent = self._session.budget.spent_usd
        self._report(f"step {len(self._transitions) + 1}: {what} (${spent:.2f} of ${self._session.budget.limit_usd:g})")

    def _walked(self, end: _End) -> WalkResult:
        """The lineage, naive first."""
        first = "naive" if end.termination is Termination.NAIVE_REACHED else "start"
        steps = self._transitions[::-1]
        names = [first, *(step.category.value.replace("_", "-") for step in steps)]
        walked = self._states[::-1]
        states = tuple(
            state_of(index, name, state.source, state.verdict)
            for index, (name, state) in enumerate(zip(names, walked, strict=True))
        )
        lineage = Lineage(
            operator=self._case.operator, platform=self._origin.platform, surface=self._origin.source.surface,
            case=self._case, states=states, transitions=tuple(steps), rejected=tuple(self._refused),
            termination=end.termination, termination_reason=end.reason, provenance=self._provenance(),
        )  # fmt: skip
        sources = [msgspec.structs.replace(state.source, label=name) for state, name in zip(walked, names, strict=True)]
        return WalkResult(lineage=lineage, sources=tuple(sources))

    def _provenance(self) -> dict[str, str]:
        usage = self._session.usage
        return {
            "expert": self._origin.name,
            "expert_digest": self._origin.source.digest,
            "model": self._session.backend.model,
            "backend": self._session.backend.name,
            "pytest_klineage": __version__,
            "cost_usd": f"{usage.cost_usd:.4f}{' (estimated)' if usage.estimated else ''}",
            "effect": EFFECT_RULE,
            "forward": FORWARD_RULE,
        }


def _still_seen(done: ProposerDone, left: tuple[RemainingOptimization, ...]) -> str:
    listed = "; ".join(str(optimization) for optimization in left)
    return f"{done.reason} The audit still saw: {listed}"
