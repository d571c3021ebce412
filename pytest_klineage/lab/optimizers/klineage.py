"""The methods klineage (retrieved skill cards in one prefix-cached chat), its ablations, and generated-only (no cards).

All of them have the same loop, the same contract and the same words; they differ in the material about optimizations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

import msgspec

from pytest_klineage.errors import UnknownName
from pytest_klineage.lab.library.rendering import fenced, prompt_text
from pytest_klineage.lab.library.retrieval import DEFAULT_K, CardIndex, Dimension, Match, RetrievalTarget
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.lab.llm.session import Chat, Session
from pytest_klineage.lab.optimizers.instructions import code_language
from pytest_klineage.lab.optimizers.prompts import paragraphs, prompt
from pytest_klineage.lab.optimizers.proposal import base_of, header_lines, proposed_source
from pytest_klineage.lab.optimizers.recording import call_number, open_chat, recording_of
from pytest_klineage.lab.optimizers.session import Proposals
from pytest_klineage.lab.optimizers.task import Observation, Proposal, Task
from pytest_klineage.records import KernelSource, Noted, SkillCard

CARDS_TOPIC, NO_CARDS = "cards", "none"
OWN = "; some were lifted from this operator and shape"
CHOICE = "\nCARDS: names of the cards that you apply, separated by commas; or none"
BASES = ("best", "last", "root")
DRIFTED = (Malformation.EDIT_NOT_FOUND, Malformation.EDIT_AMBIGUOUS, Malformation.BROKEN_EDIT)
"""What a reply shows whose author no longer knows the text that its edits are for."""


class Serving(StrEnum):
    """What of the cards a prompt shows."""

    CARDS = "cards"
    """All nine fields."""
    LABELS = "labels"
    """Name and category alone."""
    NOTHING = "nothing"


CARD_METHODS: dict[str, tuple[Serving, Dimension | None]] = {
    "klineage": (Serving.CARDS, None),
    "generated-only": (Serving.NOTHING, None),
    "labels-only": (Serving.LABELS, None),
    **{f"klineage-without-{dimension.value}": (Serving.CARDS, dimension) for dimension in Dimension},
}
"""By name: what is shown of cards, and which dimension of retrieval is switched off."""


class CardMethod:
    """One chat per workload: the contract and the cards in its prefix, kernels and verdicts in its turns.

    `name` is one of CARD_METHODS. `goal` is a sentence on what is wanted, such as a speedup to reach; it stands in the
    first turn. `max_steps` is shown to the model when given; the limit itself is the loop's. `cards` are shown in place
    of what retrieval brings: an experiment chooses them before it begins. Without `contaminated` none is retrieved that
    was lifted from the task's own operator and shape. Raises UnknownName.
    """

    def __init__(
        self, name: str = "klineage", index: CardIndex | None = None, *, k: int = DEFAULT_K,
        capabilities: Sequence[str] = (), goal: str = "", max_steps: int = 0, cards: Sequence[SkillCard] | None = None,
        contaminated: bool = True,
    ) -> None:  # fmt: skip
        if name not in CARD_METHODS:
            raise UnknownName("method", name, CARD_METHODS)
        self.name = name
        self.serving, self.without = CARD_METHODS[name]
        self.index, self.k, self.capabilities = index or CardIndex(()), k, tuple(capabilities)
        self.goal, self.max_steps, self.cards, self.contaminated = goal, max_steps, cards, contaminated

    def retrieved(self, task: Task) -> tuple[Match, ...]:
        """The cards that a task gets, less what only the dimension brings that is switched off.

        Raises UnknownName for its platform or a capability.
        """
        target = RetrievalTarget(
            case=task.case, surface=task.surface, platform=task.platform, capabilities=self.capabilities
        )
        matches = self.index.retrieve(target, self.k, contaminated=self.contaminated).matches
        return tuple(match for match in matches if self.without is None or set(match.by) - {self.without})

    def proposals(self, task: Task, models: Session) -> Proposals:
        """See `Method`: turn by turn a whole kernel or edits, the gate's words as the next turn, until a limit."""
        cards = self._cards(task)
        chat = open_chat(models, "main", system=self._system(), context=(task.instructions, *self._material(cards)))
        asking, kernels, names = Asking(models, chat), Kernels(task), self._noted(task, models)
        text, step = self._first(task), 1
        while True:
            reply, call = asking.ask(text)
            note = _choice(header_lines(reply.text).get("CARDS", ""), names)
            draft = read_reply(reply, kernels, call=call, label=f"{self.name} {step}", note=note)
            seen = yield draft.proposal
            kernels.saw(seen)
            text, step = self._next(seen, kernels, shown_again(draft.drifted)), step + 1

    def _cards(self, task: Task) -> tuple[SkillCard, ...]:
        """The cards of a task in the order in which they are shown."""
        if self.serving is Serving.NOTHING:
            return ()
        return lineage_order(self.cards if self.cards is not None else (one.card for one in self.retrieved(task)))

    def _noted(self, task: Task, models: Session) -> frozenset[str]:
        """The names of the cards of this run, which are noted, and whether one was lifted from this very target.

        A run that goes on, or is replayed, has the cards that were noted then.
        """
        if self.serving is Serving.NOTHING:
            return frozenset()
        text = recording_of(models).first(CARDS_TOPIC)
        if text is None:
            retrieved = self.retrieved(task) if self.cards is None else ()
            own = OWN if any(match.contaminated for match in retrieved) else ""
            text = f"{', '.join(card.name for card in self._cards(task)) or NO_CARDS}{own}"
            models.record(Noted(topic=CARDS_TOPIC, text=text))
        return frozenset(text.removesuffix(OWN).split(", ")) - {NO_CARDS}

    def _system(self) -> str:
        part = {Serving.CARDS: "system_cards", Serving.LABELS: "system_labels"}.get(self.serving)
        shows = self.serving is not Serving.NOTHING
        return prompt("system", cards=f"\n{prompt(part)}" if part else "", choice=CHOICE if shows else "")

    def _material(self, cards: Sequence[SkillCard]) -> tuple[str, ...]:
        """The block of cards; nothing when there are none."""
        if not cards:
            return ()
        numbered = (f"{number}. {card.name} ({card.category.value})" for number, card in enumerate(cards, start=1))
        order = "Skill cards, in the order in which lineages applied them:\n\n" + "\n".join(numbered)
        show = prompt_text if self.serving is Serving.CARDS else _label_text
        return ("\n\n".join([order, *(show(card).rstrip("\n") for card in cards)]) + "\n",)

    def _first(self, task: Task) -> str:
        limit = f"You have {self.max_steps} steps." if self.max_steps else ""
        return paragraphs(_root_text(task), " ".join(part for part in (self.goal, limit) if part), prompt("ask_first"))

    def _next(self, seen: Observation, kernels: Kernels, again: str) -> str:
        of = f" of {self.max_steps}" if self.max_steps else ""
        return paragraphs(
            f"Step {seen.step}{of}.\n{seen.feedback}", _standing(seen, kernels), again,
            prompt("ask_next", default=kernels.default_text()),
        )  # fmt: skip


