"""Dollars: what tokens cost by the table of prices, and the budget of one workload, reserved before each call."""

from __future__ import annotations

import math
import re
import threading
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.faults import BudgetExhausted, NoPrice
from pytest_klineage.records import Event, Usage, charged_usd, unanswered

SHIPPED = Path(__file__).with_name("prices.toml")
MILLION = 1_000_000
SNAPSHOT = re.compile(r"-20\d{6}$")
"""The date that a provider puts after a model's name for one fixed version of it."""
SLACK_USD = 1e-9
"""Rounding of sums of binary fractions; no call is as cheap as this."""


class CacheLife(StrEnum):
    """How long a provider is asked to keep a prefix."""

    NONE = "none"
    FIVE_MINUTES = "5m"
    ONE_HOUR = "1h"


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dollars per million tokens of one model."""

    input: float
    cache_write_5m: float
    cache_write_1h: float
    cache_read: float
    output: float

    def __post_init__(self) -> None:
        if any(not 0 <= getattr(self, name) < float("inf") for name in self.__struct_fields__):
            raise ValueError("a price is a finite number of dollars, and not negative")

    def cost_usd(self, usage: Usage) -> float:
        """Dollars for what was used."""
        parts = (
            usage.input_tokens * self.input,
            usage.cache_write_tokens * self.cache_write_5m,
            usage.cache_write_1h_tokens * self.cache_write_1h,
            usage.cache_read_tokens * self.cache_read,
            usage.output_tokens * self.output,
        )
        return sum(parts) / MILLION

    def worst_case_usd(self, input_tokens: int, output_tokens: int, life: CacheLife) -> float:
        """Dollars at most: every input token at the dearest price that it can have, all output tokens written."""
        written = {
            CacheLife.NONE: (),
            CacheLife.FIVE_MINUTES: (self.cache_write_5m,),
            CacheLife.ONE_HOUR: (self.cache_write_5m, self.cache_write_1h),
        }[life]
        return (input_tokens * max(self.input, self.cache_read, *written) + output_tokens * self.output) / MILLION


class Prices:
    """Prices by model. `Prices.load()` reads the shipped table and, over it, files of the user's own."""

    def __init__(self, models: Mapping[str, Price], path: Path = SHIPPED) -> None:
        self.models = dict(models)
        self.path = path

    @classmethod
    def load(cls, *paths: Path) -> Self:
        """The shipped table, overridden by each file in turn. Raises UsageError for a file that holds no prices."""
        models: dict[str, Price] = {}
        for path in (SHIPPED, *paths):
            models |= _read(path)
        return cls(models, paths[-1] if paths else SHIPPED)

    def of(self, model: str) -> Price:
        """The price of a model; a dated name (claude-opus-4-5-20251101) has that of the undated. Raises NoPrice."""
        for name in (model, SNAPSHOT.sub("", model)):
            if name in self.models:
                return self.models[name]
        raise NoPrice(model, self.path)

    def priced(self, usage: Usage, asked: str = "") -> Usage:
        """The usage with its cost; where its model has no price, that of the model that was asked, as an estimate.

        Raises NoPrice.
        """
        try:
            price, estimated = self.of(usage.model), usage.estimated
        except NoPrice:
            if not asked:
                raise
            price, estimated = self.of(asked), usage.estimated or usage.model not in ("", asked)
        return msgspec.structs.replace(usage, cost_usd=price.cost_usd(usage), estimated=estimated)


def _read(path: Path) -> dict[str, Price]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(table.get("models", {}), type=dict[str, Price])
    except OSError as error:
        raise UsageError(f"the price file {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(
            f'the price file {path} is not of the form [models."NAME"] with input, cache_write_5m, cache_write_1h, '
            f"cache_read and output in dollars per million tokens: {error}"
        ) from error


class Budget:
    """A limit that no call is sent beyond. Safe to share between threads.

    A call is reserved at the most it can cost, then charged with what it did cost. As long as no call costs more than
    was reserved for it, the sum of charges never exceeds the limit; otherwise it does by that difference, once.
    """

    def __init__(self, limit_usd: float, spent_usd: float = 0.0) -> None:
        if not 0 <= limit_usd < math.inf:
            raise UsageError(f"a budget is a finite number of dollars, 0 or more, got {limit_usd}")
        self.limit_usd = limit_usd
        self._spent_usd = spent_usd
        self._reserved: dict[int, float] = {}
        self._lock = threading.Lock()

    @classmethod
    def restored(cls, limit_usd: float, events: Iterable[Event]) -> Self:
        """A budget as a trajectory left it. Calls that were cut off stay reserved until they are charged."""
        events = tuple(events)
        budget = cls(limit_usd, charged_usd(events))
        budget._reserved = {call: asked.reserved_usd for call, asked in unanswered(events).items()}
        return budget

    @property
    def spent_usd(self) -> float:
        """Dollars charged."""
        with self._lock:
            return self._spent_usd

    @property
    def reserved_usd(self) -> float:
        """Dollars that calls under way can cost at most."""
        with self._lock:
            return math.fsum(self._reserved.values())

    @property
    def remaining_usd(self) -> float:
        """Dollars that are neither charged nor reserved; never negative."""
        with self._lock:
            return self._remaining_usd()

    def reserve(self, call: int, worst_case_usd: float) -> None:
        """Set aside what a call can cost at most. Raises BudgetExhausted, and then the call must not be sent."""
        if not 0 <= worst_case_usd < math.inf:
            raise UsageError(f"the cost of a call is a finite number of dollars, 0 or more, got {worst_case_usd}")
        with self._lock:
            if call in self._reserved:
                raise UsageError(f"call {call} is reserved already")
            if worst_case_usd > self._remaining_usd() + SLACK_USD:
                raise BudgetExhausted(worst_case_usd, self._remaining_usd(), self.limit_usd)
            self._reserved[call] = worst_case_usd

    def charge(self, call: int, cost_usd: float) -> None:
        """Replace a call's reservation by what it cost; nothing, when it was never billed."""
        if not 0 <= cost_usd < math.inf:
            raise UsageError(f"the cost of a call is a finite number of dollars, 0 or more, got {cost_usd}")
        with self._lock:
            if self._reserved.pop(call, None) is None:
                raise UsageError(f"call {call} was not reserved, or has been charged already")
            self._spent_usd += cost_usd

    def reservation_usd(self, call: int) -> float | None:
        """What is set aside for a call; None when it is not under way."""
        with self._lock:
            return self._reserved.get(call)

    def _remaining_usd(self) -> float:
        return max(0.0, self.limit_usd - self._spent_usd - math.fsum(self._reserved.values()))
