"""The method one-card: exactly one card, materialized on a fresh kernel, with a few turns to repair. For admission."""

from __future__ import annotations

from pathlib import Path

from pytest_klineage.lab.library.rendering import prompt_text
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.klineage import Asking, Kernels, read_reply, shown_again, source_text
from pytest_klineage.lab.optimizers.prompts import paragraphs, prompt
from pytest_klineage.lab.optimizers.recording import open_chat
from pytest_klineage.lab.optimizers.session import Proposals
from pytest_klineage.lab.optimizers.task import Observation, Task
from pytest_klineage.records import SkillCard

PROMPTS = Path(__file__).with_name("prompts")


class OneCard:
    """Applies one card to the task's root. Ends when the effect shows, or after `repairs` further turns.

    The judge compares with the root (`Gate.judge(..., reference_source=root)`), so that a speedup is the card's effect;
    `optimize(..., submit_root=False)` leaves out judging the root against itself. The effect shows when the lower end
    of the interval is at `effect` or above.
    """

    name = "one-card"

    def __init__(self, card: SkillCard, *, effect: float = 1.0, repairs: int = 2) -> None:
        self.card, self.effect, self.repairs = card, effect, repairs

    @property
    def max_steps(self) -> int:
        """What to give `optimize`: the first attempt and the repairs."""
        return 1 + self.repairs

    def proposals(self, task: Task, models: Session) -> Proposals:
        """See `Method`: an attempt, then repairs on the gate's feedback."""
        kernels = Kernels(task, always_last=True)
        chat = open_chat(
            models,
            "main",
            system=prompt("one_card_system", PROMPTS),
            context=(task.instructions, prompt_text(self.card)),
        )
        asking = Asking(models, chat)
        text = paragraphs(
            f"This is the kernel:\n\n{source_text(kernels.root)}",
            prompt("ask_card_first", PROMPTS, card=self.card.name),
        )
        for attempt in range(1, self.max_steps + 1):
            reply, call = asking.ask(text)
            draft = read_reply(
                reply, kernels, call=call, label=f"{self.card.name} {attempt}", note=f"card: {self.card.name}"
            )
            seen = yield draft.proposal
            if self.shows(seen):
                return
            kernels.saw(seen)
            text = paragraphs(
                seen.feedback, self._wanted(seen), shown_again(draft.drifted),
                prompt("ask_card_next", PROMPTS, default=kernels.default_text()),
            )  # fmt: skip

    def shows(self, seen: Observation) -> bool:
        """Whether a step shows the effect."""
        timing = seen.verdict.timing if seen.verdict is not None else None
        return seen.speedup is not None and timing is not None and timing.speedup.low >= self.effect

    def _wanted(self, seen: Observation) -> str:
        if seen.speedup is None:
            return ""
        return (
            f"It is right, and {seen.speedup:.3g}x as fast as the kernel that you were given; the card promises more: "
            f"{self.effect:.3g}x at least is wanted. Find what keeps the effect away here."
        )
