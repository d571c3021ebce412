"""The model-written part: targets of a design in the form of suites/skill_effect, one for each row. Nothing is asked.

Contract, retrieval, prompts and chains are that suite's; its own targets and frozen prompts stay out. FlagGems is the
reference. Cards of gemm come from row 2's own problem under another name: `same_problem` says so.
"""

from __future__ import annotations

import hashlib
from functools import cache

import msgspec
from design import CARDS, LABELS, NONE, Design, Kin, Target, read_design
from rows import ATTENTION, GEMM, REDUCTION, ROWS, Row

from pytest_klineage.records import SkillCard

ROOTS = {
    "mm": "experts/gemm/sm90-cuda/stages/00-naive.cu",
    "grouped_mm": "suites/skill_effect/roots/grouped_mm.cu",
    "attention": "experts/fmha/sm90-cuda/stages/00-naive.cu",
    "causal_attention": "suites/skill_effect/roots/attention.cu",
}
"""Naive kernels that are elsewhere; others are in roots/."""
KIN = {GEMM: ("gemm", ("M", "N", "K")), ATTENTION: ("fmha", ("B", "H", "S", "D"))}
"""By family, the operator with lineages that retrieval looks for, and its axes."""
REPEATS = 1
DESCRIBED = "FlagGems 5.0's Triton kernel, tuned for these shapes"


def target_of(row: Row) -> Target:
    """A row as a target."""
    found = KIN.get(row.family)
    kin = None
    if found is not None:
        shape = row.case("sm90", "flaggems").shape
        kin = Kin(operator=found[0], shape=tuple(shape[axis] for axis in found[1]), dtype=row.dtype)
    return Target(
        operator=f"suites/flaggems/operators.py:{row.operator}", shape=row.shape, dtype=row.dtype,
        reference="flaggems", described=DESCRIBED, kin=kin,
        root=ROOTS.get(row.operator, f"suites/flaggems/roots/{row.operator}.cu"),
        requires=() if row.family == REDUCTION else ("wgmma",),
    )  # fmt: skip


def target_name(row: Row) -> str:
    """What trajectories and tables call a row."""
    return f"row_{row.number:02d}"


@cache
def written_design() -> Design:
    """The rows under the numbers of suites/skill_effect, without its targets, placebo and repeats."""
    return msgspec.structs.replace(
        read_design(), targets={target_name(row): target_of(row) for row in ROWS}, arms=(NONE, LABELS, CARDS),
        contrasts=((CARDS, NONE), (CARDS, LABELS)), repeats=REPEATS, frozen=None,
    )  # fmt: skip


@cache
def retrieved(row: Row) -> tuple[SkillCard, ...]:
    """The cards of a row, the nearest first: what the arms with cards show, and what steers the arm `card`."""
    return written_design().cards(target_name(row), CARDS)


def same_problem(row: Row) -> bool:
    """Whether a retrieved card was lifted from the row's problem: the same product under gemm's name."""
    kin = written_design().targets[target_name(row)].kin
    return row.operator == "mm" and any(
        kin is not None and (at.operator, tuple(at.shape.values())) == (kin.operator, kin.shape)
        for card in retrieved(row) for at in card.origins
    )  # fmt: skip


def digest_of(prompts: dict[str, dict[str, str]]) -> str:
    """SHA-256 of all first prompts: chains of changed prompts are in no comparison with others."""
    return hashlib.sha256(msgspec.json.encode(prompts, order="sorted")).hexdigest()
