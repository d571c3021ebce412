"""What a client of ours is refused, by name; every message says what to do next. How it is sent is the wires' part."""

from __future__ import annotations

from enum import StrEnum

from pytest_klineage.errors import KlineageError


class Refusal(StrEnum):
    """Why a request was not sent on, or a kernel not judged. Trajectories keep the word under the topic "refused"."""

    NO_KEY = "no_key"
    WRONG_KEY = "wrong_key"
    NO_UPSTREAM = "no_upstream"
    """No provider of this protocol was chosen, or its key is not set."""
    NOT_JSON = "not_json"
    INVALID = "invalid"
    """A field is missing, or of another type than the contract says."""
    TOO_LARGE = "too_large"
    UNKNOWN_MODEL = "unknown_model"
    UNBOUNDED = "unbounded"
    """Something whose price cannot be bounded before the call: images, the provider's own tools, dearer tiers."""
    BUDGET = "budget_exhausted"
    WRONG_CASE = "wrong_case"
    STEP_LIMIT = "step_limit"
    CLOSED = "closed"
    """The run has ended."""
    NOT_FOUND = "not_found"


STATUS = {
    Refusal.NO_KEY: 401,
    Refusal.WRONG_KEY: 401,
    Refusal.NO_UPSTREAM: 403,
    Refusal.NOT_JSON: 400,
    Refusal.INVALID: 400,
    Refusal.TOO_LARGE: 413,
    Refusal.UNKNOWN_MODEL: 404,
    Refusal.UNBOUNDED: 400,
    Refusal.BUDGET: 402,
    Refusal.WRONG_CASE: 400,
    Refusal.STEP_LIMIT: 403,
    Refusal.CLOSED: 403,
    Refusal.NOT_FOUND: 404,
}
"""HTTP status of each. None of them is one that clients repeat by themselves (408, 409, 429, 5xx)."""


class Refused(KlineageError):
    """A request was refused; nothing was sent on, and nothing was charged."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        self.refusal = refusal
        super().__init__(message)

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return STATUS[self.refusal]
