"""The reference pages on lineages and cards list what the records have, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pytest_klineage import records
from pytest_klineage.lab.library.retrieval import DEFAULT_K, Dimension
from pytest_klineage.lab.library.similarity import DTYPE_WEIGHT, OPERATOR_WEIGHT, SAME_FAMILY, SHAPE_WEIGHT
from pytest_klineage.records import Lineage, SkillCard, Termination

DOCS = Path(__file__).parents[4] / "docs"
LINEAGE, CARD = (DOCS / "reference" / f"{name}-format.md" for name in ("lineage", "card"))
ELSEWHERE = {"KernelCase", "Verdict", "Surface", "Interval", "Termination", "Code", "EditKind"}
"""Rendered or listed on other pages, or named by their fields' types."""


def rows(path: Path, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    section = path.read_text().partition(f"\n{heading}\n")[2]
    table = re.search(r"^\|[-| ]+\|\n((?:\|.*\n)+)", section, re.M)
    assert table is not None, heading
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.group(1).splitlines()]


@pytest.mark.parametrize(("path", "record"), [(LINEAGE, Lineage), (CARD, SkillCard)], ids=["lineage", "card"])
def test_every_record_within_is_rendered(path: Path, record: type[msgspec.Struct]) -> None:
    rendered = set(re.findall(r"^::: pytest_klineage\.records\.(\w+)$", LINEAGE.read_text() + CARD.read_text(), re.M))
    assert f"::: pytest_klineage.records.{record.__name__}\n" in path.read_text()
    assert own_types(record) <= rendered


def own_types(record: type[msgspec.Struct]) -> set[str]:
    """Names of a record, and of all records and enumerations within it, but for those described on other pages."""
    found = {record.__name__}
    for field in msgspec.structs.fields(record):
        for name in re.findall(r"(?:pytest_klineage\.records\.\w+\.|<enum ')(\w+)", str(field.type)):
            inner = getattr(records, name, None)
            if isinstance(inner, type) and inner.__name__ not in ELSEWHERE | found:
                found |= own_types(inner) if issubclass(inner, msgspec.Struct) else {inner.__name__}
    return found


def test_ends_of_a_walk_are_listed() -> None:
    rendered = f"\n::: pytest_klineage.records.{Termination.__name__}\n"
    assert rendered in (DOCS / "concepts" / "lineages.md").read_text().partition("\n## How it ends\n")[2]


def test_dimensions_and_weights_are_as_written() -> None:
    text = (DOCS / "concepts" / "skill-cards.md").read_text()
    table = rows(DOCS / "concepts" / "skill-cards.md", "## Retrieval")
    assert [row[0] for row in table] == [dimension.value for dimension in Dimension]
    assert re.findall(r"0\.\d", table[0][1]) == [str(OPERATOR_WEIGHT), str(DTYPE_WEIGHT), str(SHAPE_WEIGHT)]
    assert re.findall(r"0\.\d", table[1][1]) == re.findall(r"0\.\d", table[2][1]) == [str(SAME_FAMILY)]
    assert f"({DEFAULT_K} by default)" in text
