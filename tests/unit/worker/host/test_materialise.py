"""What a Python kernel may return: plain dense tensors of the right kind, copied by our own hand; nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from pytest_klineage.records import Code, Placement, Slot, TensorSpec
from pytest_klineage.records.signature import dense, permuted
from pytest_klineage.surfaces.base import Memory, SurfaceFailure
from pytest_klineage.surfaces.python import tensor_view
from pytest_klineage.worker.host.materialise import extent_bytes, materialise

ONE = (dense("c", "fp32", 3, 4),)
TWO = (dense("values", "fp32", 3, 4), dense("indices", "int64", 3, 4))


class Disguised(torch.Tensor):
    """A tensor whose methods a candidate has written."""


def memory_for(*specs: TensorSpec) -> tuple[Memory, Slot]:
    placed = tuple(
        Placement(spec=spec, offset=256 * (index + 1), num_bytes=8 * spec.num_elements)
        for index, spec in enumerate(specs)
    )
    return Memory(bytearray(256 * (len(specs) + 2))), Slot(inputs=(), outputs=placed)


def refused(result: Any, *specs: TensorSpec) -> SurfaceFailure:
    with pytest.raises(SurfaceFailure) as caught:
        materialise(result, *memory_for(*specs))
    return caught.value


def right() -> torch.Tensor:
    return torch.arange(12.0).view(3, 4)


def with_attribute() -> torch.Tensor:
    tensor = right()
    tensor.copy_ = lambda *_: None  # type: ignore[method-assign]  # what a candidate would do
    return tensor


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t,), lambda t: [t], lambda t: {"anything": t}])
def test_a_right_output_is_copied_into_its_place(wrap: Any) -> None:
    memory, slot = memory_for(*ONE)
    (found,) = materialise(wrap(right()), memory, slot)
    assert torch.equal(tensor_view(memory, slot.outputs[0]), right())
    assert found.strides == (4, 1)
    assert found.num_bytes == 48


def test_several_outputs_are_copied_in_order() -> None:
    memory, slot = memory_for(*TWO)
    values, indices = right(), torch.arange(12).view(3, 4)
    assert len(materialise((values, indices), memory, slot)) == 2
    assert torch.equal(tensor_view(memory, slot.outputs[0]), values)
    assert torch.equal(tensor_view(memory, slot.outputs[1]), indices)


@pytest.mark.parametrize(
    "tensor", [right().t().contiguous().t(), torch.zeros(6, 8)[::2, ::2], right().requires_grad_(), torch.nan * right()]
)
def test_any_layout_of_the_right_values_is_copied(tensor: torch.Tensor) -> None:
    memory, slot = memory_for(*ONE)
    materialise(tensor, memory, slot)
    seen = tensor_view(memory, slot.outputs[0])
    assert torch.equal(seen.nan_to_num(1e30), tensor.detach().nan_to_num(1e30))


def test_a_place_with_other_strides_gets_the_same_values() -> None:
    memory, slot = memory_for(permuted("c", "fp32", (3, 4), (1, 0)))
    materialise(right(), memory, slot)
    assert torch.equal(tensor_view(memory, slot.outputs[0]), right())


@pytest.mark.parametrize(
    ("result", "code", "says"),
    [
        (right().as_subclass(Disguised), Code.FAKE_TENSOR, "Disguised, not a plain"),
        (torch.nn.Parameter(right()), Code.FAKE_TENSOR, "Parameter, not a plain"),
        (with_attribute(), Code.FAKE_TENSOR, "attributes of its own: ['copy_']"),
        (right().to("meta"), Code.FAKE_TENSOR, "not a dense tensor on cpu"),
        (right().to_sparse(), Code.FAKE_TENSOR, "not a dense tensor on cpu"),
        ("c", Code.FAKE_TENSOR, "is a str"),
        (None, Code.FAKE_TENSOR, "is a NoneType"),
        (1.0, Code.FAKE_TENSOR, "is a float"),
        (right().t(), Code.OUTPUT_SHAPE, "shape (4, 3), expected (3, 4)"),
        (right().flatten(), Code.OUTPUT_SHAPE, "shape (12,)"),
        (right()[:2], Code.OUTPUT_SHAPE, "shape (2, 4)"),
        (right()[None], Code.OUTPUT_SHAPE, "shape (1, 3, 4)"),
        (torch.tensor(1.0), Code.OUTPUT_SHAPE, "shape ()"),
        (right().double(), Code.OUTPUT_DTYPE, "torch.float64, expected torch.float32"),
        (right().to(torch.bfloat16), Code.OUTPUT_DTYPE, "torch.bfloat16"),
        (right().int(), Code.OUTPUT_DTYPE, "torch.int32"),
        (torch.zeros(1, 4).expand(3, 4), Code.OUTPUT_STRIDES, "stride 0"),
        (torch.zeros(()).expand(3, 4), Code.OUTPUT_STRIDES, "stride 0"),
        ((), Code.OUTPUT_COUNT, "0 outputs, the operator has 1"),
        ((right(), right()), Code.OUTPUT_COUNT, "2 outputs, the operator has 1"),
        ({}, Code.OUTPUT_COUNT, "0 outputs"),
    ],
)
def test_anything_else_is_refused_with_its_reason(result: Any, code: Code, says: str) -> None:
    failure = refused(result, *ONE)
    assert failure.code is code
    assert says in failure.message


def test_the_output_that_is_amiss_is_named() -> None:
    assert "output indices" in refused((right(), right()), *TWO).message


def test_a_refused_output_is_not_copied() -> None:
    memory, slot = memory_for(*ONE)
    with pytest.raises(SurfaceFailure):
        materialise(right().as_subclass(Disguised), memory, slot)
    assert not tensor_view(memory, slot.outputs[0]).any()


def test_the_reported_extent_covers_gaps() -> None:
    tensor = torch.zeros(6, 8)[::2, ::2]
    assert extent_bytes(tensor, tensor.stride()) == 4 * (2 * 16 + 3 * 2 + 1)
    assert extent_bytes(torch.zeros(0, 4), (4, 1)) == 0


REPLACED = """
import torch
from pytest_klineage.records import Placement, Slot
from pytest_klineage.records.signature import dense
from pytest_klineage.surfaces.base import Memory
from pytest_klineage.worker.host.materialise import materialise
placement = Placement(spec=dense("c", "fp32", 2), offset=64, num_bytes=8)
memory = Memory(bytearray(256))
torch.Tensor.copy_ = lambda self, other: self.fill_(7)
torch.Tensor.data_ptr = lambda self: 1
torch.Tensor.stride = lambda self, *axis: (0,)
torch.Tensor.shape = property(lambda self: (9, 9))
torch.Tensor.element_size = torch.Tensor.numel = lambda self: 99
(found,) = materialise(torch.tensor([1.0, 2.0]), memory, Slot(inputs=(), outputs=(placement,)))
print(list(memoryview(memory.buffer)[64:72].cast("f")), found.strides, found.num_bytes, found.address > 1)
"""


def test_methods_replaced_by_a_candidate_are_not_used() -> None:
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", REPLACED], capture_output=True, text=True, check=False)
    assert out.stdout == "[1.0, 2.0] (1,) 8 True\n", out.stderr


class Later(list[Any]):
    """A list that computes when it is looked through."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter([right()])


class LaterDict(dict[str, Any]):
    """A dict that does."""

    def values(self) -> Any:
        return [right()]


@pytest.mark.parametrize("result", [Later(), LaterDict(), type("LaterTuple", (tuple,), {})((right(),))])
def test_a_container_of_a_kind_of_its_own_is_refused(result: Any) -> None:
    failure = refused(result, *ONE)
    assert failure.code is Code.FAKE_TENSOR
    assert "plain tuple, list or dict" in failure.message


def test_what_torch_itself_returns_several_outputs_in_is_taken() -> None:
    memory, slot = memory_for(*TWO)
    materialise(right().sort(dim=1), memory, slot)
    assert torch.equal(tensor_view(memory, slot.outputs[0]), right())