def lineage_order(cards: Iterable[SkillCard]) -> tuple[SkillCard, ...]:
    """Cards in the order in which their lineages applied them: fewest steps before first, then by name."""
    return tuple(sorted(cards, key=lambda card: (_steps_before(card), card.name)))


def _steps_before(card: SkillCard) -> int:
    return min((len(origin.prior) for origin in card.origins), default=len(card.scope.prior))


def _label_text(card: SkillCard) -> str:
    return f"# Skill {card.name}\n\nCategory: {card.category.value}\n"


def _root_text(task: Task) -> str:
    if task.root is None:
        return "There is no kernel to begin with: write one."
    said = f"\n\nThe gate says of it:\n{task.submitted.feedback}" if task.submitted is not None else ""
    return f"This is the kernel to begin with, step 0:\n\n{source_text(task.root)}{said}"


def _standing(seen: Observation, kernels: Kernels) -> str:
    if seen.is_best:
        return "That is the best so far."
    if seen.best_speedup is None:
        return "No kernel has been right so far."
    which = f"step {kernels.best_step}" if kernels.best_step else "the kernel that you were given"
    return f"The best so far is {which} with {seen.best_speedup:.3g}x."


def _choice(written: str, names: frozenset[str]) -> str:
    """What a reply says of its choice, as a note: the cards that there are among those it names."""
    chosen = [name for word in written.split(",") if (name := word.strip("`'\"*. ")) in names]
    return f"cards: {', '.join(dict.fromkeys(chosen))}" if chosen else "local exploration"


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A reply, read."""

    proposal: Proposal
    drifted: KernelSource | None = None
    """The kernel that the reply's edits did not fit; it is shown again."""


