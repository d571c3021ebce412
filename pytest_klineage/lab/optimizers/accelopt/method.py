"""AccelOpt as a method: plans, implementations, lessons, iteration by iteration. What is kept is decided elsewhere."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.accelopt import prompts
from pytest_klineage.lab.optimizers.accelopt.beam import Candidate, Sample, selected
from pytest_klineage.lab.optimizers.accelopt.experience import Experience, kept, rendered, telling_pairs
from pytest_klineage.lab.optimizers.accelopt.settings import AccelOptSettings
from pytest_klineage.lab.optimizers.published import Answer, FreshChat, Notebook, first_block_source
from pytest_klineage.lab.optimizers.task import Observation, Proposal, Task
from pytest_klineage.records import KernelSource

BEAM_TOPIC, EXPERIENCE_TOPIC = "accelopt beam", "accelopt experiences"


class AccelOpt:
    """Beam search by planner and executor, with a memory of experiences that a summarizer writes."""

    name = "accelopt"

    def __init__(self, settings: AccelOptSettings | None = None) -> None:
        self.settings = settings if settings is not None else AccelOptSettings()

    def proposals(self, task: Task, models: Session) -> Generator[Proposal, Observation, None]:
        """One kernel per sample, iteration by iteration.

        Raises UsageError when the task has no root, or one that the gate did not score: the first plan is for it.
        """
        yield from _Search(self.settings, task, models).iterations()


def root_candidate(task: Task) -> Candidate:
    """The beam's first kernel. Raises UsageError when there is none, or none with a time."""
    seen = task.submitted
    if task.root is None or seen is None:
        raise UsageError("accelopt begins with a right kernel, and the task has no root: give it a naive kernel")
    if seen.speedup is None:
        code = seen.verdict.code.value if seen.verdict is not None else "not judged"
        raise UsageError(f"accelopt begins with a right kernel, and the root is {code}: give the task another root")
    return Candidate(task.root, 1 / seen.speedup, profile_of(seen))


def profile_of(seen: Observation) -> str:
    """What a planner is told about a kernel's speed: its latency."""
    timing = seen.verdict.timing if seen.verdict is not None else None
    return f"latency: {timing.candidate_ms:.4g} ms" if timing is not None else f"speedup: {seen.speedup or 0:.4g}"


class _Search:
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
        samples: tuple[Sample, ...] = ()
        for number in range(self._settings.iterations):
            if number:
                self._remember(samples)
                self._beam = selected(samples, self._beam, self._settings.beam)
            self._note_beam(number)
            samples = yield from self._iteration(number)

    def _iteration(self, number: int) -> Generator[Proposal, Observation, tuple[Sample, ...]]:
        """Plans for all candidates, then the samples of every plan."""
        planner = self._chat(f"planner-{number}", prompts.PLANNER, rendered(self._experiences))
        plans = [
            [planner.ask(prompts.plan(candidate)).text for _ in range(self._settings.plans)] for candidate in self._beam
        ]
        samples = []
        for row, texts in enumerate(plans):
            for plan, text in enumerate(texts):
                for _ in range(self._settings.samples):
                    samples.append((yield from self._sample(number, row, plan, text)))
        return tuple(samples)

    def _sample(self, number: int, row: int, plan: int, text: str) -> Generator[Proposal, Observation, Sample]:
        """One implementation of a plan, repaired as often as is allowed; the last result counts."""
        parent = self._beam[row].kernel
        note = f"iteration {number}, plan_{row}_{plan}"
        answer = self._chat("executor", prompts.EXECUTOR).ask(prompts.carry_out(parent, text))
        proposal = proposed(answer, parent, note)
        seen = yield proposal
        source, last = proposal.source, seen
        for fixing in range(self._settings.fixer_rounds):
            if source is None or last.speedup is not None:
                break
            answer = self._chat("fixer", prompts.FIXER).ask(prompts.fix(source, last.feedback))
            proposal = proposed(answer, source, f"{note}, repair {fixing + 1}")
            last = yield proposal
            if proposal.source is None:
                break
            source = proposal.source
        latency = None if last.speedup is None else 1 / last.speedup
        profile = "" if latency is None else profile_of(last)
        return Sample(row=row, plan=plan, kernel=source, latency=latency, profile=profile)

    def _remember(self, samples: Sequence[Sample]) -> None:
        """Have the telling steps of an iteration summarized, and keep some of the older experiences beside them."""
        new = []
        for pair in telling_pairs(samples, self._beam, self._settings):
            reply = self._chat("summarizer", prompts.SUMMARIZER, with_task=False).ask(prompts.compare(pair)).text
            new.append(Experience.of(pair, reply))
        self._experiences = kept(new, self._experiences, self._settings.capacity, self._rng)
        titles = "; ".join(f"{item.pair.id} {item.pair.speedup:.4g}x {item.title or 'no title'}" for item in new)
        self._notes.note(EXPERIENCE_TOPIC, f"{len(new)} new of {len(self._experiences)}: {titles or 'none'}")

    def _chat(self, role: str, template: str, *blocks: str, with_task: bool = True) -> FreshChat:
        """The chat of a role, opened when it is first needed."""
        if role not in self._chats:
            task = (self._task.instructions,) if with_task else ()
            self._chats[role] = FreshChat(
                self._models,
                f"accelopt-{role}",
                system=prompts.system(template, self._task),
                context=(*task, *(block for block in blocks if block)),
                max_output_tokens=self._settings.max_output_tokens,
            )
        return self._chats[role]

    def _note_beam(self, number: int) -> None:
        kernels = ", ".join(f"{item.kernel.digest[:12]} ({1 / item.latency:.4g}x)" for item in self._beam)
        self._notes.note(BEAM_TOPIC, f"iteration {number} begins with {kernels}")


def proposed(answer: Answer, parent: KernelSource, note: str) -> Proposal:
    """The proposal in a reply; one without a source where no code is in it."""
    source, malformed = None, ""
    try:
        source = first_block_source(answer, parent)
    except MalformedReply as error:
        malformed = str(error)
    return Proposal(source=source, call=answer.call, parent=parent.digest, note=note, malformed=malformed)
