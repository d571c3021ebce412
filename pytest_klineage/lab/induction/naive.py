"""Whether a kernel is naive: a second look when the proposer says that it is done, by words of code and by a model."""

from __future__ import annotations

from pytest_klineage.lab.induction.replies import Leftover, leftovers_in
from pytest_klineage.lab.induction.simplicity import leftovers_of
from pytest_klineage.lab.induction.texts import filled, kernel_text
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.llm.session import Chat
from pytest_klineage.records import KernelSource

UNREADABLE = Leftover("unknown", "the audit", "its reply could not be used")


class Auditor:
    """Looks for what is left of optimization in a kernel. Every look is a conversation of its own."""

    def __init__(self, chat: Chat, *, attempts: int) -> None:
        self._chat, self._attempts = chat, attempts

    def leftovers(self, kernel: KernelSource) -> tuple[Leftover, ...]:
        """What is left, in order; empty when the code's words and the model both find nothing.

        A model that cannot be understood has not agreed. Nobody is asked about what can be seen without asking.
        """
        if seen := leftovers_of(kernel):
            return seen
        self._chat.forget()
        prompt = filled("audit-turn", kernel=kernel_text(kernel))
        for _ in range(self._attempts):
            reply = self._chat.ask(prompt)
            try:
                return leftovers_in(reply)
            except MalformedReply as error:
                prompt = f"The reply cannot be used: {error}\n\nAnswer with the JSON object and nothing else."
        return (UNREADABLE,)