class Kernels:
    """The kernels that a reply may refer to."""

    def __init__(self, task: Task, *, always_last: bool = False) -> None:
        self._always_last = always_last
        self.root = base_of(task)
        self.last, self.best = self.root, self.root
        self.last_step, self.best_step = 0, 0
        self._scored = task.submitted is not None and task.submitted.speedup is not None
        self._last_is_good = True

    def saw(self, seen: Observation) -> None:
        """Take note of what came of a proposal."""
        source = seen.proposal.source
        if source is None:
            return
        self.last, self.last_step = source, seen.step
        self._last_is_good = seen.speedup is not None
        if seen.is_best:
            self.best, self.best_step, self._scored = source, seen.step, True

    @property
    def default(self) -> str:
        """What edits apply to when a reply does not say: the last kernel while it needs repair, else the best."""
        return "last" if self._always_last or not (self._last_is_good and self._scored) else "best"

    def named(self, name: str) -> KernelSource:
        """The kernel that a line BASE means; the default one for any other word."""
        chosen = name if name in BASES else self.default
        return {"best": self.best, "last": self.last, "root": self.root}[chosen]

    def default_text(self) -> str:
        """The default in words, such as "the kernel of step 3"."""
        return _step_text(self.best_step if self.default == "best" else self.last_step)


def _step_text(step: int) -> str:
    return f"the kernel of step {step}" if step else "the kernel that you were given"


def read_reply(reply: Reply, kernels: Kernels, *, call: int, label: str, note: str) -> Draft:
    """The proposal in a reply; a malformed one says why there is none."""
    base = kernels.named(header_lines(reply.text).get("BASE", "").strip("`'\". ").lower())
    try:
        source = proposed_source(reply, base)
    except MalformedReply as error:
        proposal = Proposal(source=None, call=call, parent=base.digest, note=note, malformed=str(error))
        return Draft(proposal=proposal, drifted=base if error.kind in DRIFTED else None)
    source = msgspec.structs.replace(source, label=label)
    return Draft(proposal=Proposal(source=source, call=call, parent=base.digest, note=note))


def source_text(source: KernelSource) -> str:
    """A kernel for a prompt: every file in a fence of its own, and its flags where it has some."""
    return "\n\n".join(_files(source))


def _files(source: KernelSource) -> Iterator[str]:
    for file in source.files:
        if len(source.files) > 1:
            yield f"File {file.name}:"
        yield fenced(file.text, code_language(source.surface))
    if source.flags:
        yield f"FLAGS: {' '.join(source.flags)}"


def shown_again(source: KernelSource | None) -> str:
    """The text that edits did not fit, for the next turn; empty when they did."""
    if source is None:
        return ""
    return f"This is the text that your edits did not fit:\n\n{source_text(source)}"


class Asking:
    """A chat with a count of its replies, so that each proposal can name its call."""

    def __init__(self, session: Session, chat: Chat) -> None:
        self._session, self._chat = session, chat
        self._replies = 0

    def ask(self, text: str) -> tuple[Reply, int]:
        """The reply and the number of its call. Raises what `Chat.ask` raises."""
        reply = self._chat.ask(text)
        self._replies += 1
        return reply, call_number(self._session, self._chat, self._replies)
