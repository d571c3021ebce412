"""The methods klineage (retrieved skill cards in one prefix-cached chat), its ablations, and generated-only (no cards).

All of them have the same loop, the same contract and the same words; they differ in the material about optimizations.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pytest_klineage.errors import UnknownName
from pytest_klineage.lab.library.retrieval import DEFAULT_K, CardIndex, Dimension, Retrieval, Target
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.chat_method import Asking, Kernels, read_reply, shown_again, source_text
from pytest_klineage.lab.optimizers.prompts import paragraphs, prompt
from pytest_klineage.lab.optimizers.proposal import header_lines
from pytest_klineage.lab.optimizers.recording import open_chat, recording_of
from pytest_klineage.lab.optimizers.serving import card_text, label_text, lineage_order, order_text, retrieved
from pytest_klineage.lab.optimizers.session import Proposals
from pytest_klineage.lab.optimizers.task import Observation, Task
from pytest_klineage.records import Noted, SkillCard

CARDS_TOPIC = "cards"
OWN = "; some were lifted from this operator and shape"
CHOICE = "\nCARDS: names of the cards that you apply, separated by commas; or none"


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

    `goal` is a sentence on what is wanted, such as a speedup to reach; it stands in the first turn. `max_steps` is told
    to the model when given; the limit itself is the loop's.
    """

    def __init__(
        self,
        index: CardIndex | None = None,
        *,
        k: int = DEFAULT_K,
        serving: Serving = Serving.CARDS,
        without: Dimension | None = None,
        contaminated: bool = True,
        capabilities: Sequence[str] = (),
        goal: str = "",
        max_steps: int = 0,
    ) -> None:
        self.index, self.k, self.serving = index or CardIndex(()), k, serving
        self.without, self.contaminated, self.capabilities = without, contaminated, tuple(capabilities)
        self.goal, self.max_steps = goal, max_steps

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.serving is Serving.NOTHING:
            return "generated-only"
        if self.serving is Serving.LABELS:
            return "labels-only"
        return f"klineage-without-{self.without.value}" if self.without is not None else "klineage"

    def retrieved(self, task: Task) -> Retrieval:
        """The cards that a task gets. Raises UnknownName for its platform or a capability."""
        target = Target(case=task.case, surface=task.surface, platform=task.platform, capabilities=self.capabilities)
        return retrieved(self.index, target, k=self.k, without=self.without, contaminated=self.contaminated)

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
        return lineage_order(match.card for match in self.retrieved(task).matches)

    def _noted(self, task: Task, models: Session) -> frozenset[str]:
        """The names of the cards of this run, which are noted, and whether one was lifted from this very target.

        A run that goes on, or is replayed, has the cards that were noted then.
        """
        if self.serving is Serving.NOTHING:
            return frozenset()
        text = recording_of(models).first(CARDS_TOPIC)
        if text is None:
            own = OWN if self.retrieved(task).contaminated else ""
            text = f"{', '.join(card.name for card in self._cards(task)) or 'none'}{own}"
            models.record(Noted(topic=CARDS_TOPIC, text=text))
        return frozenset(text.removesuffix(OWN).split(", "))

    def _system(self) -> str:
        part = {Serving.CARDS: "system_cards", Serving.LABELS: "system_labels"}.get(self.serving)
        shows = self.serving is not Serving.NOTHING
        return prompt("system", cards=f"\n{prompt(part)}" if part else "", choice=CHOICE if shows else "")

    def _material(self, cards: Sequence[SkillCard]) -> tuple[str, ...]:
        """The block of cards; nothing when there are none."""
        if not cards:
            return ()
        order = f"Skill cards, in the order in which lineages applied them:\n\n{order_text(cards)}"
        show = card_text if self.serving is Serving.CARDS else label_text
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


def card_method(
    name: str,
    index: CardIndex,
    *,
    k: int = DEFAULT_K,
    capabilities: Sequence[str] = (),
    goal: str = "",
    max_steps: int = 0,
) -> CardMethod:
    """The method of that name over a library: one of CARD_METHODS. Raises UnknownName."""
    if name not in CARD_METHODS:
        raise UnknownName("method", name, CARD_METHODS)
    serving, without = CARD_METHODS[name]
    return CardMethod(
        index, k=k, serving=serving, without=without, capabilities=capabilities, goal=goal, max_steps=max_steps
    )


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
