"""Prices: what is shipped is complete, sums are right, and what is not known is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.faults import NoPrice
from pytest_klineage.lab.llm.prices import SHIPPED, CacheLife, Price, Prices
from pytest_klineage.records import Usage

TOKENS = st.integers(0, 10**7)
DOLLARS = st.floats(0, 1000)
PRICES = st.builds(
    Price, input=DOLLARS, cache_write_5m=DOLLARS, cache_write_1h=DOLLARS, cache_read=DOLLARS, output=DOLLARS
)
SHIPPED_PRICES = Prices.load()


def test_a_sum_by_hand() -> None:
    usage = Usage(
        model="claude-opus-4-6", input_tokens=1_000_000, output_tokens=100_000, cache_read_tokens=2_000_000,
        cache_write_tokens=400_000, cache_write_1h_tokens=300_000,
    )  # fmt: skip
    assert SHIPPED_PRICES.priced(usage).cost_usd == pytest.approx(5 + 2.5 + 1 + 2.5 + 3)


@pytest.mark.parametrize("model", sorted(set(SHIPPED_PRICES.models) - {"unbilled"}))
def test_shipped_prices_are_in_a_plausible_order(model: str) -> None:
    price = SHIPPED_PRICES.of(model)
    assert 0 < price.cache_read < price.input < price.cache_write_5m < price.cache_write_1h < price.output


def test_the_table_says_when_and_where_from() -> None:
    text = SHIPPED.read_text()
    assert "source:" in text
    assert "checked = " in text


def test_unbilled_costs_nothing() -> None:
    assert SHIPPED_PRICES.priced(Usage(model="unbilled", input_tokens=10**9, output_tokens=10**9)).cost_usd == 0


def test_a_dated_name_has_the_price_of_the_undated() -> None:
    assert SHIPPED_PRICES.of("claude-opus-4-5-20251101") == SHIPPED_PRICES.of("claude-opus-4-5")


@pytest.mark.parametrize("model", ["", "gpt", "claude-opus-4", "claude-opus-4-6-fast", "claude-opus-4-6-2025"])
def test_no_other_name_is_guessed_at(model: str) -> None:
    with pytest.raises(NoPrice) as caught:
        SHIPPED_PRICES.of(model)
    assert f'[models."{model}"]' in str(caught.value)
    assert str(SHIPPED) in str(caught.value)


def test_a_file_of_ones_own_adds_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        '[models."my/model:7b"]\ninput=1\ncache_write_5m=1\ncache_write_1h=1\ncache_read=1\noutput=2\n'
        "[models.claude-opus-4-6]\ninput=4\ncache_write_5m=5\ncache_write_1h=8\ncache_read=0.4\noutput=20\n"
    )
    prices = Prices.load(path)
    assert prices.of("my/model:7b").output == 2
    assert prices.of("claude-opus-4-6").input == 4
    assert prices.of("claude-opus-5").input == 5
    with pytest.raises(NoPrice, match=str(path)):
        prices.of("another")


@pytest.mark.parametrize(
    "text",
    [
        "[models.x]\ninput = 1\n", "[models.x]\ninput = 'a'\n", "not toml", "[models]\nx = 1\n",
        "[models.x]\ninput=-1\ncache_write_5m=1\ncache_write_1h=1\ncache_read=1\noutput=2\n",
        "[models.x]\ninput=nan\ncache_write_5m=1\ncache_write_1h=1\ncache_read=1\noutput=2\n",
        "[models.x]\ninput=inf\ncache_write_5m=1\ncache_write_1h=1\ncache_read=1\noutput=2\n",
        "[models.x]\ninput=1\ncache_write_5m=1\ncache_write_1h=1\ncache_read=1\noutput=2\nbatch=1\n",
    ],
)  # fmt: skip
def test_a_file_that_holds_no_prices_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=str(path)):
        Prices.load(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml cannot be read"):
        Prices.load(tmp_path / "absent.toml")


@settings(deadline=None)
@given(PRICES, TOKENS, TOKENS, TOKENS, TOKENS)
def test_the_worst_case_is_one(price: Price, fresh: int, read: int, written: int, output: int) -> None:
    total = fresh + read + written
    for life, where in (
        (CacheLife.FIVE_MINUTES, {"cache_write_tokens": written}),
        (CacheLife.ONE_HOUR, {"cache_write_1h_tokens": written}),
        (CacheLife.NONE, {"input_tokens": fresh + written}),
    ):
        usage = Usage(model="x", **{"input_tokens": fresh, "cache_read_tokens": read, "output_tokens": output, **where})
        bound = price.worst_case_usd(total, output, life)
        assert price.cost_usd(usage) <= bound * (1 + 1e-12) + 1e-12
