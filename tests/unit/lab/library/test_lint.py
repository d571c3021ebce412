"""Lint: a good card has no findings, and every rule is broken by something."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.lab.library.cards import write_card
from pytest_klineage.lab.library.lineages import find_lineages, save_lineage
from pytest_klineage.lab.library.lint import (
    WARNINGS,
    LintFinding,
    LintRule,
    known_lineages,
    lint_card,
    lint_folder,
    with_effect_of_step,
)
from pytest_klineage.lab.library.rendering import description
from pytest_klineage.records import (
    CardScope,
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Code,
    Effect,
    Evidence,
    Interval,
    KernelSource,
    Lineage,
    Risk,
    SkillCard,
    TrialOutcome,
)

MakeCard = Callable[..., SkillCard]
MakeLineage = Callable[[], tuple[Lineage, tuple[KernelSource, ...]]]
DOCS = Path(__file__).parents[4] / "docs" / "reference" / "card-format.md"
ELSEWHERE = {
    LintRule.UNREADABLE,
    LintRule.FOLDER,
    LintRule.SKILL_MISSING,
    LintRule.SKILL_DIFFERS,
    LintRule.ORIGIN_UNKNOWN,
    LintRule.HELD_OUT,
    LintRule.EFFECT_REFUSED,
    LintRule.EFFECT_OUTDATED,
    LintRule.OUTCOME,
    LintRule.TOKENS,
    LintRule.REPEATS,
}
"""Rules that have a test of their own instead of a row in CASES."""


@pytest.fixture(scope="module")
def lineages(make_lineage: MakeLineage) -> dict[str, Lineage]:
    sealed = make_lineage()[0].sealed()
    return {sealed.name: sealed}


def rules(findings: list[LintFinding]) -> set[LintRule]:
    return {finding.rule for finding in findings}


def test_a_good_card_has_no_findings(tmp_path: Path, make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    assert lint_card(make_card(), lineages) == []
    assert lint_folder(write_card(tmp_path, make_card()), lineages) == []


def test_lineages_are_known_by_name(tmp_path: Path, make_lineage: MakeLineage, lineages: dict[str, Lineage]) -> None:
    save_lineage(tmp_path / "gemm" / "cpu-cpp" / "lineage", *make_lineage())
    assert known_lineages(find_lineages(tmp_path)) == lineages


SPAN = Effect(summary="s", speedup=Interval(1.1, 1.0, 1.2), span=("1" * 64,))
WGMMA = Carrier(kind=CarrierKind.SNIPPET, language="cuda", text='asm("wgmma.fence");')

CASES: list[tuple[dict[str, Any], LintRule]] = [
    ({"name": "Not A Name"}, LintRule.NAME),
    ({"intent": " \n"}, LintRule.EMPTY),
    ({"anchor": ""}, LintRule.EMPTY),
    ({"carrier": Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="")}, LintRule.EMPTY),
    ({"risks": (Risk(text=""),)}, LintRule.EMPTY),
    ({"intent": "x" * 401}, LintRule.LENGTH),
    ({"anchor": "x" * 1000}, LintRule.LENGTH),
    ({"anchor": "x" + " y" * 600}, LintRule.LENGTH),
    ({"anchor": "xx" + " y" * 600}, LintRule.LENGTH),
    ({"preconditions": ()}, LintRule.CLASS_MISSING),
    ({"evidence": ()}, LintRule.EVIDENCE_MISSING),
    ({"evidence": (Evidence("topk/cpu-cpp", "1" * 64),)}, LintRule.EVIDENCE_UNKNOWN),
    ({"evidence": (Evidence("gemm/cpu-cpp", "1" * 64),)}, LintRule.EVIDENCE_UNKNOWN),
    ({"origins": ()}, LintRule.ORIGIN_MISSING),
    ({"effect": Effect(summary="s")}, LintRule.EFFECT_UNMEASURED),
    ({"effect": SPAN}, LintRule.EFFECT_SPAN),
    ({"effect": Effect(summary="s", speedup=Interval(1.1, 1.0, 1.2))}, LintRule.EFFECT_SPAN),
    ({"risks": ()}, LintRule.RISK_MISSING),
    ({"risks": (Risk(text="r", evidence="1" * 64),)}, LintRule.RISK_EVIDENCE),
    ({"scope": CardScope(platforms=("sm75",), capabilities=("simd",))}, LintRule.SCOPE_NAME),
    ({"scope": CardScope(surfaces=("fortran",), capabilities=("simd",))}, LintRule.SCOPE_NAME),
    ({"scope": CardScope(capabilities=("simd", "magic"))}, LintRule.SCOPE_NAME),
    ({"scope": CardScope()}, LintRule.CAPABILITY),
    ({"carrier": WGMMA, "scope": CardScope(capabilities=("simd",))}, LintRule.CAPABILITY),
    ({"scope": CardScope(platforms=("sm90",), capabilities=("simd",))}, LintRule.SCOPE_PLATFORM),
    ({"log": ()}, LintRule.ADMITTED),
    ({"status": CardStatus.CANDIDATE}, LintRule.CANDIDATE),
]


@pytest.mark.parametrize(
    ("fields", "rule"), CASES, ids=lambda value: value.value if isinstance(value, LintRule) else next(iter(value))
)
def test_a_broken_rule_is_found(
    make_card: MakeCard, lineages: dict[str, Lineage], fields: dict[str, Any], rule: LintRule
) -> None:
    findings = lint_card(make_card(**fields), lineages)
    assert rules(findings) == {rule}
    assert all(finding.warning == (rule in WARNINGS) for finding in findings)


def test_a_description_that_just_fits_is_not_cut(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    rest = 1024 - len(description(make_card(anchor="x")))
    card = make_card(anchor="x" * (1 + rest))
    assert len(description(card)) == 1024
    assert lint_card(card, lineages) == []


def test_a_hopper_card_that_claims_sm120_is_found(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    scope = CardScope(platforms=("sm90a", "sm120", "*"), capabilities=("wgmma",))
    found = lint_card(make_card(category=Category.WGMMA, scope=scope), lineages)
    assert [(item.rule, item.message) for item in found] == [
        (LintRule.SCOPE_PLATFORM, "scope.platforms names sm120, which is not granted wgmma")
    ]


def test_an_effect_of_a_disturbed_timing_is_found(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    (name, lineage), *_ = lineages.items()
    steps = tuple(msgspec.structs.replace(step, effect=None) for step in lineage.transitions)
    refused = {**lineages, name: msgspec.structs.replace(lineage, transitions=steps)}
    assert rules(lint_card(make_card(), refused)) == {LintRule.EFFECT_REFUSED}


def test_an_effect_that_was_measured_again_is_found(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    (name, lineage), *_ = lineages.items()
    again = Interval(9.0, 8.5, 9.5)
    steps = tuple(msgspec.structs.replace(step, effect=again) for step in lineage.transitions)
    retimed = {**lineages, name: msgspec.structs.replace(lineage, transitions=steps)}
    found = lint_card(make_card(), retimed)
    assert [(item.rule, item.warning) for item in found] == [(LintRule.EFFECT_OUTDATED, True)]
    updated = with_effect_of_step(make_card(), retimed)
    assert updated.effect.speedup == again
    assert lint_card(updated, retimed) == []


def test_missing_evidence_of_a_candidate_is_a_warning(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    card = make_card(status=CardStatus.CANDIDATE, log=(), evidence=(), origins=())
    findings = lint_card(card, lineages)
    assert rules(findings) == {LintRule.EVIDENCE_MISSING, LintRule.ORIGIN_MISSING}
    assert all(finding.warning for finding in findings)


def test_each_missing_class_is_named(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    card = make_card()
    findings = lint_card(make_card(preconditions=card.preconditions[1:]), lineages)
    assert [finding.message.split(";")[0] for finding in findings] == ["nothing is said about data_type"]


def test_origins_must_be_where_the_evidence_is_from(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    elsewhere = msgspec.structs.replace(make_card().origins[0], shape={"M": 1})
    assert rules(lint_card(make_card(origins=(elsewhere,)), lineages)) == {LintRule.ORIGIN_UNKNOWN}


def test_a_trial_at_home_is_not_held_out(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    card = make_card()
    at_home = msgspec.structs.replace(card.log[1], context=card.origins[0])
    found = rules(lint_card(make_card(log=(*card.log, at_home)), lineages))
    assert found == {LintRule.HELD_OUT}


def test_a_success_that_the_gate_refused_is_found(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    card = make_card()
    odd = msgspec.structs.replace(card.log[1], outcome=TrialOutcome.SUCCESS, code=Code.MISMATCH)
    assert rules(lint_card(make_card(log=(*card.log, odd)), lineages)) == {LintRule.OUTCOME}


def test_a_span_is_a_run_of_neighbours(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    digests = [step.digest for step in lineages["gemm/cpu-cpp"].transitions]
    whole = Effect(summary="s", speedup=Interval(2.0, 1.9, 2.1), span=tuple(digests))
    assert lint_card(make_card(effect=whole), lineages) == []
    backward = msgspec.structs.replace(whole, span=tuple(digests[::-1]))
    assert rules(lint_card(make_card(effect=backward), lineages)) == {LintRule.EFFECT_SPAN}


def test_the_two_forms_must_agree(tmp_path: Path, make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    folder = write_card(tmp_path, make_card())
    skill = folder / "SKILL.md"
    text = skill.read_text()
    skill.write_text(text.replace("Fewer instructions.", "Magic."))
    (finding,) = lint_folder(folder, lineages)
    line = text.split("\n").index("Fewer instructions.") + 1
    assert (finding.rule, finding.warning) == (LintRule.SKILL_DIFFERS, False)
    assert finding.message.endswith(f"from line {line} on")
    skill.write_text(text + "more")
    assert "from line" in lint_folder(folder, lineages)[0].message
    skill.unlink()
    assert rules(lint_folder(folder, lineages)) == {LintRule.SKILL_MISSING}


@pytest.mark.parametrize(("platform", "warning"), [("cpu", True), ("sm90", False)])
def test_a_long_card_is_found(make_card: MakeCard, lineages: dict[str, Lineage], platform: str, warning: bool) -> None:
    carrier = Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="x = y;\n" * 700)
    scope = CardScope(platforms=(platform,), capabilities=("simd",))
    found = [item for item in lint_card(make_card(carrier=carrier, scope=scope), lineages) if "token" in item.message]
    assert [(item.rule, item.warning) for item in found] == [(LintRule.TOKENS, warning)]


def test_trials_do_not_make_a_card_long(make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    card = make_card()
    assert lint_card(make_card(log=card.log * 100), lineages) == []


def test_a_card_that_repeats_another_is_found(
    tmp_path: Path, make_card: MakeCard, lineages: dict[str, Lineage]
) -> None:
    card = make_card()
    folder = write_card(tmp_path, card)
    words = Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="other code of quite another kind")
    prose = {"intent": "Quite something else.", "anchor": "Somewhere in an unread file."}
    same_code, same_prose = make_card(name="code", **prose), make_card(name="prose", carrier=words)
    for other in (same_code, same_prose):
        assert rules(lint_folder(folder, lineages, [card, other])) == {LintRule.REPEATS}
    retired = make_card(name="retired", status=CardStatus.RETIRED)
    neither = make_card(name="neither", carrier=words, **prose)
    elsewhere = make_card(name="elsewhere", category=Category.PACK)
    assert lint_folder(folder, lineages, [card, retired, neither, elsewhere]) == []


def test_a_folder_of_another_name_is_found(tmp_path: Path, make_card: MakeCard, lineages: dict[str, Lineage]) -> None:
    folder = write_card(tmp_path, make_card()).rename(tmp_path / "other")
    (finding,) = lint_folder(folder, lineages)
    assert (finding.card, finding.rule) == ("other", LintRule.FOLDER)


def test_a_card_that_cannot_be_read_is_a_finding(tmp_path: Path, lineages: dict[str, Lineage]) -> None:
    (tmp_path / "card.json").write_text("{}")
    assert rules(lint_folder(tmp_path, lineages)) == {LintRule.UNREADABLE}


def test_every_rule_has_a_test() -> None:
    assert {rule for _, rule in CASES} | ELSEWHERE == set(LintRule)


def test_every_rule_is_documented() -> None:
    assert "\n::: pytest_klineage.lab.library.lint.LintRule\n" in DOCS.read_text()
    described = re.findall(r'= "([\w.]+)"\n    """\w', inspect.getsource(LintRule))
    assert described == [rule.value for rule in LintRule]
