"""`pytest-klineage cards`: what it prints, how wide, and how it ends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.cli.cards import add_cards
from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.cards import read_card, write_card
from pytest_klineage.lab.library.lineages import save_lineage
from pytest_klineage.lab.library.rendering import prompt_text
from pytest_klineage.records import (
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Effect,
    Interval,
    KernelSource,
    Lineage,
    SkillCard,
    from_json,
)
from pytest_klineage.report.text import WIDTH

MakeCard = Callable[..., SkillCard]
Run = Callable[..., tuple[int, str]]


OTHER_WORDS = {
    "intent": "Quite something else.",
    "anchor": "Somewhere in an unread file.",
    "carrier": Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="other code of another kind"),
}


@pytest.fixture
def house(
    tmp_path: Path, make_card: MakeCard, make_lineage: Callable[[], tuple[Lineage, tuple[KernelSource, ...]]]
) -> Path:
    """Three cards and the lineage of one of them."""
    save_lineage(tmp_path / "experts" / "gemm" / "cpu-cpp" / "lineage", *make_lineage())
    write_card(tmp_path / "skills", make_card())
    write_card(tmp_path / "skills", make_card(name="z" * 64, status=CardStatus.RETIRED))
    write_card(tmp_path / "skills", make_card(name="draft", status=CardStatus.CANDIDATE, log=(), **OTHER_WORDS))
    return tmp_path


@pytest.fixture
def run(house: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command in the folder with skills/ and experts/."""
    monkeypatch.chdir(house)
    parser = argparse.ArgumentParser()
    add_cards(parser.add_subparsers(required=True))

    def call(*arguments: str) -> tuple[int, str]:
        parsed = parser.parse_args(["cards", *arguments])
        status = parsed.command(parsed)
        return status, capsys.readouterr().out

    return call


def test_the_list_has_one_line_for_every_card(run: Run) -> None:
    status, output = run("list")
    lines = output.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines[2:5]] == ["draft", "gemm-simd", "z" * 28 + ".."]
    assert lines[3].split() == ["gemm-simd", "admitted", "simd", "1.5x", "[1.4,", "1.6]", "gemm/cpu-cpp"]
    assert lines[-1] == "3 cards, 1 admitted"
    assert max(map(len, lines)) <= WIDTH


def test_the_list_may_be_of_one_status(run: Run) -> None:
    status, output = run("list", "--status", "retired")
    assert (status, output.splitlines()[-1]) == (0, "1 card, 0 admitted")
    assert "draft" not in output


def test_an_empty_library_is_no_error(run: Run, house: Path) -> None:
    (house / "none").mkdir()
    assert run("list", "--skills", "none") == (0, "0 cards, 0 admitted\n")
    assert run("lint", "--skills", "none") == (0, "0 cards: 0 errors, 0 warnings\n")


def test_a_folder_that_is_not_there_is_named(run: Run) -> None:
    with pytest.raises(UsageError, match="nowhere is not a folder; say where the cards are with --skills"):
        run("list", "--skills", "nowhere")


def test_a_card_is_shown_in_three_forms(run: Run, make_card: MakeCard) -> None:
    status, output = run("show", "gemm-simd")
    assert status == 0
    assert output.startswith("---\nname: gemm-simd\n")
    assert "## Verification log" in output
    assert run("show", "gemm-simd", "--prompt") == (0, prompt_text(make_card()))
    status, output = run("show", "gemm-simd", "--json")
    assert from_json(output, SkillCard) == make_card()


def test_prose_is_wrapped_and_code_is_not(run: Run, house: Path, make_card: MakeCard) -> None:
    code = "float x = " + " + ".join(f"a[{number}]" for number in range(40)) + ";"
    card = make_card(name="wide", effect=Effect(summary="many words " * 40))
    card = from_json(
        json.dumps(json.loads(run("show", "draft", "--json")[1]) | {
            "name": "wide", "carrier": {"kind": "snippet", "language": "cpp", "text": code},
            "effect": {"summary": card.effect.summary.strip()},
        }),
        SkillCard,
    )  # fmt: skip
    write_card(house / "skills", card)
    lines = run("show", "wide")[1].splitlines()
    assert [line for line in lines if len(line) > WIDTH] == [code]


def test_a_card_that_is_not_there_names_those_that_are(run: Run) -> None:
    for arguments in (("show", "gem-simd"), ("lint", "gem-simd"), ("diff", "draft", "gem-simd")):
        with pytest.raises(UnknownName, match="Did you mean 'gemm-simd'"):
            run(*arguments)


def test_lint_of_good_cards_is_quiet(run: Run) -> None:
    assert run("lint", "gemm-simd", "draft") == (0, "2 cards: 0 errors, 0 warnings\n")


def test_lint_fails_for_errors_and_for_warnings_when_they_count(run: Run, house: Path, make_card: MakeCard) -> None:
    write_card(house / "skills", make_card(name="risky", risks=(), category=Category.PACK))
    status, output = run("lint", "risky")
    assert (status, output.splitlines()[-1]) == (0, "1 card: 0 errors, 1 warning")
    assert output.startswith("risky: warning: risk.missing: no risk is known")
    assert run("lint", "risky", "--strict")[0] == 1
    (house / "skills" / "draft" / "SKILL.md").unlink()
    status, output = run("lint")
    assert status == 1
    assert "draft: error: skill.missing" in output
    assert output.splitlines()[-1] == "4 cards: 1 error, 1 warning"


def test_lint_looks_for_evidence_in_the_given_folder(run: Run, house: Path) -> None:
    (house / "experts").rename(house / "elsewhere")
    status, output = run("lint", "gemm-simd")
    assert status == 1
    assert "evidence.unknown: there is no lineage 'gemm/cpu-cpp'" in output
    assert run("lint", "gemm-simd", "--experts", "elsewhere")[0] == 0
    assert run("lint", "gemm-simd", "--experts", "experts", "--experts", "elsewhere")[0] == 0


def test_cards_get_the_speedups_of_steps_that_were_timed_again(run: Run, house: Path, make_card: MakeCard) -> None:
    good = make_card()
    old = msgspec.structs.replace(good, effect=msgspec.structs.replace(good.effect, speedup=Interval(7.0, 6.0, 8.0)))
    write_card(house / "skills", old)
    assert "gemm-simd: warning: effect.outdated" in run("lint", "gemm-simd")[1]
    status, output = run("lint", "gemm-simd", "--update-effects")
    assert (status, output.splitlines()[-1]) == (0, "1 card: 0 errors, 0 warnings")
    assert output.startswith("gemm-simd: 7x [6, 8], now 1.5x ")
    assert read_card(house / "skills" / "gemm-simd") == good


def test_findings_are_wrapped(run: Run, house: Path, make_card: MakeCard) -> None:
    write_card(house / "skills", make_card(name="x" * 60, evidence=()))
    assert max(map(len, run("lint", "x" * 60)[1].splitlines())) <= WIDTH


def test_a_card_is_the_same_as_itself_by_name_folder_and_file(run: Run) -> None:
    for name in ("draft", "skills/draft", "skills/draft/card.json"):
        assert run("diff", "draft", name) == (0, "")


def test_the_difference_of_two_cards_is_shown(run: Run) -> None:
    status, output = run("diff", "draft", "gemm-simd")
    assert status == 1
    assert output.startswith("--- draft\n+++ gemm-simd\n")
    assert '-  "name": "draft",' in output
    assert '+  "name": "gemm-simd",' in output
    assert max(map(len, output.splitlines())) <= WIDTH
