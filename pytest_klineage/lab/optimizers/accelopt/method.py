"""AccelOpt as a method: plans, implementations, lessons, iteration by iteration; its prompts in our words."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.accelopt.policy import (
    NOTHING_FOUND,
    AccelOptSettings,
    Candidate,
    Experience,
    ExperiencePair,
    PlanSample,
    kept,
    rendered,
    selected,
    telling_pairs,
)
from pytest_klineage.lab.optimizers.instructions import LANGUAGES, NATIVE
from pytest_klineage.lab.optimizers.prompts import paragraphs, prompt
from pytest_klineage.lab.optimizers.proposal import FreshChat, NumberedReply, built_text, first_block_source
from pytest_klineage.lab.optimizers.recording import Notebook
from pytest_klineage.lab.optimizers.task import Observation, Proposal, Task
from pytest_klineage.records import KernelSource, Surface

BEAM_TOPIC, EXPERIENCE_TOPIC = "accelopt beam", "accelopt experiences"
FLAGS = ' To build with other flags, write a line "FLAGS: ..." with all of them before the block.'


class AccelOpt:
    """Beam search by planner and executor, with a memory of experiences that a summarizer writes."""

    name = "accelopt"

    def __init__(self, settings: AccelOptSettings | None = None) -> None:
        self.settings = settings if settings is not None else AccelOptSettings()

    def proposals(self, task: Task, models: Session) -> Generator[Proposal, Observation, None]:
        """One kernel per sample, iteration by iteration.

        Raises UsageError when the task has no root, or one that the gate did not score: the first plan is for it.
        """
        yield from _BeamSearch(self.settings, task, models).iterations()


def root_candidate(task: Task) -> Candidate:
    """The beam's first kernel. Raises UsageError without one, or none with a time."""
    seen = task.submitted
    if task.root is None or seen is None:
        raise UsageError("accelopt begins with a right kernel, and the task has no root: give it a naive kernel")
    if seen.speedup is None:
        code = seen.verdict.code.value if seen.verdict is not None else "not judged"
        raise UsageError(f"accelopt begins with a right kernel, and the root is {code}: give the task another root")
    return Candidate(task.root, 1 / seen.speedup, profile_of(seen))


def profile_of(seen: Observation) -> str:
    """What a planner is shown about a kernel's speed: its latency."""
    timing = seen.verdict.timing if seen.verdict is not None else None
    return f"latency: {timing.candidate_ms:.4g} ms" if timing is not None else f"speedup: {seen.speedup or 0:.4g}"


