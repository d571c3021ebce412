"""The experts on their domains: sweeps.toml has the cases, this judges each against the vendor's library.

pytest suites/experts --platform sm90                             # all sweeps; -k topk for one
pytest suites/experts --platform sm90 --klineage-stage compile    # builds the experts, without a device
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage import KernelCase, KernelGate, KlineageSession, make_case, paper_case
from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.records import INSTRUCTIONS, Surface

HERE = Path(__file__).parent
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


SWEEPS = msgspec.convert(tomllib.loads((HERE / "sweeps.toml").read_text()), type=dict[str, Sweep])


def expert_of(operator: str, surface: Surface) -> Expert | None:
    """The folder of an operator's expert for sm90 in one language."""
    found = find_experts(HERE.parents[1] / "experts", "sm90")
    return next((one for one in found if one.operator == operator and one.surface is surface), None)


def cases_of(operator: str) -> list[KernelCase]:
    """The cases of a sweep, with what each must reach."""
    sweep = SWEEPS[operator]
    return [
        make_case(operator, **({"dtype": sweep.dtype} | case), reference=sweep.reference, at_least=sweep.least)
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
    expert = expert_of(case.operator, surface)
    assert expert is not None
    variant = expert.variants[EXPERT]
    platforms = expert.platforms_of(variant)
    if klineage_session.platform not in platforms:
        pytest.skip(f"{expert.directory.parent.name}: its expert is for {', '.join(platforms)} only")
    source = expert.source(EXPERT)
    if surface is Surface.CUDA:
        found = tuple(word for word in variant.techniques if word in INSTRUCTIONS)
        case = msgspec.structs.replace(case, requires=found, max_spills=MAX_SPILLS)
    kernel_gate(source, case=case, platforms=platforms)
