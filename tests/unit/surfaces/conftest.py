"""Arguments in memory of our own, as a worker has them, for kernels called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_klineage.records import Placement, Slot, TensorSpec
from pytest_klineage.surfaces.base import Memory

Arguments = Callable[..., tuple[Memory, Slot]]


@pytest.fixture
def arguments() -> Arguments:
    """Lay tensors out in a piece of memory, each at a multiple of 256 bytes."""

    def lay_out(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> tuple[Memory, Slot]:
        placed = [
            Placement(spec=spec, offset=256 * (index + 1), num_bytes=spec.num_elements * 4)
            for index, spec in enumerate((*inputs, *outputs))
        ]
        memory = Memory(bytearray(256 * (len(placed) + 2)))
        return memory, Slot(inputs=tuple(placed[: len(inputs)]), outputs=tuple(placed[len(inputs) :]))

    return lay_out
