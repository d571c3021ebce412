"""Trajectory: the ordered events of one optimization, as lines of JSON, and what follows from them.

Every event is one line. `Asked` is written before a model is called and `Answered` or `Failed` after it, so that a file
which ends anywhere shows what was spent at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from pytest_klineage.errors import BadRecord
from pytest_klineage.records.codec import from_json, whole_lines
from pytest_klineage.records.verdict import SCHEMA_VERSION, Code


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and dollars of one or more model calls."""

    model: str
    input_tokens: int = 0
    """Input tokens that were neither read from nor written to a cache."""
    output_tokens: int = 0
    """Tokens that the model wrote, its thinking included."""
    cache_read_tokens: int = 0
    """Input tokens that were read from a cache."""
    cache_write_tokens: int = 0
    """Input tokens that were written to a cache which lasts five minutes."""
    cache_write_1h_tokens: int = 0
    """Input tokens that were written to a cache which lasts an hour."""
    cost_usd: float = 0.0
    estimated: bool = False
    """True when the provider reported no usage and the figures are estimates."""

    @property
    def total_input_tokens(self) -> int:
        """All input tokens, from wherever they came."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens + self.cache_write_1h_tokens

    def __add__(self, other: Usage) -> Usage:
        counted = [name for name in self.__struct_fields__ if name not in ("model", "estimated")]
        sums = {name: getattr(self, name) + getattr(other, name) for name in counted}
        model = self.model if self.model == other.model else "mixed"
        return Usage(model=model, estimated=self.estimated or other.estimated, **sums)


class StopReason(StrEnum):
    """Why a model stopped writing."""

    END = "end"
    """It was done."""
    MAX_TOKENS = "max_tokens"
    """The limit on output tokens, or the model's context, cut it off."""
    REFUSAL = "refusal"
    """It, or its provider, declined to answer."""
    OTHER = "other"
    """Something that this version does not know; the provider's word is among the ids."""


class Begun(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first event: what is optimized, by whom, for how much."""

    name: str
    """What people call the optimization, such as "klineage gemm-4096x4096x4096-bf16 #1"."""
    backend: str
    model: str
    budget_usd: float
    settings: dict[str, str] = {}
    """Whatever else a reader needs: method, case, seed, versions."""
    prompt_set: int = 1
    """Number of the words that prompts had (`lab.llm.conversation`)."""


class Opened(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A chat was opened: the part of its prompts that never changes."""

    chat: str
    system: str
    context: tuple[str, ...] = ()


class Asked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A prompt is about to be sent."""

    call: int
    """Number of the call in its trajectory, from 1."""
    chat: str
    digest: str
    """SHA-256 over everything that the model sees."""
    text: str
    """The new turn."""
    history: int
    """How many earlier turns of the chat go with it."""
    max_output_tokens: int
    reserved_usd: float
    """What the call can cost at most."""


class Answered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A reply has arrived, and has been charged."""

    call: int
    text: str
    stop_reason: StopReason
    model: str
    usage: Usage
    ids: dict[str, str] = {}
    """The provider's names of request and message."""
    seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A call brought no reply."""

    call: int
    reason: str
    """What kind of failure, such as "overloaded" or "lost"."""
    message: str
    cost_usd: float
    """What was charged: nothing, or all that was reserved where the provider may have billed it."""


class Judged(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The gate has judged a kernel."""

    source_digest: str
    code: Code
    """The reason that decided; its status is the verdict's."""
    verdict: str
    """Where the full verdict lies, such as a run store's path and line."""
    call: int = 0
    """The call whose reply the kernel came from; 0 for one that no model wrote."""
    speedup: float | None = None
    """None when the kernel was not scored."""
    screened: bool = False
    """Whether it was right and only screened, so that its speedup is not kept here."""
    best_speedup: float | None = None
    """The best so far, this one included."""


class Noted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Something that a policy wants to find again: a memory, a choice, a malformed reply."""

    topic: str
    text: str


class Stopped(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The optimization ended, or was interrupted for a reason; it may go on in later lines."""

    reason: str
    message: str = ""


Event = Begun | Opened | Asked | Answered | Failed | Judged | Noted | Stopped


class TrajectoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trajectory: an event, and when it happened."""

    event: Event
    at: str
    """UTC, ISO 8601."""
    schema_version: int = SCHEMA_VERSION


def parse_trajectory(data: bytes, name: str = "trajectory") -> tuple[tuple[TrajectoryLine, ...], tuple[str, ...]]:
    """Lines of a file and warnings. A last line that was cut short is left out with a warning; BadRecord for others."""
    lines, warnings = whole_lines(data, name)
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(from_json(line, TrajectoryLine))
        except BadRecord as error:
            raise BadRecord(f"{name}, line {number}: {error}") from error
    return tuple(found), warnings


def begun_of(events: Iterable[Event]) -> Begun | None:
    """How a trajectory begins; None for events that do not have it."""
    return next((event for event in events if isinstance(event, Begun)), None)


def unanswered(events: Iterable[Event]) -> dict[int, Asked]:
    """Calls that were cut off: sent, and neither answered nor failed."""
    pending: dict[int, Asked] = {}
    for event in events:
        if isinstance(event, Asked):
            pending[event.call] = event
        elif isinstance(event, Answered | Failed):
            pending.pop(event.call, None)
    return pending


def charged_usd(events: Iterable[Event]) -> float:
    """Dollars that were charged; calls that were cut off are not among them (see `unanswered`)."""
    return sum(_charge(event) for event in events)


def cost_curve(events: Iterable[Event]) -> tuple[tuple[float, float | None], ...]:
    """For every verdict, in order: dollars charged until then, and the best speedup so far (None until one scored)."""
    cost, curve = 0.0, []
    for event in events:
        cost += _charge(event)
        if isinstance(event, Judged):
            curve.append((cost, event.best_speedup))
    return tuple(curve)


def _charge(event: Event) -> float:
    if isinstance(event, Answered):
        return event.usage.cost_usd
    return event.cost_usd if isinstance(event, Failed) else 0.0
