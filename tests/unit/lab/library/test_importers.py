"""Cards of two foreign formats: what is mapped, what is refused by name. The cards were written for these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.lab.library.cards import read_card, write_card
from pytest_klineage.lab.library.front_matter import FrontMatterError
from pytest_klineage.lab.library.importers import NO_REASON, UnmappedField, from_nine_fields, from_skill_markdown
from pytest_klineage.lab.library.lint import lint_card
from pytest_klineage.records import (
    CardStatus,
    CarrierKind,
    Category,
    Context,
    PreconditionClass,
    Surface,
    TrialOutcome,
)

PASSED = {"compile_passed": True, "correctness_passed": True, "profile_passed": True, "latency_ms": 0.5}
TARGET = {"case": "topk", "language": "cuda", "platform": "nvidia-sm90a-cuda13", "prior_actions": ["sm_stage"]}
NINE: dict[str, Any] = {
    "skill_id": "3f2a9b7c4d5e6f708192",
    "intent": "Keep a row in shared memory.",
    "anchor": "the loop that reads the row again",
    "carrier": "__shared__ float row[N];",
    "precondition": ["Storage: the row fits.", "Layout: rows are contiguous."],
    "effect": ["One read of the row.", "Less traffic."],
    "evidence": [
        {
            "action_category": "sm-stage",
            "locus": "select",
            "before_fingerprint": "aa",
            "after_fingerprint": "bb",
            "backward_edit": "remove the row",
            "forward_edit": "add the row",
            "predecessor_validation": PASSED,
            "rejected_evidence": ["without a barrier the result differs"],
        }
    ],
    "risk": ["a missing barrier"],
    "scope": {
        "cases": ["Top-K"],
        "languages": ["CUDA"],
        "platforms": ["sm90a"],
        "prior_actions": ["multi-threaded block parallelism"],
    },
    "verification_log": [
        {"target": TARGET, "validation": PASSED, "expected_effect_observed": True, "held_out": True},
        {"target": TARGET, "validation": PASSED, "expected_effect_observed": False, "held_out": True},
        {"target": TARGET, "validation": PASSED | {"profile_passed": False}, "held_out": False},
    ],
    "requires": [{"locus": "hardware", "name": "TMA"}, {"locus": "loop", "name": "tiles"}],
    "provides": [{"locus": "loop", "name": "staged"}],
    "conflicts": [],
}
MARKDOWN = """\
---
skill_id: topk.shared-row
intent: Keep a row in shared memory.
preconditions:
- 'Data types: no additional requirement.'
- 'Layout: rows are contiguous.'
- 'Storage: the row fits.'
- 'Pipeline: the row is complete before it is read.'
- 'Hardware: shared memory.'
scope:
  cases:
  - topk
  languages:
  - cuda
  platforms:
  - nvidia-sm90a-cuda13
---

# Overview

Stage the row in
`select`.

Keep the barrier.

## Example configuration

Rows of 4096 keys,
512 threads.

# Precondition

- Layout: each thread copies its own part,
  so the parts must be known.
- Storage: otherwise the kernel does not start.

# Scope

- Cases: topk

# Code Change Snippet

Only `select` changes.

## Before

```cuda
# not a heading
```

## After

