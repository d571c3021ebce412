"""What a device's trace is reduced to. The loop itself needs a GPU: tests/gpu has that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.worker.device_calls import MAX_KERNELS, MAX_NAME, by_name, covered_ns

SPANS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100)).map(lambda s: (s[0], s[0] + s[1])), max_size=20)


def test_kernels_of_one_name_are_added_up_and_sorted() -> None:
    kernels = by_name({(0, 5, "a"), (10, 7, "a"), (20, 30, "b")})
    assert [(kernel.name, kernel.calls, kernel.total_ns) for kernel in kernels] == [("b", 1, 30), ("a", 2, 12)]


def test_what_is_kept_is_bounded() -> None:
    kernels = by_name({(n, 1, f"{n}" + "x" * 1000) for n in range(3 * MAX_KERNELS)})
    assert len(kernels) == MAX_KERNELS
    assert all(len(kernel.name) <= MAX_NAME for kernel in kernels)


def test_covered_time_counts_overlaps_once() -> None:
    assert covered_ns([]) == 0
    assert covered_ns([(0, 10), (5, 15), (20, 25), (21, 22)]) == 20


@given(SPANS)
def test_covered_time_is_the_number_of_moments_in_any_span(spans: list[tuple[int, int]]) -> None:
    assert covered_ns(spans) == len({moment for start, stop in spans for moment in range(start, stop)})
