"""Where the largest numbers of a row lie in the checks of Top-K that no prompt names."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.operators import make_case, operator_of
from pytest_klineage.operators.topk import (
    BLOCKS,
    LANES,
    MANY_INFINITIES,
    ODD_LANES,
    OUTLIER,
    gathered,
    places,
    stripes,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 90), st.integers(0, 99))
@settings(deadline=None, max_examples=80)
def test_every_row_has_room_in_one_lane_or_block(rows: int, k: int, columns: int, seed: int) -> None:
    columns = max(columns, k)
    case = make_case("topk", (rows, columns, k), "fp32", "torch")
    for name in {BLOCKS, LANES, ODD_LANES} & set(operator_of(case).further_names(case)):
        for row in places(name, rows, columns, k, generator(seed)):
            where = row.nonzero().flatten()
            steps = set(where.diff().tolist())
            assert len(where) >= k
            if name == LANES:
                continue
            assert len(steps) <= 1
            if name == BLOCKS:
                assert steps <= {1}
                assert len(where) == k
            elif steps:
                step = steps.pop()
                assert 2 <= step <= columns // k
                assert step & (step - 1)


@given(st.integers(1, 12), st.integers(2, 90), st.integers(0, 99))
@settings(deadline=None, max_examples=80)
def test_stripes_leave_room_and_come_more_than_once(k: int, times: int, seed: int) -> None:
    columns = k * times
    found = stripes(columns, k, generator(seed)).tolist()
    assert [stride for stride, width in found if width == 1] == sorted({s for s, _ in found}, reverse=True)
    for stride, width in found:
        assert 2 <= stride <= times
        assert width * stride < columns or width == 1
        assert stride & (stride - 1) == width & (width - 1) == 0


def test_all_widths_of_the_largest_stride_occur() -> None:
    assert sorted(stripes(256, 32, generator(1)).tolist()[:5]) == [[8, 1], [8, 2], [8, 4], [8, 8], [8, 16]]
    steps = [row.nonzero().flatten().diff() for row in places(LANES, 18, 256, 32, generator(2))]
    # The first of the largest steps ends the first group.
    assert {int(row.argmax()) + 1 for row in steps} == {1, 2, 4, 8, 16, 32, 64}


def test_checks_are_left_out_where_there_is_no_such_place() -> None:
    names = [operator_of(case).further_names(case) for case in (
        make_case("topk", (2, columns, 8), "fp32", "torch") for columns in (8, 15, 16, 24)
    )]  # fmt: skip
    others = (OUTLIER, MANY_INFINITIES)
    assert names == [(), (BLOCKS, *others), (BLOCKS, LANES, *others), (BLOCKS, LANES, ODD_LANES, *others)]


def test_no_prompt_names_them() -> None:
    case = make_case("topk", (2, 64, 8), "fp32", "torch")
    assert not {BLOCKS, LANES, ODD_LANES, OUTLIER, MANY_INFINITIES} & set(operator_of(case).input_distributions)


@given(st.integers(0, 99), st.sampled_from([BLOCKS, LANES, ODD_LANES]))
@settings(deadline=None, max_examples=40)
def test_a_row_keeps_its_numbers_and_has_the_largest_there(seed: int, name: str) -> None:
    x = torch.randn(3, 60, generator=generator(seed))
    inside = places(name, 3, 60, 7, generator(seed))
    found = gathered(x, 7, inside, generator(seed))
    assert torch.equal(found.sort(1).values, x.sort(1).values)
    assert bool(inside.gather(1, found.topk(7, dim=1).indices).all())


def test_a_right_selection_passes_in_every_type() -> None:
    for dtype in ("fp32", "fp16", "bf16"):
        case = make_case("topk", (4, 256, 32), dtype, "torch")
        chosen = operator_of(case)
        for name in chosen.further_names(case):
            found = chosen.further_problem(case, name, generator(3), {})
            assert not isinstance(found, str)
            inputs, expected = found
            assert expected.accepts(chosen.baseline_output(case, inputs))


@given(
    st.integers(1, 40), st.integers(1, 12), st.integers(2, 60), st.integers(0, 99), st.sampled_from(["fp32", "fp16"])
)
@settings(deadline=None, max_examples=40)
def test_odd_numbers_are_in_some_rows(rows: int, k: int, columns: int, seed: int, dtype: str) -> None:
    columns = max(columns, k + 1)
    case = make_case("topk", (rows, columns, k), dtype, "torch")
    for name in (OUTLIER, MANY_INFINITIES):
        found = operator_of(case).further_problem(case, name, generator(seed), {})
        assert not isinstance(found, str)
        counts = (found[0]["x"].abs() > 1e4).sum(1)
        odd = counts[counts > 0]
        assert 1 <= len(odd) <= max(1, rows // 16)
        assert bool((odd == 1).all() if name == OUTLIER else (odd > k // 2).all())
