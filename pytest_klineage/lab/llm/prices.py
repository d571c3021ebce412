"""What tokens cost: the table of prices and the sums made with it. Budgets are kept in budget.py."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.faults import NoPrice
from pytest_klineage.records import Usage

SHIPPED = Path(__file__).with_name("prices.toml")
MILLION = 1_000_000
SNAPSHOT = re.compile(r"-20\d{6}$")
"""The date that a provider puts behind a model's name for one fixed version of it."""


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

    def priced(self, usage: Usage) -> Usage:
        """The usage with its cost. Raises NoPrice."""
        return msgspec.structs.replace(usage, cost_usd=self.of(usage.model).cost_usd(usage))


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
