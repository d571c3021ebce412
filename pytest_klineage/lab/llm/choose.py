"""From what a user writes, such as anthropic:claude-opus-4-6, to a backend. There is no default."""

from __future__ import annotations

import shlex
from pathlib import Path

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.llm.backend import Backend
from pytest_klineage.lab.llm.faults import NoBackend
from pytest_klineage.lab.llm.prices import Prices

NONE = "none"
BACKENDS = {
    "anthropic": "MODEL",
    "command": "PROGRAM",
    "exchange": "FOLDER",
    "replay": "FILE",
}
"""Kinds of backends, and what stands after the colon."""


def make_backend(choice: str, prices: Prices, *, model: str = "", waits: bool = True) -> Backend:
    """The chosen backend. `model` names the price for command and exchange, "unbilled" where replies cost nothing.

    With `waits` off the exchange backend raises WaitsForReply instead of waiting.
    Raises NoBackend for "none" and for nothing, UnknownName, UsageError, NoKey, NoPrice or MissingDependency.
    """
    kind, _, rest = choice.strip().partition(":")
    if kind in ("", NONE):
        raise NoBackend
    if kind not in BACKENDS:
        raise UnknownName("backend", kind, (*BACKENDS, NONE))
    if not rest.strip():
        raise UsageError(f"the backend {kind} is written {kind}:{BACKENDS[kind]}")
    if kind == "anthropic":
        return _anthropic(rest, prices, model)
    if kind == "replay":
        from pytest_klineage.lab.llm.replay import ReplayBackend

        return ReplayBackend(Path(rest))
    if not model:
        raise UsageError(
            f"the price of replies through {kind} is unknown: name the model that answers, so that its price is used, "
            f'or "unbilled" where replies cost nothing. Known: {", ".join(sorted(prices.models))}.'
        )
    if kind == "exchange":
        from pytest_klineage.lab.llm.exchange import ExchangeBackend

        return ExchangeBackend(Path(rest), prices, model=model, waits=waits)
    return _command(rest, prices, model)


def _anthropic(rest: str, prices: Prices, model: str) -> Backend:
    from pytest_klineage.lab.llm.anthropic import AnthropicBackend

    if model and model != rest:
        raise UsageError(f"two models are named, {rest!r} and {model!r}; name one")
    return AnthropicBackend(rest, prices)


def _command(rest: str, prices: Prices, model: str) -> Backend:
    from pytest_klineage.lab.llm.command import CommandBackend

    try:
        argv = shlex.split(rest)
    except ValueError as error:
        raise UsageError(f"the command {rest!r} cannot be read: {error}") from error
    return CommandBackend(argv, prices, model=model)
