"""Choosing a backend: nothing by default, and every mistake names what is valid."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.llm.choose import BACKENDS, make_backend
from pytest_klineage.lab.llm.faults import NoBackend, NoPrice
from pytest_klineage.lab.llm.prices import Prices


@pytest.mark.parametrize("choice", ["", "none", "  none "])
def test_nothing_is_chosen_by_default(choice: str, prices: Prices) -> None:
    with pytest.raises(NoBackend) as caught:
        make_backend(choice, prices)
    assert all(f"{kind}:" in str(caught.value) for kind in BACKENDS)


def test_an_unknown_kind_lists_the_valid_ones(prices: Prices) -> None:
    with pytest.raises(UnknownName, match="'anthropic'"):
        make_backend("antropic:x", prices)


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_a_missing_value_after_the_colon_is_named(kind: str, prices: Prices) -> None:
    with pytest.raises(UsageError, match=f"{kind}:{BACKENDS[kind]}"):
        make_backend(f"{kind}:", prices)


@pytest.mark.parametrize("choice", ["exchange:folder", "command:cat"])
def test_a_reply_without_a_price_is_refused(choice: str, prices: Prices) -> None:
    with pytest.raises(UsageError, match="unbilled"):
        make_backend(choice, prices)
    with pytest.raises(NoPrice):
        make_backend(choice, prices, model="unknown")


def test_each_kind_can_be_chosen(prices: Prices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = make_backend(f"exchange:{tmp_path}", prices, model="toy")
    assert (exchange.name, exchange.model, exchange.resumable) == ("exchange", "toy", True)
    command = make_backend(f"command:'{sys.executable}' -c 'print(1)'", prices, model="toy")
    assert (command.name, command.model, command.resumable) == ("command", "toy", False)
    with pytest.raises(UsageError, match="no trajectory"):
        make_backend(f"replay:{tmp_path / 'absent'}", prices)
    pytest.importorskip("anthropic", reason="needs the extra llm")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "test")
    backend = make_backend("anthropic:claude-opus-4-6", prices)
    assert (backend.name, backend.model, backend.resumable) == ("anthropic", "claude-opus-4-6", False)
    with pytest.raises(UsageError, match="two models"):
        make_backend("anthropic:claude-opus-4-6", prices, model="toy")


def test_an_unreadable_command_is_reported(prices: Prices) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        make_backend("command:cat 'open", prices, model="toy")
