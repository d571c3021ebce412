"""The experts on their domains: sweeps.toml has the cases, this judges each against the vendor's library.

pytest suites/experts --platform sm90                             # all sweeps; -k topk for one
pytest suites/experts --platform sm90 --klineage-stage compile    # builds the experts, without a device

On a GPU that is lent by the minute, in as many calls as it takes: with --klineage-executor batch:DIR the first call and
the last one, and pytest-klineage judge DIR --for 8m in between.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage import KernelCase, KernelGate, KlineageSession, make_case, paper_case
from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.plugin.markers import reference_name
from pytest_klineage.records import INSTRUCTIONS, Surface

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPERT = "expert"
MAX_SPILLS = 0
"""Bytes per thread that an expert may spill, on every path of its domain."""
TILELANG = "tilelang"
"""The sweep over languages instead of shapes: the paper's case of each operator, in TileLang."""
TILELANG_AT_LEAST = 0.95


class Sweep(msgspec.Struct, frozen=True):
    """One table of sweeps.toml."""

    reference: str
    dtype: str
    geomean: float
    """What the mean of the sweep's speedups is to reach."""
    least: float
    """What every case is to reach."""
    cases: tuple[dict[str, Any], ...]
    operator: str = ""
    """Where it is defined, as "file.py:name" from the root; empty for a built-in one, which has the sweep's name."""
    expert: str = ""
    """Whose folder of experts has the kernel; the sweep's own when empty."""
    variant: str = EXPERT


SWEEPS = msgspec.convert(tomllib.loads((HERE / "sweeps.toml").read_text()), type=dict[str, Sweep])


def expert_of(operator: str, surface: Surface) -> Expert | None:
    """The folder of an operator's expert for sm90 in one language."""
    found = find_experts(ROOT / "experts", "sm90")
    return next((one for one in found if one.operator == operator and one.surface is surface), None)


def cases_of(operator: str) -> list[KernelCase]:
    """The cases of a sweep, with what each must reach."""
    sweep = SWEEPS[operator]
    source = str(ROOT / sweep.operator) if sweep.operator else operator
    reference = reference_name(sweep.reference, (HERE, ROOT))
    return [
        make_case(source, **({"dtype": sweep.dtype} | case), reference=reference, at_least=sweep.least)
        for case in sweep.cases
    ]


def in_tilelang() -> list[KernelCase]:
    """The paper's cases of the operators that have an expert in TileLang."""
    return [
        msgspec.structs.replace(paper_case(name, "gpu", SWEEPS[name].reference), at_least=TILELANG_AT_LEAST)
        for name in SWEEPS
        if expert_of(name, Surface.TILELANG) is not None
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for every case; in the compile stage one for every expert, whose build serves all of its cases."""
    from pytest_klineage.plugin.session import SESSION_KEY

    only_build = metafunc.config.stash[SESSION_KEY].gate_settings.stage == "compile"
    judged = [(Surface.CUDA, case) for name in SWEEPS for case in cases_of(name)[: 1 if only_build else None]]
    judged += [(Surface.TILELANG, case) for case in in_tilelang()]
    names = [f"{TILELANG}-{case.id}" if surface is Surface.TILELANG else case.id for surface, case in judged]
    metafunc.parametrize(("surface", "case"), judged, ids=names)


def test_sweep(kernel_gate: KernelGate, surface: Surface, case: KernelCase, klineage_session: KlineageSession) -> None:
    """The expert is right, and as fast as its sweep asks for."""
    sweep = SWEEPS[case.operator]
    expert = expert_of(sweep.expert or case.operator, surface)
    assert expert is not None
    variant = expert.variants[sweep.variant]
    platforms = expert.platforms_of(variant)
    if klineage_session.platform not in platforms:
        pytest.skip(f"{expert.directory.parent.name}: its expert is for {', '.join(platforms)} only")
    source = expert.source(sweep.variant)
    if surface is Surface.CUDA:
        found = tuple(word for word in variant.techniques if word in INSTRUCTIONS)
        case = msgspec.structs.replace(case, requires=found, max_spills=MAX_SPILLS)
    kernel_gate(source, case=case, platforms=platforms)
