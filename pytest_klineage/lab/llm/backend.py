"""What every source of replies offers, and what a reply is. The sources themselves have a module each."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.prices import CacheLife, Prices
from pytest_klineage.lab.llm.tokens import bound_tokens, estimated_input_tokens, estimated_tokens
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


class Backend(Protocol):
    """A source of replies. Implement it in one file; `Chat` adds the budget and the trajectory."""

    name: str
    """The backend's kind, such as "anthropic"."""
    model: str
    """The model that is asked, as its price is listed."""
    resumable: bool
    """Whether a call that was cut off can be taken up again under its number, instead of being sent anew."""

    def begin(self) -> None:
        """A new trajectory begins. Raises UsageError where another one's calls would be mistaken for its own."""
        ...

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """Dollars that a call can cost at most. Raises NoPrice."""
        ...

    def counted_worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """The same, more tightly where input can be counted; asked for only when the first does not fit the budget."""
        ...

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        """Ask the model. `call` is the call's number in its trajectory. Raises BackendFailed."""
        ...


class EstimatedBilling:
    """Costs of a backend that reports no usage: estimated by tokens.py, and labelled so."""

    def __init__(self, model: str, prices: Prices) -> None:
        self.model, self.prices = model, prices
        prices.of(model)

    def begin(self) -> None:
        """Nothing is kept between calls."""

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """Dollars for the estimated input and all of the output."""
        tokens = estimated_input_tokens(conversation)
        return self.prices.of(self.model).worst_case_usd(tokens, max_output_tokens, CacheLife.NONE)

    def counted_worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """As above: there is nothing that counts."""
        return self.worst_case_usd(conversation, max_output_tokens)

    def estimated_usage(self, conversation: Conversation, text: str) -> Usage:
        """Usage and cost of one call by estimate."""
        usage = Usage(
            model=self.model,
            input_tokens=estimated_input_tokens(conversation),
            output_tokens=estimated_tokens(text),
            estimated=True,
        )
        return self.prices.priced(usage)


class ReportedBilling:
    """Costs of a backend that reports its usage: bounded before the call, exact after it."""

    def __init__(self, model: str, prices: Prices, cache_life: CacheLife) -> None:
        self.model, self.prices, self.cache_life = model, prices, cache_life
        prices.of(model)

    def begin(self) -> None:
        """Nothing is kept between calls."""

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """Dollars for as many input tokens as there are bytes, at their dearest, and all of the output."""
        return self.bounded_usd(bound_tokens(conversation), max_output_tokens)

    def bounded_usd(self, input_tokens: int, max_output_tokens: int) -> float:
        """Dollars for this many input tokens at their dearest, and all of the output."""
        return self.prices.of(self.model).worst_case_usd(input_tokens, max_output_tokens, self.cache_life)
