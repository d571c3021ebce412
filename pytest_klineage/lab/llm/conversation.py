"""What a model is shown: a prefix that never changes, then turns. How it is sent is the backends' business."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from enum import StrEnum
from itertools import zip_longest

import msgspec

from pytest_klineage.errors import UsageError

DIFF_LINES, DIFF_COLUMNS = 30, 160
"""How much of a difference is shown."""
FRAME_TOKENS = 64
"""What a provider puts around each separate text, at most."""
BYTES_PER_TOKEN = 3
"""English runs at about four bytes per token, code and the newer tokenizers at about three: estimates err upwards."""
PROMPT_SET = 1
"""The number of the words in prompts: raise it when a turn's text changes, so that earlier recordings still replay.

A run over a recording of the current set must ask the recorded prompts, character by character. Over a recording of
another set it asks the recorded prompts in place of its own; whether it goes the recorded way is then seen by its
kernels, verdicts and refusals.
"""


class Role(StrEnum):
    """Who says a turn."""

    USER = "user"
    ASSISTANT = "assistant"


class Turn(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Role
    text: str


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """What stands before every turn and never changes, so that a provider can keep it in a cache."""

    system: str = ""
    """Who the model is, and how it answers."""
    context: tuple[str, ...] = ()
    """Blocks of material, the longest-lived first: the ABI, the case, the skill cards."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix and turns that begin and end with the user's. Raises UsageError for anything else."""

    prefix: Prefix
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        expected = [Role.USER if position % 2 == 0 else Role.ASSISTANT for position in range(len(self.turns))]
        if [turn.role for turn in self.turns] != expected or len(self.turns) % 2 == 0:
            raise UsageError("the turns of a conversation alternate, and begin and end with the user's")
        if any(not turn.text.strip() for turn in self.turns):
            raise UsageError("a turn of a conversation is empty; providers refuse such a request")

    @property
    def digest(self) -> str:
        """SHA-256 over everything that the model sees, in hexadecimal."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Length of all texts in UTF-8."""
        texts = (self.prefix.system, *self.prefix.context, *(turn.text for turn in self.turns))
        return sum(len(text.encode()) for text in texts)

    @property
    def most_tokens(self) -> int:
        """Input tokens that it cannot exceed: byte-level tokenizers never need more than one per byte."""
        return self.num_bytes + FRAME_TOKENS * (1 + len(self.prefix.context) + len(self.turns))

    @property
    def estimated_tokens(self) -> int:
        """Input tokens by estimate, where they are not counted."""
        return -(-self.num_bytes // BYTES_PER_TOKEN)


def estimated_tokens(text: str) -> int:
    """Tokens of a text by the same estimate."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def well_formed(text: str) -> str:
    """The text with lone surrogates replaced, which logs and broken replies may hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def continued(turns: tuple[Turn, ...], text: str, reply: str) -> tuple[Turn, ...]:
    """Turns after a question and its reply. An empty reply leaves no trace: providers refuse empty turns."""
    if not reply.strip():
        return turns
    return (*turns, Turn(Role.USER, text), Turn(Role.ASSISTANT, reply))


def as_markdown(conversation: Conversation) -> str:
    """The conversation as one text, for people and for programs that know no turns."""
    parts = [f"# Instructions\n\n{conversation.prefix.system}"] if conversation.prefix.system else []
    parts += [
        f"# Material {position}\n\n{block}" for position, block in enumerate(conversation.prefix.context, start=1)
    ]
    last = len(conversation.turns) - 1
    for position, turn in enumerate(conversation.turns):
        spoken = "Earlier request" if turn.role is Role.USER else "Earlier reply"
        parts.append(f"# {'Request' if position == last else spoken}\n\n{turn.text}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def difference(recorded: Conversation, asked: Conversation) -> str:
    """Where two conversations first differ, with the lines of that part; empty when they are the same."""
    for name, before, after in _parts(recorded, asked):
        if before != after:
            lines = list(
                difflib.unified_diff(before.splitlines(), after.splitlines(), "recorded", "asked", n=1, lineterm="")
            )
            shown = [line[:DIFF_COLUMNS] for line in lines[:DIFF_LINES]]
            more = [f"... and {len(lines) - DIFF_LINES} more lines"] if len(lines) > DIFF_LINES else []
            return "\n".join([f"{name} differs:", *(shown or ["only in its ends of lines"]), *more])
    return ""


def _parts(recorded: Conversation, asked: Conversation) -> Iterator[tuple[str, str, str]]:
    """Pairs of parts that belong together, each with its name; a part that one side lacks is empty."""
    yield "the system prompt", recorded.prefix.system, asked.prefix.system
    contexts = zip_longest(recorded.prefix.context, asked.prefix.context, fillvalue="")
    for position, (before, after) in enumerate(contexts, start=1):
        yield f"block {position} of the context", before, after
    texts = [[turn.text for turn in one.turns] for one in (recorded, asked)]
    for position, (before, after) in enumerate(zip_longest(*texts, fillvalue=""), start=1):
        yield f"turn {position}", before, after
