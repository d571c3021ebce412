"""What a card's log says: successes, verified scope, digest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_klineage.records import (
    CardScope,
    Carrier,
    CarrierKind,
    Category,
    Context,
    Effect,
    Interval,
    SkillCard,
    Surface,
    Trial,
    TrialOutcome,
    from_json,
    json_schema,
    to_json,
)

ORIGIN = Context(operator="gemm", shape={"M": 8}, dtype="fp32", surface=Surface.CPP, platform="cpu")
ELSEWHERE = msgspec.structs.replace(ORIGIN, shape={"M": 9})


def trial(**fields: Any) -> Trial:
    given: dict[str, Any] = {"context": ELSEWHERE, "outcome": TrialOutcome.SUCCESS, "held_out": True}
    return Trial(**(given | fields))


def card(*log: Trial) -> SkillCard:
    return SkillCard(
        name="card", category=Category.SIMD, intent="i", anchor="a",
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="x"), preconditions=(),
        effect=Effect(summary="s"), scope=CardScope(), origins=(ORIGIN,), log=log,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "counts"),
    [({}, True), ({"held_out": False}, False), ({"imported": True}, False)]
    + [({"outcome": outcome}, outcome is TrialOutcome.SUCCESS) for outcome in TrialOutcome],
)
def test_only_held_out_successes_of_this_gate_count(fields: dict[str, Any], counts: bool) -> None:
    found = card(trial(**fields))
    assert bool(found.successes) is counts
    assert found.verified == ((ORIGIN, ELSEWHERE) if counts else (ORIGIN,))


def test_the_digest_covers_the_log() -> None:
    assert card().digest != card(trial()).digest
    assert card(trial()).digest == card(trial()).digest
    assert card(trial()).digest != card(trial(speedup=Interval(1.0, 0.9, 1.1))).digest


def test_a_new_card_is_a_candidate_and_says_its_version() -> None:
    assert card().status == "candidate"
    assert b'"schema_version":1' in to_json(card())
    assert from_json(to_json(card(trial())), SkillCard) == card(trial())


def test_the_schema_lists_the_classes_of_preconditions() -> None:
    assert json_schema(SkillCard)["$defs"]["PreconditionClass"]["enum"] == [
        "data_type", "hardware", "layout", "pipeline", "storage",
    ]  # fmt: skip
