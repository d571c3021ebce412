"""How many tokens a text has, where nobody counted them: an upper bound for reserving, an estimate for charging.

Bound: one token per byte of UTF-8, and 64 for the frame of every part. Byte-level tokenizers never need more.
Estimate: one token per three bytes, rounded up. English runs at about four bytes per token, code and the newer
tokenizers at about three, so that estimates err towards too many. Whatever is estimated is labelled so in `Usage`.
"""

from __future__ import annotations

from pytest_klineage.lab.llm.conversation import Conversation

FRAME_TOKENS = 64
BYTES_PER_TOKEN = 3


def bound_tokens(conversation: Conversation) -> int:
    """Input tokens that the conversation cannot exceed."""
    return conversation.num_bytes + FRAME_TOKENS * conversation.num_parts


def estimated_input_tokens(conversation: Conversation) -> int:
    """Input tokens of the conversation by the rule above."""
    return _by_bytes(conversation.num_bytes)


def estimated_tokens(text: str) -> int:
    """Tokens of a text by the rule above."""
    return _by_bytes(len(text.encode()))


def _by_bytes(num_bytes: int) -> int:
    return -(-num_bytes // BYTES_PER_TOKEN)
