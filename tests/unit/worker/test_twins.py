"""Problems that differ in one element, and the checks of further shapes: which there are, and when there are fewer."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_klineage.operators import make_case, operator_of
from pytest_klineage.operators.changes import BY_TURNS
from pytest_klineage.operators.open_inputs import exchanged
from pytest_klineage.records import KernelCase
from pytest_klineage.records.messages import OpenCase
from pytest_klineage.worker import problems as made
from pytest_klineage.worker.problems import (
    FURTHER_ELSEWHERE,
    LEAST_ELSEWHERE,
    MOST_TWINS,
    PERTURBED,
    ProblemSet,
    Remade,
    most_twins,
)
from pytest_klineage.worker.turns import Schedule


def opened(case: KernelCase, secret: str = "s") -> ProblemSet:
    return ProblemSet(OpenCase(case=case, secret=secret, seeds=1, flush_bytes=0, threads=1))


DEFINITIONS = Path(__file__).parents[2] / "exploits" / "open" / "definitions.py"
CASES = {
    "gemm": ((6, 5, 4), {"a", "b"}),
    "conv2d": ((1, 2, 5, 5, 3, 3, 1, 1), {"x", "w"}),
    "fmha": ((1, 2, 8, 4), {"q", "k", "v"}),
    "gdn": ((1, 2, 8, 4, 12), {"q", "k", "v", "beta"}),
    "topk": ((4, 32, 4), {"x"}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_input_that_an_operator_perturbs_has_a_twin(name: str) -> None:
    shape, inputs = CASES[name]
    problems = opened(make_case(name, shape, "fp32", "torch"))
    first = problems.timed[0].inputs
    changed = [{name for name in first if (twin.inputs[name] != first[name]).any()} for twin in problems.twins]
    assert sorted(map(sorted, changed)) == sorted([name] for name in inputs)
    assert problems.checks[1 : 1 + len(changed)] == problems.twins


def test_every_input_of_a_users_operator_has_a_twin() -> None:
    problems = opened(make_case(f"{DEFINITIONS}:rms_norm", (6, 12), "fp32", "torch"))
    first = problems.timed[0].inputs
    changed = {name for twin in problems.twins for name in first if (twin.inputs[name] != first[name]).any()}
    assert changed == {"x", "w"}


def test_where_rows_are_compared_elements_change_places() -> None:
    problems = opened(make_case(f"{DEFINITIONS}:alike", (24, 16), "fp32", "torch"))
    first = problems.timed[0].inputs
    moved = next(twin.inputs["x"] for twin in problems.twins if (twin.inputs["x"] != first["x"]).any())
    assert (moved.sort(-1).values == first["x"].sort(-1).values).all()
    other = next(twin.inputs["y"] for twin in problems.twins if (twin.inputs["y"] != first["y"]).any())
    assert (other != first["y"]).sum() == 1


def test_sorted_rows_stay_sorted() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0], [4.0, 4.0, 4.0]])
    for seed in range(20):
        found = exchanged(rows, 64, torch.Generator().manual_seed(seed))
        assert found[::2].equal(rows[::2])
        assert int((found[1] != rows[1]).sum()) == 2
        assert found[1].sort().values.equal(rows[0])


def test_undeclared_checks_are_made_at_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "ELSEWHERE_S", math.inf)
    case = make_case(f"{DEFINITIONS}:layer_norm", (9, 12), "fp32", "torch", also_shapes=[(5, 7), (4, 16)])
    problems = opened(case)
    found = elsewhere(problems)
    assert len(found) == 2 * (2 + FURTHER_ELSEWHERE)
    assert found.count(BY_TURNS) == 2
    assert not any("=" in name for name in found)
    for place, one in enumerate(problems.checks):
        if one.input_distribution == PERTURBED:
            continue
        again = problems.redraw(place)
        assert (again.case, again.input_distribution) == (one.case, one.input_distribution)
        assert problems.layout_of(again) == problems.layout_of(problems.made(one))


def test_those_of_large_shapes_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "ELSEWHERE_S", math.inf)
    case = make_case(f"{DEFINITIONS}:softmax", (9, 12), "fp32", "torch", also_shapes=[(5, 7)])
    kept = opened(case)
    monkeypatch.setattr(made, "KEPT_ELEMENTS", 1)
    again = opened(case)
    assert kept.planned() == again.planned()
    assert isinstance(again.checks[-1], Remade)
    assert all(torch.equal(kept.check(i).inputs["x"], again.check(i).inputs["x"]) for i in range(len(kept.checks)))


def test_all_twins_come_among_timed_pairs() -> None:
    problems, schedule = opened(make_case("gemm", (6, 5, 4), "fp32", "torch")), Schedule()
    seen = {id(schedule.next(problems, fresh=True)[0].problem) for _ in range(400)}
    assert {id(twin) for twin in problems.twins} <= seen


@pytest.mark.parametrize(
    ("seconds", "size", "free", "expected"),
    [(0.9, 0, math.inf, MOST_TWINS), (1.1, 0, math.inf, 1), (0.1, 5, 100.0, 1), (0.1, 2, 100.0, MOST_TWINS)],
)
def test_there_is_one_where_problems_are_slow_or_large(seconds: float, size: int, free: float, expected: int) -> None:
    assert most_twins(seconds, size, free) == expected


def elsewhere(problems: ProblemSet) -> list[str]:
    return [check.input_distribution for check in problems.checks if check.case.shape != problems.case.shape]


CASE = make_case("fmha", (1, 2, 8, 4), "fp32", "torch", also_shapes=[(1, 1, 5, 4), (2, 1, 3, 4)])


def test_every_distribution_is_checked_at_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "ELSEWHERE_S", math.inf)
    assert sorted(elsewhere(opened(CASE))) == sorted([*operator_of(CASE).input_distributions] * 2)


def test_a_few_are_drawn_where_the_oracle_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "ELSEWHERE_S", 0.0)
    found = [elsewhere(opened(CASE, f"secret {i}")) for i in range(6)]
    assert {len(names) for names in found} == {2 * (1 + LEAST_ELSEWHERE)}
    assert all(names[0] == names[1 + LEAST_ELSEWHERE] == operator_of(CASE).input_distributions[0] for names in found)
    assert len(set(map(tuple, found))) > 1
    assert elsewhere(opened(CASE, "secret 3")) == found[3]


def test_a_faster_machine_checks_them_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    problems, seen = opened(CASE), []
    other = CASE.at_shape(CASE.also_shapes[0])
    for in_time in (-1, 1, 2):
        monkeypatch.setattr(made, "time", SimpleNamespace(monotonic=itertools.count(1).__next__))
        monkeypatch.setattr(problems, "checks", [])
        problems.add_shape(other, float(in_time))
        seen.append(elsewhere(problems))
    assert [len(names) for names in seen] == [1 + LEAST_ELSEWHERE + more for more in range(3)]
    assert seen[0] == seen[1][:-1] == seen[2][:-2]


def test_one_budget_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    monkeypatch.setattr(ProblemSet, "add_shape", lambda _self, _other, until: ends.append(until))
    opened(CASE)
    assert ends[1] - ends[0] == pytest.approx(made.ELSEWHERE_S / 2)
    assert ends[1] < time.monotonic() + made.ELSEWHERE_S


def kept(problems: ProblemSet) -> list[bool]:
    """Of the checks at further shapes, which keep their tensors."""
    return [isinstance(one, made.Problem) for one in problems.checks if one.case.shape != problems.case.shape]


def test_no_more_are_kept_than_a_sum_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    each = 4 * 5 * 4
    monkeypatch.setattr(made, "KEPT_IN_ALL", 3 * each)
    assert kept(opened(CASE))[:5] == [True, True, True, False, False]


def test_nor_on_a_gpu_than_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = opened(CASE)
    monkeypatch.setattr(problems, "checks", [])
    monkeypatch.setattr(problems, "most_allocated", 100.0)
    for allocated in (100, 101):
        monkeypatch.setattr(made, "allocated_bytes", lambda _device, found=allocated: found)
        problems.add_shape(CASE.at_shape(CASE.also_shapes[0]), 0.0)
    assert kept(problems) == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("name", "shape"), [("gdn_fused_fwd", (1, 2, 16, 4, 12)), ("gdn_kkt_solve", (1, 2, 16, 4, 12))]
)
def test_an_operator_that_perturbs_one_input_is_asked_little(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    case = make_case(name, shape, "fp32", "torch")
    chosen, asked = operator_of(case), []
    perturb = chosen.perturb

    def counted(*given: Any) -> Any:
        asked.append(1)
        return perturb(*given)

    problems = opened(case)
    monkeypatch.setattr(chosen, "perturb", counted)
    assert len(problems.make_twins(MOST_TWINS)) == 1
    assert len(asked) == 1 + made.IDLE_DRAWS


def test_large_ones_are_made_again_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "ELSEWHERE_S", math.inf)
    kept = opened(CASE)
    monkeypatch.setattr(made, "KEPT_ELEMENTS", 0)
    problems = opened(CASE)
    assert PERTURBED in [check.input_distribution for check in problems.checks]
    for index, check in enumerate(problems.checks):
        if isinstance(check, Remade):
            again, before = problems.check(index), kept.check(index)
            assert (again.case, again.input_distribution) == (before.case, before.input_distribution)
            assert all(bool((again.inputs[name] == before.inputs[name]).all()) for name in before.inputs)
    fmha, remade = operator_of(CASE), sum(isinstance(check, Remade) for check in problems.checks)
    assert remade == 2 * len(fmha.input_distributions) + len(fmha.further_names(CASE))
