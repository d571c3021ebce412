"""Cards on disk, and what trials change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import BadRecord, UnknownName, UsageError
from pytest_klineage.lab.library.cards import (
    card_folders,
    check_name,
    find_card,
    find_cards,
    origin_of,
    read_card,
    with_trials,
    write_card,
)
from pytest_klineage.lab.library.rendering import skill_markdown
from pytest_klineage.records import CardStatus, Code, KernelSource, Lineage, SkillCard, Trial, TrialOutcome

MakeCard = Callable[..., SkillCard]
MakeLineage = Callable[[], tuple[Lineage, tuple[KernelSource, ...]]]


def test_what_is_written_is_read(tmp_path: Path, make_card: MakeCard) -> None:
    card = make_card()
    folder = write_card(tmp_path, card)
    assert folder == tmp_path / "gemm-simd"
    assert read_card(folder) == card
    assert (folder / "SKILL.md").read_text() == skill_markdown(card)
    assert sorted(path.name for path in folder.iterdir()) == ["SKILL.md", "card.json"]


def test_the_same_card_is_the_same_bytes(tmp_path: Path, make_card: MakeCard) -> None:
    path = write_card(tmp_path, make_card()) / "card.json"
    before = path.read_bytes()
    write_card(tmp_path, read_card(path.parent))
    assert path.read_bytes() == before


def test_cards_are_found_by_name(tmp_path: Path, make_card: MakeCard) -> None:
    for name in ("b", "a-1", "c"):
        write_card(tmp_path, make_card(name=name))
    (tmp_path / "notes").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "SKILL.md").write_text("")
    assert [folder.name for folder in card_folders(tmp_path)] == ["a-1", "b", "c", "half"]
    assert find_card(tmp_path, "b").name == "b"
    with pytest.raises(UnknownName, match="Valid: a-1, b, c, half"):
        find_card(tmp_path, "d")
    with pytest.raises(UsageError, match=r"half/card\.json cannot be read"):
        find_cards(tmp_path)
    (tmp_path / "half" / "SKILL.md").unlink()
    assert [card.name for card in find_cards(tmp_path)] == ["a-1", "b", "c"]


def test_a_name_that_leads_elsewhere_is_unknown(tmp_path: Path, make_card: MakeCard) -> None:
    write_card(tmp_path, make_card(name="outside"))
    (tmp_path / "skills").mkdir()
    with pytest.raises(UnknownName, match="outside"):
        find_card(tmp_path / "skills", "../outside")


def test_a_transition_is_cited_with_its_place(make_lineage: MakeLineage, make_card: MakeCard) -> None:
    sealed = make_lineage()[0].sealed()
    evidence, context = origin_of(sealed, 1)
    card = make_card()
    assert (evidence, context) == (card.evidence[0], card.origins[0])
    assert origin_of(sealed, 0)[1].prior == ()


@pytest.mark.parametrize("name", ["", "-a", "a-", "a--b", "A", "a_b", "../a", "a/b", "a b", "x" * 65])
def test_an_invalid_name_is_refused(tmp_path: Path, make_card: MakeCard, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a card"):
        write_card(tmp_path, make_card(name=name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "gemm-simd", "7", "x" * 64])
def test_plain_names_are_accepted(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a valid SkillCard"),
        ('{"schema_version": 7}', "schema version 7"),
        ('{"schema_version": 1, "nmae": "x"}', "nmae|name"),
    ],
)
def test_a_damaged_card_is_named_with_its_file(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(BadRecord, match=rf"card\.json: .*({says})"):
        read_card(tmp_path)


def test_the_first_held_out_success_admits_a_card(make_card: MakeCard) -> None:
    card = make_card(status=CardStatus.CANDIDATE, log=())
    elsewhere = msgspec.structs.replace(card.origins[0], shape={"M": 1, "N": 1, "K": 1})
    failed = Trial(context=elsewhere, outcome=TrialOutcome.REJECTED, held_out=True, code=Code.MISMATCH)
    at_home = Trial(context=card.origins[0], outcome=TrialOutcome.SUCCESS, held_out=True)
    success = Trial(context=elsewhere, outcome=TrialOutcome.SUCCESS, held_out=False)
    tried = with_trials(card, [failed, at_home])
    assert tried.status is CardStatus.CANDIDATE
    assert [trial.held_out for trial in tried.log] == [True, False]
    admitted = with_trials(tried, [success])
    assert admitted.status is CardStatus.ADMITTED
    assert [trial.outcome for trial in admitted.log] == [TrialOutcome.REJECTED, *[TrialOutcome.SUCCESS] * 2]


def test_an_imported_success_admits_nothing(make_card: MakeCard) -> None:
    card = make_card(status=CardStatus.CANDIDATE, log=())
    elsewhere = msgspec.structs.replace(card.origins[0], operator="topk")
    trial = Trial(context=elsewhere, outcome=TrialOutcome.SUCCESS, held_out=True, imported=True)
    assert with_trials(card, [trial]).status is CardStatus.CANDIDATE


def test_a_retired_card_stays_retired(make_card: MakeCard) -> None:
    card = make_card(status=CardStatus.RETIRED)
    assert with_trials(card, card.log).status is CardStatus.RETIRED