```cuda
__shared__ float row[4096];
```
"""


def changed(**fields: Any) -> bytes:
    return json.dumps(NINE | fields).encode()


def test_a_card_of_nine_fields_becomes_a_candidate() -> None:
    card = from_nine_fields(json.dumps(NINE))
    assert (card.name, card.status, card.category) == (
        "tile-stage-3f2a9b7c4d5e", CardStatus.CANDIDATE, Category.TILE_STAGE,
    )  # fmt: skip
    assert (card.intent, card.anchor, card.carrier.text) == (NINE["intent"], NINE["anchor"], NINE["carrier"])
    assert [(item.kind, item.condition, item.reason) for item in card.preconditions] == [
        (PreconditionClass.STORAGE, "the row fits.", NO_REASON),
        (PreconditionClass.LAYOUT, "rows are contiguous.", NO_REASON),
    ]
    assert card.effect.summary == "One read of the row. Less traffic."
    assert card.effect.speedup is None
    assert [risk.text for risk in card.risks] == ["a missing barrier", "without a barrier the result differs"]
    assert card.scope.capabilities == ("shared_memory", "tma_load")
    assert card.origins == (
        Context(operator="topk", surface=Surface.CUDA, platform="sm90", prior=(Category.BLOCK_PARALLEL,)),
    )


def test_imported_trials_are_kept_and_admit_nothing() -> None:
    card = from_nine_fields(json.dumps(NINE))
    assert [trial.outcome for trial in card.log] == [
        TrialOutcome.SUCCESS, TrialOutcome.NO_EFFECT, TrialOutcome.REJECTED,
    ]  # fmt: skip
    assert all(trial.imported for trial in card.log)
    assert [trial.held_out for trial in card.log] == [True, True, False]
    assert card.log[0].context.platform == "sm90"
    assert card.log[0].context.prior == (Category.TILE_STAGE,)
    assert '"latency_ms": 0.5' in card.log[0].note
    assert card.successes == ()


def test_nothing_of_the_evidence_is_lost() -> None:
    card = from_nine_fields(json.dumps(NINE))
    assert card.evidence == ()
    assert card.provenance["evidence[0].forward_edit"] == "add the row"
    assert card.provenance["evidence[0].before_fingerprint"] == "aa"
    assert "latency_ms" in card.provenance["evidence[0].predecessor_validation"]
    assert card.provenance["requires"] == "hardware: TMA, loop: tiles"
    assert card.provenance["provides"] == "loop: staged"


def test_the_caller_says_what_the_source_has_not() -> None:
    data = changed(evidence=[], precondition=["the row fits"])
    card = from_nine_fields(data, name="my-card", category=Category.PACK, classes=[PreconditionClass.STORAGE])
    assert (card.name, card.category) == ("my-card", Category.PACK)
    assert card.preconditions[0].kind is PreconditionClass.STORAGE


EVIDENCE = "evidence[].action_category"
TWO = [{"action_category": "mma"}, {"action_category": "wgmma"}]
LOG = "verification_log[0]"


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"author": "x"}, "the card", "unknown field `author`"),
        ({"intent": 3}, "intent", "Expected `str`"),
        ({"carrier": "  "}, "carrier", "Expected `str` matching"),
        ({"precondition": "Layout: x"}, "precondition", "Expected `array`, got `str`"),
        ({"precondition": ["the row fits"]}, "precondition[0]", "give classes="),
        ({"precondition": ["Mood: good"]}, "precondition[0]", "give classes="),
        ({"precondition": [1]}, "precondition[0]", "Expected `str`, got `int`"),
        ({"evidence": []}, "evidence", "give category="),
        ({"evidence": [{"action_category": "polish"}]}, EVIDENCE, "unknown category 'polish'"),
        ({"evidence": ["x"]}, "evidence[0]", "Expected `object`, got `str`"),
        ({"evidence": TWO}, EVIDENCE, "one category is expected, got 2"),
        (
            {"evidence": [TWO[0] | {"rejected_evidence": [{}]}]},
            "evidence[0].rejected_evidence[0]",
            "Expected `str`",
        ),
        ({"scope": []}, "scope", "Expected `object`, got `array`"),
        ({"scope": {"regions": []}}, "scope", "unknown field `regions`"),
        ({"scope": {"platforms": ["ascend910b"]}}, "scope.platforms", "unknown platform"),
        ({"scope": {"languages": ["hip"]}}, "scope.languages", "unknown surface 'hip'"),
        ({"scope": {"prior_actions": ["polish"]}}, "scope.prior_actions", "unknown category"),
        ({"requires": [{"locus": "hardware", "name": "magic"}]}, "requires", "unknown capability 'magic'"),
        ({"requires": [{"locus": "loop"}]}, "requires[0]", "missing required field `name`"),
        ({"verification_log": [{"target": TARGET}]}, LOG, "missing required field `validation`"),
        (
            {"verification_log": [{"target": TARGET, "validation": {}, "judge": "x"}]},
            "verification_log[0]",
            "field `judge`",
        ),
        ({"verification_log": [{"target": TARGET | {"case": "*"}, "validation": {}}]}, f"{LOG}.target", "no place"),
    ],
    ids=str,
)
def test_what_cannot_be_mapped_is_named(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(UnmappedField) as caught:
        from_nine_fields(changed(**fields))
    assert caught.value.field == field
    assert says in str(caught.value)


def test_an_id_without_letters_leaves_the_category_as_name() -> None:
    assert from_nine_fields(changed(skill_id="?" * 20)).name == "tile-stage"


@pytest.mark.parametrize(("data", "says"), [(b"{", "not JSON"), (b"[]", "Expected `object`"), (b"\xff", "not JSON")])
def test_what_is_no_json_object_is_named(data: bytes, says: str) -> None:
    with pytest.raises(UnmappedField, match=says):
        from_nine_fields(data)


def test_as_many_classes_as_preconditions() -> None:
    with pytest.raises(UnmappedField, match="2 preconditions, but 1 classes"):
        from_nine_fields(json.dumps(NINE), classes=[PreconditionClass.LAYOUT])


def test_a_wildcard_stays_one_and_is_no_origin() -> None:
    card = from_nine_fields(changed(scope={"cases": ["*"], "languages": ["*"], "platforms": ["*", "sm90"]}))
    assert (card.scope.operators, card.scope.surfaces, card.scope.platforms) == (("*",), ("*",), ("*", "sm90"))
    assert card.origins == ()


def test_a_skill_with_four_fields_becomes_a_candidate() -> None:
    card = from_skill_markdown(MARKDOWN, category=Category.TILE_STAGE)
    assert (card.name, card.status, card.category) == ("topk-shared-row", CardStatus.CANDIDATE, Category.TILE_STAGE)
    assert card.anchor == "Stage the row in `select`."
    assert card.settings == {"example configuration": "Rows of 4096 keys, 512 threads."}
    assert [item.kind for item in card.preconditions] == list(PreconditionClass)
    assert card.preconditions[1].reason == "each thread copies its own part, so the parts must be known."
    assert card.preconditions[3].reason == NO_REASON
    assert card.scope.platforms == ("sm90",)
    assert card.origins == (Context(operator="topk", surface=Surface.CUDA, platform="sm90"),)


def test_the_carrier_of_a_skill_is_overview_and_snippet_verbatim() -> None:
    card = from_skill_markdown(MARKDOWN, category=Category.TILE_STAGE)
    snippet = MARKDOWN.partition("# Code Change Snippet\n\n")[2]
    assert card.carrier.kind is CarrierKind.SNIPPET
    assert card.carrier.text == f"Stage the row in\n`select`.\n\nKeep the barrier.\n\n{snippet}"
    assert card.scope.capabilities == ("shared_memory",)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("skill_id: topk.shared-row\n", "", "missing required field `skill_id`"),
        ("intent:", "version: 2\nintent:", "unknown field `version`"),
        ("- 'Layout: rows", "- 'Rows", r"preconditions\[1\]: its class"),
        ("# Overview\n", "# Summary\n", "# Overview: the section is not there"),
        ("# Code Change Snippet\n", "# Code\n", "# Code Change Snippet: the section is not there"),
        ("# Scope\n", "# History\n", "# History: a section that the format has not"),
        ("## Example configuration\n", "## Benchmarks\n", "# Benchmarks: a section that the format has not"),
        ("\n# Overview\n", "\nHello.\n\n# Overview\n", "belongs to no section"),
        ("nvidia-sm90a-cuda13", "nvidia-sm75-cuda12", "scope.platforms: unknown platform"),
        ("  platforms:", "  prior_actions:", "scope: Object contains unknown field `prior_actions`"),
        ("topk.shared-row", "x" * 65, "give name="),
    ],
)
def test_a_skill_that_cannot_be_mapped_is_named(old: str, new: str, says: str) -> None:
    assert old in MARKDOWN
    with pytest.raises(UnmappedField, match=says):
        from_skill_markdown(MARKDOWN.replace(old, new, 1), category=Category.TILE_STAGE)


def test_a_skill_without_front_matter_is_named() -> None:
    with pytest.raises(FrontMatterError, match="no front matter"):
        from_skill_markdown("# Overview\n", category=Category.TILE_STAGE)


@pytest.mark.parametrize(
    "load",
    [lambda: from_nine_fields(json.dumps(NINE)), lambda: from_skill_markdown(MARKDOWN, category=Category.TILE_STAGE)],
    ids=["nine", "four"],
)
def test_an_imported_card_is_stored_and_has_no_errors_but_gaps(load: Callable[[], Any], tmp_path: Path) -> None:
    card = load()
    assert read_card(write_card(tmp_path, card)) == card
    errors = {finding.rule.value for finding in lint_card(card, {}) if not finding.warning}
    assert errors <= {"precondition.class_missing"}
