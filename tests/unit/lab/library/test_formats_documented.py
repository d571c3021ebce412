"""The reference pages on lineages and cards list what the records have, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.lab.library.normalise import PLATFORM_CAPABILITIES
from pytest_klineage.lab.library.retrieval import DEFAULT_K, Dimension
from pytest_klineage.lab.library.similarity import DTYPE_WEIGHT, KIN, OPERATOR_WEIGHT, SHAPE_WEIGHT
from pytest_klineage.records import (
    CardScope,
    CardStatus,
    CarrierKind,
    Category,
    Context,
    Edit,
    Effect,
    Lineage,
    LineageState,
    PreconditionClass,
    Rejection,
    Risk,
    SkillCard,
    Termination,
    Transition,
    Trial,
    TrialOutcome,
)

DOCS = Path(__file__).parents[4] / "docs"
LINEAGE, CARD = (DOCS / "reference" / f"{name}-format.md" for name in ("lineage", "card"))


def rows(path: Path, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    section = path.read_text().partition(f"\n{heading}\n")[2]
    table = re.search(r"^\|[-| ]+\|\n((?:\|.*\n)+)", section, re.M)
    assert table is not None, heading
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.group(1).splitlines()]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize(
    ("path", "heading", "record"),
    [
        (LINEAGE, "## Lineage", Lineage),
        (LINEAGE, "## State", LineageState),
        (LINEAGE, "## Transition", Transition),
        (LINEAGE, "## Rejection", Rejection),
        (LINEAGE, "## Edit", Edit),
        (CARD, "## SkillCard", SkillCard),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_field_has_its_row(path: Path, heading: str, record: type[msgspec.Struct]) -> None:
    assert sorted(name for row in rows(path, heading) for name in code(row[0])) == sorted(record.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("status", set(CardStatus)),
        ("preconditions", {"kind", "condition", "reason", *PreconditionClass}),
        ("carrier", {"kind", "language", "text", *CarrierKind}),
        ("effect", set(Effect.__struct_fields__)),
        ("risks", set(Risk.__struct_fields__)),
        ("scope", {"*", *CardScope.__struct_fields__}),
        ("origins", {"evidence", *Context.__struct_fields__}),
        ("log", set(Trial.__struct_fields__)),
    ],
)
def test_what_a_card_is_made_of_is_listed(field: str, names: set[str]) -> None:
    row = next(row for row in rows(CARD, "## SkillCard") if field in code(row[0]))
    assert set(code(row[1])) == {str(name) for name in names}


def test_categories_outcomes_and_ends_are_listed() -> None:
    assert sorted(name for row in rows(LINEAGE, "## Categories") for name in code(row[1])) == sorted(Category)
    ends = rows(DOCS / "concepts" / "lineages.md", "## How it ends")
    assert sorted(name for row in ends for name in code(row[0])) == sorted(Termination)
    sentence = re.search(r"A trial's `outcome` is (.*?)\.", CARD.read_text(), re.S)
    assert sentence is not None
    assert sorted(code(sentence.group(1))) == sorted(TrialOutcome)


@pytest.mark.parametrize("platform", PLATFORM_CAPABILITIES)
def test_what_platforms_are_granted_is_listed(platform: str) -> None:
    row = next(row for row in rows(CARD, "## Platforms and capabilities") if code(row[0]) == [platform])
    assert set(code(row[1].partition(";")[0])) == PLATFORM_CAPABILITIES[platform]


def test_dimensions_and_weights_are_as_written() -> None:
    text = (DOCS / "concepts" / "skill-cards.md").read_text()
    table = rows(DOCS / "concepts" / "skill-cards.md", "## Retrieval")
    assert [row[0] for row in table] == [dimension.value for dimension in Dimension]
    assert re.findall(r"0\.\d", table[0][1]) == [str(OPERATOR_WEIGHT), str(DTYPE_WEIGHT), str(SHAPE_WEIGHT)]
    assert re.findall(r"0\.\d", table[1][1]) == re.findall(r"0\.\d", table[2][1]) == [str(KIN)]
    assert f"({DEFAULT_K} by default)" in text
