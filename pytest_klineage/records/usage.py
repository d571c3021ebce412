"""Usage: what one call of a language model consumed, and what it cost."""

from __future__ import annotations

import msgspec


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
        return Usage(
            model=self.model if self.model == other.model else "mixed",
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cache_read_tokens=self.cache_read_tokens + other.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            cache_write_1h_tokens=self.cache_write_1h_tokens + other.cache_write_1h_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
            estimated=self.estimated or other.estimated,
        )
