"""Which points retrieved cards propose for the arm `card`: a rule that reads their figures and sees no time.

Every figure of a card's settings that names an axis of the row's kernel is a vote. The points of the public grid that
are nearest to the votes come first, where distances are powers of two by axis; ties go to the figures of nearer cards.
An axis without a vote does not count. A row whose cards have no figure for its kernel has no points.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from arms import POINTS, CardPoints, Point, grid, idiom, kernel_of
from design import card_digest
from rows import ATTENTION, GEMM, REDUCTION, Row

from pytest_klineage.records import SkillCard

FAMILY_WORDS = {GEMM: ("gemm", "matrix product"), ATTENTION: ("attention", "fmha"), REDUCTION: ("selection",)}
"""A figure that names another family is not the row's."""
WARPGROUP, WARP = 128, 32
TILE = re.compile(r"(\d+) ?x ?(\d+)")
CONSUMERS = "consumer"
Votes = dict[str, list[int]]


def steered(row: Row, cards: Iterable[SkillCard]) -> CardPoints | None:
    """What the cards propose for a row; None where they say nothing on its kernel."""
    used, votes = [], {}
    for card in cards:
        if found := figures(card, row):
            used.append(card_digest(card))
            for axis, values in found.items():
                votes.setdefault(axis, []).extend(value for value in values if value not in votes.get(axis, ()))
    if not votes:
        return None
    others = [point for point in grid(row) if point != idiom()[kernel_of(row)]]
    nearest = sorted(others, key=lambda point: distance(point, votes))
    return CardPoints(row=row.number, cards=tuple(used), points=tuple(nearest[:POINTS]))


def distance(point: Point, votes: Votes) -> tuple[float, int]:
    """How far a point is from the votes, and how late the votes are that it is nearest to."""
    far, late = 0.0, 0
    for axis, values in votes.items():
        apart = [abs(math.log2(point[axis] / value)) for value in values]
        far += min(apart)
        late += apart.index(min(apart))
    return far, late


def figures(card: SkillCard, row: Row) -> Votes:
    """What a card's settings say of the axes of a row's kernel, in their order."""
    found: Votes = {}
    parts = list(parts_of(card, row))
    consumers = next((number(text) for name, text in parts if CONSUMERS in name), None)
    for name, text in parts:
        for axis, value in votes_of(name, text, consumers):
            found.setdefault(axis, []).append(value)
    if row.family == REDUCTION:
        threads = found.get("threads", [])
        return {"warps": [count // WARP for count in threads if count >= WARP]} if threads else {}
    if consumers is not None:
        found |= {"threads": [WARPGROUP * consumers]}
        found.setdefault("block_m", [WARPGROUP // 2 * consumers])
    return {axis: values for axis, values in found.items() if axis in idiom()[kernel_of(row)]}


def parts_of(card: SkillCard, row: Row) -> Iterator[tuple[str, str]]:
    """Names of settings with each part of their values, without what is another family's; of "a -> b" the b."""
    others = [word for family, words in FAMILY_WORDS.items() if family != row.family for word in words]
    for name, value in card.settings.items():
        for part in re.split(r",\s*(?![^()]*\))", value):
            if not any(word in f"{name} {part}".lower() for word in others):
                yield name.lower().replace(" ", "_"), part.rpartition("->")[2].strip()


def votes_of(name: str, text: str, consumers: int | None) -> Iterator[tuple[str, int]]:
    """Axes with their values in one part of a setting. Threads count where no consumers are named apart."""
    first = number(text)
    if first is None:
        return
    if consumers is None and (name == "threads" or re.search(r"\bthreads\b", text)):
        named = re.search(r"(\d+) threads", text)
        yield "threads", int(named[1]) if named else first
    if "stages" in name or re.search(r"\bstages\b", text):
        yield "stages", first
    if "warp" not in text and "mma" not in name and (tile := TILE.search(text)):
        yield "block_m", int(tile[1])
        yield "block_n", int(tile[2])
    if name == "tile_rows":
        yield "block_m", first
    if name in ("tile_cols", "block_columns") or re.search(r"\bkeys\b", text):
        keys = re.search(r"(\d+) keys", text)
        yield "block_n", int(keys[1]) if keys else first


def number(text: str) -> int | None:
    """The first whole number of a text above 0."""
    found = re.search(r"[1-9]\d*", text)
    return int(found[0]) if found else None


def as_toml(found: Iterable[CardPoints]) -> str:
    """The file that arms.py reads."""
    lines = ["# What retrieved cards propose, by a rule: pytest suites/flaggems/test_steering.py --publish\n"]
    for item in found:
        lines.append(f"\n[[rows]]\nrow = {item.row}\ncards = [{', '.join(map(quoted, item.cards))}]\npoints = [\n")
        lines += [f"    {{{', '.join(f'{axis} = {value}' for axis, value in one.items())}}},\n" for one in item.points]
        lines.append("]\n")
    return "".join(lines)


def quoted(name: str) -> str:
    """A name as TOML has it."""
    return f'"{name}"'
