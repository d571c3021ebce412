"""The GDN case study's suite: its chains, its table, and that the table needs no device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from pytest_klineage.errors import BadRecord
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.records import Interval

LEAST_STAGES = {"gdn_cumsum": 4, "gdn_kkt_solve": 5, "gdn_fused_fwd": 7}
"""Kernels between naive and the end of the chain, the end included."""


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> ModuleType:
    """The suite's file as a module, under a name of its own."""
    path = request.config.rootpath / "suites" / "gdn_case_study" / "test_gdn_case_study.py"
    spec = importlib.util.spec_from_file_location("gdn_case_study", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gdn_case_study"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("operator", LEAST_STAGES)
def test_a_chain_leads_from_naive_to_the_expert(operator: str, suite: ModuleType, pytestconfig: pytest.Config) -> None:
    (expert,) = [item for item in find_experts(pytestconfig.rootpath / "experts", "sm90") if item.operator == operator]
    kernels = suite.chain(expert)
    assert [kernels[0].name, kernels[-2].name, kernels[-1].name] == ["naive", "expert", "expert"]
    assert [kernel.reference for kernel in kernels] == ["torch"] * (len(kernels) - 1) + ["fla"]
    assert len(kernels) - 2 >= LEAST_STAGES[operator]
    assert [kernel.place for kernel in kernels[:-1]] == list(range(len(kernels[0].lineage.sources)))
    assert len({kernel.id for kernel in kernels}) == len(kernels)
    assert len({kernel.source().digest for kernel in kernels}) == len(kernels) - 1
    assert all(step.preconditions for step in kernels[0].lineage.lineage.transitions)
    assert kernels[-1].case().max_spills == 0
    assert kernels[-1].case().at_least == 1.0
    assert kernels[0].case().at_least < 1e-3


def test_the_table_has_speedups_over_naive_and_predecessor(suite: ModuleType) -> None:
    def row(place: int, kernel: str, estimate: float, reference: str = "torch") -> object:
        speedup = Interval(estimate, 0.9 * estimate, 1.1 * estimate)
        return suite.Row(
            platform="sm90", operator="gdn_cumsum", place=place, kernel=kernel, adds=f"step {place}",
            reference=reference, candidate_ms=0.5 / estimate, speedup=speedup, device="GPU", digest="d",
        )  # fmt: skip

    rows = [row(0, "naive", 0.5), row(1, "01-a", 1.0), row(2, "expert", 4.0), row(2, "expert", 2.0, "fla")]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in suite.table_of(rows).splitlines()[2:]]
    assert [line[1] for line in lines] == ["naive", "01-a", "expert", "expert"]
    assert lines[0][3:] == ["1000", "", "", "0.5x torch"]
    assert lines[2][4:6] == ["8x [6.55, 9.78]", "4x [3.27, 4.89]"]
    assert lines[3][4:] == ["", "", "2x fla"]


def test_rows_are_kept_but_for_one_that_was_cut_short(suite: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "sm90.jsonl"
    assert suite.read_rows(path) == {}
    row = suite.Row(
        platform="sm90", operator="gdn_cumsum", place=0, kernel="naive", adds="naive", reference="torch",
        candidate_ms=0.5, speedup=Interval(1.0, 0.9, 1.1), device="GPU", digest="d",
    )  # fmt: skip
    path.write_bytes(msgspec.json.encode(row) + b'\n{"platform": "sm')
    assert suite.read_rows(path) == {row.key: row}
    path.write_text('{"some": "thing else"}\n')
    with pytest.raises(BadRecord, match=r"sm90\.jsonl"):
        suite.read_rows(path)
