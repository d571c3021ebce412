"""What can go wrong between a prompt and a usable reply, by name; every message says what to do next.

KlineageError
├── UsageError
│   ├── NoBackend           no model was chosen
│   ├── NoKey               a provider needs a key that is not set
│   ├── NoPrice             a model has no price, so that no budget can hold it
│   └── TrajectoryMismatch  a prompt is not the one that the trajectory has recorded at this place
└── ModelError              an outcome of a run, not a mistake in it; `reason` is its name
    ├── BudgetExhausted     the next call could cost more than is left
    ├── BackendFailed       a call brought no reply
    └── MalformedReply      a reply that cannot be used as it was asked for
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pytest_klineage.errors import KlineageError, UsageError


class NoBackend(UsageError):
    """No model was chosen, and none is chosen by default."""

    def __init__(self) -> None:
        super().__init__(
            "this needs a language model, and none is chosen: nothing is sent anywhere unless you say so. Choose one: "
            "anthropic:MODEL (with ANTHROPIC_API_KEY set), command:PROGRAM, exchange:FOLDER or replay:FILE."
        )


class NoKey(UsageError):
    """The provider's key is not in the environment."""

    def __init__(self, variable: str) -> None:
        super().__init__(
            f"{variable} is not set, and the provider accepts no request without a key. Set it, or choose "
            "exchange:FOLDER, command:PROGRAM or replay:FILE, which need none."
        )


class NoPrice(UsageError):
    """A model has no price. The message names the file and the table to add."""

    def __init__(self, model: str, path: Path) -> None:
        super().__init__(
            f"no price is known for the model {model!r}, so no budget can hold it. Add it to a price file of your own "
            f'(or to {path}): [models."{model}"] with input, cache_write_5m, cache_write_1h, cache_read and output, '
            "each in dollars per million tokens."
        )


class TrajectoryMismatch(UsageError):
    """A prompt is not the recorded one; the message has the difference."""


class ModelError(KlineageError):
    """A model call or its reply is of no use; `reason` is the short name that records keep."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class BudgetExhausted(ModelError):
    """The next call could cost more than is left of the budget. It was not sent."""

    REASON = "budget_exhausted"

    def __init__(self, needed_usd: float, remaining_usd: float, limit_usd: float) -> None:
        super().__init__(
            self.REASON,
            f"the next call can cost up to ${needed_usd:.4f}, and ${remaining_usd:.4f} of ${limit_usd:.2f} are left. "
            "Stop here with the best kernel so far, or resume the trajectory with a larger budget.",
        )


class Failure(StrEnum):
    """Why a call brought no reply."""

    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    AUTHENTICATION = "authentication"
    REJECTED = "rejected"
    SERVER = "server"
    CONNECTION = "connection"
    BROKEN_STREAM = "broken_stream"
    TIMEOUT = "timeout"
    COMMAND = "command"
    TOO_LONG = "too_long"
    NOT_TEXT = "not_text"
    LOST = "lost"


ADVICE = {
    Failure.RATE_LIMITED: "wait, or run fewer optimizations at a time; then resume the trajectory",
    Failure.OVERLOADED: "the provider is busy: resume the trajectory later",
    Failure.AUTHENTICATION: "check the key and what it may use",
    Failure.REJECTED: "the provider refuses the request as it is: check the model's name and the length of the prompt",
    Failure.SERVER: "the provider's fault: resume the trajectory later",
    Failure.CONNECTION: "check the network and the base URL, then resume the trajectory",
    Failure.BROKEN_STREAM: "resume the trajectory; the call was charged in full, because it may have been billed",
    Failure.TIMEOUT: "resume the trajectory",
    Failure.COMMAND: "run the command by hand with the same prompt on its standard input",
    Failure.TOO_LONG: "ask for a shorter reply",
    Failure.NOT_TEXT: "a reply is UTF-8 text: write it again",
    Failure.LOST: "the program ended during the call; it was charged in full, because it may have been billed",
}
"""The next step for each failure."""


class BackendFailed(ModelError):
    """A call brought no reply. `billed` says whether the provider may ask for money nevertheless."""

    def __init__(self, failure: Failure, detail: str, *, billed: bool) -> None:
        self.failure, self.detail, self.billed = failure, detail, billed
        super().__init__(failure.value, f"the model call failed ({failure.value}): {detail}. Next: {ADVICE[failure]}.")


class Malformation(StrEnum):
    """Why a reply cannot be used."""

    REFUSED = "refused"
    TRUNCATED = "truncated"
    EMPTY = "empty"
    NO_BLOCK = "no_block"
    SEVERAL_BLOCKS = "several_blocks"
    OPEN_BLOCK = "open_block"
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_EDIT = "no_edit"
    BROKEN_EDIT = "broken_edit"
    EDIT_NOT_FOUND = "edit_not_found"
    EDIT_AMBIGUOUS = "edit_ambiguous"
    EDIT_CHANGES_NOTHING = "edit_changes_nothing"


class MalformedReply(ModelError):
    """A reply that is not what was asked for. The message can be shown to the model as it is."""

    def __init__(self, kind: Malformation, message: str) -> None:
        self.kind = kind
        super().__init__(kind.value, message)
