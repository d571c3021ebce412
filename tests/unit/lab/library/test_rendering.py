"""Cards as text: deterministic, whole, and with the carrier verbatim."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.lab.library.front_matter import split_front_matter
from pytest_klineage.lab.library.rendering import (
    DESCRIPTION_LIMIT,
    context_text,
    description,
    fenced,
    prompt_text,
    sections,
    skill_markdown,
    speedup_text,
)
from pytest_klineage.records import CardScope, Carrier, CarrierKind, Code, Interval, Risk, SkillCard, from_json, to_json

MakeCard = Callable[..., SkillCard]
FIELDS = (
    "Intent", "Anchor", "Carrier", "Preconditions", "Effect", "Evidence", "Risks", "Scope", "Verification log",
)  # fmt: skip


def test_a_prompt_has_the_nine_fields_in_the_papers_order(make_card: MakeCard) -> None:
    assert tuple(re.findall(r"^## (.+)$", prompt_text(make_card()), re.M)) == FIELDS
    assert [title for title, _ in sections(make_card())] == list(FIELDS)


@given(st.text(max_size=80))
def test_the_carrier_is_verbatim_in_a_fence_that_it_cannot_close(make_card: MakeCard, text: str) -> None:
    card = make_card(carrier=Carrier(kind=CarrierKind.SNIPPET, language="cpp", text=text))
    for whole in (prompt_text(card), skill_markdown(card)):
        fence = fenced(text, "cpp").partition("cpp\n")[0]
        inside = whole.partition(f"{fence}cpp\n")[2]
        assert inside.startswith(text)
        assert inside[len(text) :].lstrip("\n").startswith(fence)
        assert fence not in text


def test_everything_that_a_card_says_is_in_its_prompt(make_card: MakeCard) -> None:
    card = make_card()
    text = prompt_text(card)
    for item in card.preconditions:
        assert item.condition in text
        assert item.reason in text
    assert card.evidence[0].transition in text
    assert card.risks[0].text in text
    assert "1.5x [1.4, 1.6]" in text
    assert "rejected; on gemm-96x96x96-fp32 (cpu cpp) after tile_stage; held out; by the rule square_root" in text
    assert "width: 8" in text


def test_every_field_of_a_card_changes_its_text(make_card: MakeCard) -> None:
    card = make_card()
    bare = {
        "name": "other", "status": "candidate", "category": "mma", "intent": "x", "anchor": "x", "settings": {},
        "evidence": [], "risks": [], "origins": [], "log": [], "provenance": {}, "preconditions": [],
        "carrier": {"kind": "diff", "language": "diff", "text": "x"}, "effect": {"summary": "x"}, "scope": {},
    }  # fmt: skip
    assert set(bare) == set(card.__struct_fields__)
    for field, value in bare.items():
        plain = json.loads(to_json(card)) | {field: value}
        assert skill_markdown(from_json(json.dumps(plain), SkillCard)) != skill_markdown(card), field


def test_the_same_card_is_the_same_text_whatever_way_it_came(make_card: MakeCard) -> None:
    card = make_card(settings={"b": "2", "a": "1"}, provenance={"y": "2", "x": "1"})
    again = make_card(settings={"a": "1", "b": "2"}, provenance={"x": "1", "y": "2"})
    assert skill_markdown(card) == skill_markdown(again) == skill_markdown(from_json(to_json(card), SkillCard))


@given(st.text(max_size=60), st.text(max_size=60))
def test_the_front_matter_is_what_loaders_read(make_card: MakeCard, intent: str, anchor: str) -> None:
    card = make_card(intent=intent, anchor=anchor)
    front, body = split_front_matter(skill_markdown(card))
    assert front["name"] == card.name
    assert front["description"] == description(card)
    assert front["metadata"] == {"card": card.digest, "schema-version": "1", "status": "admitted"}
    assert body.startswith("\n# gemm-simd\n")


SKILLS = sorted((Path(__file__).parents[4] / "skills").glob("*/SKILL.md"))


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_yaml_parser_reads_what_is_shipped(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["name"] == path.parent.name
    assert isinstance(fields["description"], str)
    assert 0 < len(fields["description"]) <= DESCRIPTION_LIMIT
    assert all(isinstance(value, str) for value in fields["metadata"].values())
    assert body.lstrip().startswith(f"# {path.parent.name}\n")


def test_a_description_says_what_and_when(make_card: MakeCard) -> None:
    assert description(make_card()) == (
        "Compute several neighbouring results by one vector instruction. Use when the kernel has: an innermost loop "
        "over contiguous results (operators: gemm; languages: cpp; platforms: cpu)"
    )
    assert "(" not in description(make_card(scope=CardScope(operators=("*",))))


@given(st.integers(0, 3000))
def test_a_description_is_never_too_long(make_card: MakeCard, size: int) -> None:
    assert 0 < len(description(make_card(intent="x" * size))) <= DESCRIPTION_LIMIT


def test_what_is_missing_is_said(make_card: MakeCard) -> None:
    card = make_card(risks=(), evidence=(), log=(), preconditions=())
    bare = msgspec.structs.replace(card, effect=msgspec.structs.replace(card.effect, speedup=None, span=(), case=""))
    text = prompt_text(bare)
    assert "- measured: not measured" in text
    assert "no trial yet" in text
    assert text.count("none recorded") == 5 + 2


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (None, "not measured"),
        (Interval(1.3, 1.25, 1.35), "1.3x [1.25, 1.35]"),
        (Interval(194, 190, 199), "194x [190, 199]"),
    ],
)
def test_speedups_have_their_interval(interval: Interval | None, text: str) -> None:
    assert speedup_text(interval) == text


def test_a_place_is_a_few_words(make_card: MakeCard) -> None:
    assert context_text(make_card().origins[0]) == "gemm-64x64x64-fp32 (cpu cpp) after tile_stage"


def test_a_risk_says_whether_the_gate_saw_it(make_card: MakeCard) -> None:
    seen = Risk(text="Wrong where N is odd.", code=Code.MISMATCH, evidence="ab" * 32)
    text = prompt_text(make_card(risks=(seen, Risk(text="Slow where K is small."))))
    assert f"- Wrong where N is odd. (seen by the gate: `wrong_value.mismatch`, transition `{'ab' * 32}`)\n" in text
    assert "- Slow where K is small. (expected, not seen by the gate)\n" in text
