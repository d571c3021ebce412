"""Small cases of every operator, awkward on purpose, and the parameters over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.records import KernelCase

SHAPES: dict[str, tuple[tuple[int, ...], dict[str, bool | int | str]]] = {
    "gemm": ((48, 40, 384), {}),
    "conv2d": ((2, 24, 13, 11, 20, 3, 2, 1), {}),
    "fmha": ((2, 2, 160, 32), {}),
    "fmha-causal": ((1, 3, 96, 32), {"causal": True}),
    "fmha-group": ((2, 4, 96, 32), {"group": 2}),
    "fmha-window": ((1, 4, 96, 32), {"causal": True, "window": 16, "group": 4}),
    "topk": ((6, 200, 25), {}),
    "gdn": ((2, 6, 16, 16, 150), {}),
    "gdn-state": ((1, 4, 32, 32, 70), {"initial_state": True}),
}


def operator_of(key: str) -> str:
    return key.partition("-")[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in {"key", "rounded_key"} & set(metafunc.fixturenames):
        keys = [key for key in SHAPES if name == "key" or not OPERATORS[operator_of(key)].exact]
        if "input_distribution" in metafunc.fixturenames:
            pairs = [
                (key, input_distribution)
                for key in keys
                for input_distribution in OPERATORS[operator_of(key)].input_distributions
            ]
            metafunc.parametrize((name, "input_distribution"), pairs)
        else:
            metafunc.parametrize(name, keys)


@pytest.fixture(scope="session")
def small_case() -> Callable[..., KernelCase]:
    """Make the small case of a key in a data type."""

    def make(key: str, dtype: str = "fp32") -> KernelCase:
        shape, options = SHAPES[key]
        return make_case(operator_of(key), shape, dtype, "torch", **options)

    return make
