"""What every source of replies offers, and what a reply is. The sources themselves have a module each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec

from pytest_klineage.lab.llm.conversation import Conversation, estimated_tokens
from pytest_klineage.lab.llm.prices import CacheLife, Prices
from pytest_klineage.records import StopReason, Usage


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a model answered. It is data: nothing in it is executed or obeyed."""

    text: str
    usage: Usage
    """Tokens with their cost."""
    stop_reason: StopReason = StopReason.END
    model: str = ""
    """The model that answered, by the provider's own account."""
    ids: dict[str, str] = {}
    """The provider's names of request and message, and its word for why it stopped."""


class Backend(ABC):
    """A source of replies. Implement it in one file; `Chat` adds the budget and the trajectory."""

    name: str
    """The backend's kind, such as "anthropic"."""
    model: str
    """The model that is asked, as its price is listed."""
    resumable: ClassVar[bool] = False
    """Whether a call that was cut off can be taken up again under its number, instead of being sent again."""

    def begin(self) -> None:
        """A new trajectory begins. Raises UsageError where another one's calls would be mistaken for its own."""
        return

    @abstractmethod
    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """Dollars that a call can cost at most. Raises NoPrice."""

    def counted_worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """The same, more tightly where input can be counted; asked for only when the first does not fit the budget."""
        return self.worst_case_usd(conversation, max_output_tokens)

    @abstractmethod
    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        """Ask the model. `call` is the call's number in its trajectory. Raises BackendFailed."""


class EstimatedBackend(Backend):
    """A backend that reports no usage: tokens and costs are estimated, and labelled so."""

    def __init__(self, model: str, prices: Prices) -> None:
        self.model, self.prices = model, prices
        prices.of(model)

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """Dollars for the estimated input and all of the output."""
        price = self.prices.of(self.model)
        return price.worst_case_usd(conversation.estimated_tokens, max_output_tokens, CacheLife.NONE)

    def estimated_usage(self, conversation: Conversation, text: str) -> Usage:
        """Usage and cost of one call by estimate."""
        usage = Usage(
            model=self.model,
            input_tokens=conversation.estimated_tokens,
            output_tokens=estimated_tokens(text),
            estimated=True,
        )
        return self.prices.priced(usage)