class _BeamSearch:
    """One search: the beam, the experiences, the chats."""

    def __init__(self, settings: AccelOptSettings, task: Task, models: Session) -> None:
        self._settings, self._task, self._models = settings, task, models
        self._rng = random.Random(task.seed)
        self._notes = Notebook(models)
        self._chats: dict[str, FreshChat] = {}
        self._experiences: tuple[Experience, ...] = ()
        self._beam: tuple[Candidate, ...] = (root_candidate(task),)

    def iterations(self) -> Generator[Proposal, Observation, None]:
        """All iterations. Before each but the first, the one before is learnt from and selected from."""
        samples: tuple[PlanSample, ...] = ()
        for number in range(self._settings.iterations):
            if number:
                self._remember(samples)
                self._beam = selected(samples, self._beam, self._settings.beam)
            self._note_beam(number)
            samples = yield from self._iteration(number)

    def _iteration(self, number: int) -> Generator[Proposal, Observation, tuple[PlanSample, ...]]:
        """Plans for all candidates, then the samples of every plan."""
        planner = self._chat("planner", f"-{number}", rendered(self._experiences))
        plans = [
            [planner.ask(plan_text(candidate)).text for _ in range(self._settings.plans)] for candidate in self._beam
        ]
        samples = []
        for row, texts in enumerate(plans):
            for plan, text in enumerate(texts):
                for _ in range(self._settings.samples):
                    samples.append((yield from self._sample(number, row, plan, text)))
        return tuple(samples)

    def _sample(self, number: int, row: int, plan: int, text: str) -> Generator[Proposal, Observation, PlanSample]:
        """One implementation of a plan."""
        parent = self._beam[row].kernel
        answer = self._chat("executor").ask(carry_out_text(parent, text))
        proposal = proposed(answer, parent, f"iteration {number}, plan_{row}_{plan}")
        seen = yield proposal
        latency = None if seen.speedup is None else 1 / seen.speedup
        profile = "" if latency is None else profile_of(seen)
        return PlanSample(row=row, plan=plan, kernel=proposal.source, latency=latency, profile=profile)

    def _remember(self, samples: Sequence[PlanSample]) -> None:
        """Have the telling steps of an iteration summarized, and keep some of the older experiences beside them."""
        new = []
        for pair in telling_pairs(samples, self._beam, self._settings):
            reply = self._chat("summarizer").ask(compare_text(pair)).text
            new.append(Experience.of(pair, reply))
        self._experiences = kept(new, self._experiences, self._settings.capacity, self._rng)
        titles = "; ".join(f"{item.pair.id} {item.pair.speedup:.4g}x {item.title or 'no title'}" for item in new)
        self._notes.note(EXPERIENCE_TOPIC, f"{len(new)} new of {len(self._experiences)}: {titles or 'none'}")

    def _chat(self, role: str, suffix: str = "", material: str = "") -> FreshChat:
        """The chat of a role, opened when it is first needed. Lessons are made without the contract."""
        name = f"accelopt-{role}{suffix}"
        if name not in self._chats:
            task = "" if role == "summarizer" else self._task.instructions
            self._chats[name] = FreshChat(
                self._models, name, system=system_text(role, self._task),
                context=tuple(block for block in (task, material) if block),
                max_output_tokens=self._settings.max_output_tokens,
            )  # fmt: skip
        return self._chats[name]

    def _note_beam(self, number: int) -> None:
        kernels = ", ".join(f"{item.kernel.digest[:12]} ({1 / item.latency:.4g}x)" for item in self._beam)
        self._notes.note(BEAM_TOPIC, f"iteration {number} begins with {kernels}")


def proposed(answer: NumberedReply, parent: KernelSource, note: str) -> Proposal:
    """The proposal in a reply; one without a source where no code is in it."""
    source, malformed = None, ""
    try:
        source = first_block_source(answer, parent)
    except MalformedReply as error:
        malformed = str(error)
    return Proposal(source=source, call=answer.call, parent=parent.digest, note=note, malformed=malformed)


def system_text(role: str, task: Task) -> str:
    """The system prompt of a role for a task's language, with the facts that the release gives that role.

    The release states facts about Triton. For other languages the contract stands alone: facts about them would be ours
    and not the policy's.
    """
    shows_facts = task.surface is Surface.TRITON and role != "summarizer"
    return paragraphs(
        prompt(f"accelopt_{role}", language=LANGUAGES[task.surface], nothing_found=NOTHING_FOUND),
        prompt("accelopt_triton_facts") if shows_facts else "",
        prompt("accelopt_terms") if role == "planner" else "",
    )


def plan_text(candidate: Candidate) -> str:
    """What a planner is asked; the same for every plan of a candidate."""
    return prompt("accelopt_plan", kernel=built_text(candidate.kernel), profile=candidate.profile)


def carry_out_text(kernel: KernelSource, text: str) -> str:
    """What an executor is asked; the same for every sample of a plan."""
    return prompt("accelopt_carry_out", kernel=built_text(kernel), plan=text.strip(), flags=_flags(kernel))


def compare_text(pair: ExperiencePair) -> str:
    """What a summarizer is asked. The speedup is that of the fast kernel; the release leaves it out by mistake."""
    speedup = f"{max(pair.speedup, 1 / pair.speedup):.3g}"
    return prompt("accelopt_compare", slow=built_text(pair.slow), fast=built_text(pair.fast), speedup=speedup)


def _flags(kernel: KernelSource) -> str:
    return FLAGS if kernel.surface in NATIVE else ""
