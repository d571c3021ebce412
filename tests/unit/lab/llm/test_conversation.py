"""Conversations alternate, have a digest over everything, and say where they differ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.conversation import (
    Conversation,
    Prefix,
    Role,
    Turn,
    as_markdown,
    continued,
    difference,
    estimated_tokens,
)

WORDS = st.text(min_size=1, max_size=20).filter(lambda text: text.strip())


def talk(*texts: str, system: str = "", context: tuple[str, ...] = ()) -> Conversation:
    roles = (Role.USER, Role.ASSISTANT)
    turns = tuple(Turn(roles[position % 2], text) for position, text in enumerate(texts))
    return Conversation(prefix=Prefix(system=system, context=context), turns=turns)


TALKS = st.builds(
    lambda texts, system, context: talk(*texts[: len(texts) - (len(texts) + 1) % 2], system=system, context=context),
    st.lists(WORDS, min_size=1, max_size=5),
    st.text(max_size=20),
    st.lists(st.text(max_size=20), max_size=3).map(tuple),
)


@pytest.mark.parametrize("texts", [(), ("question", "answer"), ("",), ("question", "  \n", "more")])
def test_turns_that_no_provider_takes_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        talk(*texts)


def test_turns_alternate() -> None:
    with pytest.raises(UsageError):
        Conversation(prefix=Prefix(), turns=(Turn(Role.ASSISTANT, "I begin"),))


@settings(deadline=None)
@given(TALKS, TALKS)
def test_equal_digests_mean_equal_conversations(one: Conversation, other: Conversation) -> None:
    assert (one.digest == other.digest) == (one == other)
    assert (difference(one, other) == "") == (one == other) or _only_empty_blocks(one, other)


def _only_empty_blocks(one: Conversation, other: Conversation) -> bool:
    """An absent block of context and an empty one look alike in a difference."""
    return [block for block in one.prefix.context if block] == [block for block in other.prefix.context if block]


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (talk("q", system="a"), talk("q", system="b"), "the system prompt"),
        (talk("q", context=("x", "y")), talk("q", context=("x", "z")), "block 2 of the context"),
        (talk("q", context=("x",)), talk("q", context=("x", "z")), "block 2 of the context"),
        (talk("q", "a", "r"), talk("q", "b", "r"), "turn 2"),
        (talk("q"), talk("q", "a", "r"), "turn 2"),
    ],
)
def test_a_difference_names_the_first_part(one: Conversation, other: Conversation, named: str) -> None:
    assert difference(one, other).startswith(f"{named} differs:")


def test_a_difference_shows_both_lines_and_is_bounded() -> None:
    before = "\n".join(f"line {number}" for number in range(500))
    shown = difference(talk(before), talk(before.replace("line 250", "new")))
    assert "-line 250\n+new" in shown
    assert len(difference(talk("x" * 10_000), talk("\n".join("y" * 500))).splitlines()) < 40
    assert len(difference(talk("x" * 100_000), talk("y" * 100_000))) < 1000


def test_the_text_holds_everything_once_and_the_request_last() -> None:
    text = as_markdown(talk("one", "two", "three", system="be brief", context=("abi",)))
    assert [text.count(f"\n\n{part}\n") for part in ("be brief", "abi", "one", "two", "three")] == [1] * 5
    assert text.endswith("# Request\n\nthree\n")


def test_an_empty_reply_leaves_no_trace() -> None:
    assert continued((), "question", " \n") == ()
    assert continued((), "question", "answer") == (Turn(Role.USER, "question"), Turn(Role.ASSISTANT, "answer"))


@settings(deadline=None)
@given(TALKS)
def test_an_estimate_never_exceeds_the_bound(conversation: Conversation) -> None:
    assert 0 < conversation.estimated_tokens <= conversation.most_tokens


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abc", 1), ("abcd", 2), ("äöü", 2)])
def test_the_estimate_is_a_token_for_three_bytes(text: str, tokens: int) -> None:
    assert estimated_tokens(text) == tokens
