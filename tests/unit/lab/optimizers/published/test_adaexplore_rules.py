"""Rules and edits: what a failure teaches, how rules merge and are stored, which edits apply."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import StoreError, UsageError
from pytest_klineage.lab.llm.faults import MalformedReply
from pytest_klineage.lab.optimizers.adaexplore import rules
from pytest_klineage.lab.optimizers.adaexplore.method import edited
from pytest_klineage.lab.optimizers.adaexplore.rules import MemoryRule, RuleComparison
from pytest_klineage.records import Code

OLD = (MemoryRule("You cannot a", 2.0), MemoryRule("You cannot b", 1.0))


class TestWhatTeaches:
    @pytest.mark.parametrize("code", [Code.COMPILE, Code.CRASH, Code.OUTPUT_SHAPE, Code.TIMEOUT_RUN, Code.OUTPUT_DTYPE])
    def test_failures_with_a_log_do(self, code: Code) -> None:
        assert rules.teaches(code)

    @pytest.mark.parametrize(
        "code", [Code.MISMATCH, Code.NON_FINITE, Code.ACCEPTED_FASTER, Code.SLOWER_THAN_REQUIRED, Code.SKIPPED_MEMORY]
    )
    def test_only_unsupported_constructs_make_rules(self, code: Code) -> None:
        assert not rules.teaches(code)

    @pytest.mark.parametrize(
        ("reply", "rule"),
        [
            ("You cannot use goto.", "You cannot use goto."),
            ("Let me think.\n\nYou cannot use\tgoto.\n", "You cannot use goto."),
            ("No guidance", None),
            ("I say: NO GUIDANCE here\nYou cannot x", None),
            ("  \n", None),
            ("You cannot a||b", "You cannot a b"),
            ("||", None),
        ],
    )
    def test_the_last_line_is_the_rule(self, reply: str, rule: str | None) -> None:
        assert rules.extracted_rule(reply) == rule

    def test_a_rule_is_bounded(self) -> None:
        assert len(rules.extracted_rule("x" * 5000) or "") == rules.RULE_CHARACTERS


class TestMerging:
    @pytest.mark.parametrize(
        ("reply", "comparison"),
        [
            ('{"is_duplicate": true, "matched_index": 2, "confidence": 0.9}', RuleComparison(True, 2, 0.9)),
            ('Sure: ```json\n{"is_duplicate": false, "matched_index": null}\n```', RuleComparison(False, None, 0.0)),
            ("true, a duplicate of item 2", RuleComparison(True, 2, 0.7)),
            ("it is new", RuleComparison()),
            ("{not json}", RuleComparison()),
            ('{"is_duplicate": true, "matched_index": "x"}', RuleComparison()),
            ('{"is_duplicate": true, "matched_index": [1], "confidence": 1}', RuleComparison()),
            ('{"is_duplicate": true, "matched_index": 1e999, "confidence": 1}', RuleComparison()),
        ],
    )
    def test_a_judgement_is_read_leniently(self, reply: str, comparison: RuleComparison) -> None:
        assert rules.read_comparison(reply) == comparison

    def test_a_duplicate_counts_the_old_rule_once_more(self) -> None:
        assert rules.merged(OLD, "new words", RuleComparison(True, 2, 0.9)) == (OLD[0], MemoryRule("You cannot b", 2.0))

    @pytest.mark.parametrize(
        "comparison",
        [
            RuleComparison(False, 1, 1.0),
            RuleComparison(True, 1, 0.5),
            RuleComparison(True, None, 1.0),
            RuleComparison(True, 3, 1.0),
            RuleComparison(True, 0, 1.0),
        ],
    )
    def test_anything_else_appends(self, comparison: RuleComparison) -> None:
        assert rules.merged(OLD, "You cannot c", comparison) == (*OLD, MemoryRule("You cannot c", 1.0))

    def test_rules_are_shown_from_a_threshold_on(self) -> None:
        assert rules.over_threshold(OLD, 2) == OLD[:1]
        assert rules.over_threshold(OLD, 1) == OLD


class TestFile:
    def test_what_is_saved_is_loaded(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "rules.txt"
        with pytest.raises(UsageError, match="no rule file"):
            rules.load(path)
        assert rules.load(path, may_be_new=True) == ()
        rules.save(path, OLD)
        assert path.read_text() == "You cannot a||2\nYou cannot b||1\n"
        assert rules.load(path) == OLD

    def test_rules_of_the_release_are_read(self) -> None:
        assert rules.parsed("You cannot x.||72.0\n\nYou cannot a||b||3\n") == (
            MemoryRule("You cannot x.", 72.0),
            MemoryRule("You cannot a||b", 3.0),
        )

    @pytest.mark.parametrize("line", ["no count", "x||", "||3", "x||many", "x||nan"])
    def test_a_line_that_is_no_rule_is_named(self, line: str) -> None:
        with pytest.raises(UsageError, match="line 2"):
            rules.parsed(f"a||1\n{line}\n")

    def test_a_file_that_cannot_be_used_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="cannot be read"):
            rules.load(tmp_path)
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot be written"):
            rules.save(tmp_path / "file" / "rules.txt", OLD)

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.text(min_size=1).map(rules.extracted_rule), st.integers(1, 10**5))))
    def test_every_rule_survives(self, found: list[tuple[str | None, int]]) -> None:
        made = tuple(MemoryRule(text, float(count)) for text, count in found if text is not None)
        assert rules.parsed(rules.written(made)) == made


def pair(old: str, new: str, number: int = 1) -> str:
    reasoning = f"<reasoning_{number}>because</reasoning_{number}>\n"
    return (
        f"{reasoning}<old_str_{number}>\n{old}\n</old_str_{number}>\n<new_str_{number}>\n{new}\n</new_str_{number}>\n"
    )


class TestEdits:
    def test_edits_apply_in_order_to_what_the_one_before_left(self) -> None:
        reply = pair("a = 1", "b = 1") + "words\n" + pair("b = 1", "c = 1", 2)
        assert edited("x\na = 1\ny\n", reply) == "x\nc = 1\ny\n"

    @pytest.mark.parametrize(
        ("text", "old"),
        [("if x:  \n\ty\t\n", "if x:\n\ty"), ("a\nb\n", "\n  \na\nb\n \n"), ("a  \nb\n", " \na\nb\n")],
    )
    def test_blanks_at_ends_are_forgiven(self, text: str, old: str) -> None:
        assert edited(text, pair(old, "new")).strip() == "new"

    def test_one_that_does_not_fit_is_skipped_beside_one_that_does(self) -> None:
        done = edited("a\nb\nb\n", pair("zzz", "y") + pair("b", "c", 2) + pair("a", "A", 3))
        assert done == "A\nb\nb\n"

    @pytest.mark.parametrize("reply", ["nothing", pair("zzz", "y"), pair("b", "c"), pair("a", "a"), pair(" ", "c"),
                                       "<old_str_1>a</old_str_1> and <new_str_1>c</new_str_1>",
                                       "<old_str_1>a</old_str_1><new_str_2>c</new_str_2>"])  # fmt: skip
    def test_where_none_applies_there_is_no_kernel(self, reply: str) -> None:
        with pytest.raises(MalformedReply):
            edited("a\nb\nb\n", reply)

    def test_text_is_literal(self) -> None:
        assert edited("f(a.*)[0]", pair("(a.*)[0]", r"\1\g<0>")) == r"f\1\g<0>"
