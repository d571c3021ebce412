"""A reference in its worker: refusals that a judge understands, what is bound to a slot, conversions untimed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_klineage.errors import UsageError
from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.records import KernelCase
from pytest_klineage.records.messages import Job
from pytest_klineage.references import TrialTensors, Variant
from pytest_klineage.surfaces.base import Memory
from pytest_klineage.surfaces.python import tensor_view
from pytest_klineage.worker import reference_kernel
from pytest_klineage.worker.host.arena import plan
from pytest_klineage.worker.reference_kernel import Converted, ReferenceKernel


def job(case: KernelCase, platform: str = "cpu") -> Job:
    return Job(surface="reference", case=case, platform=platform)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would do is done on the CPU: the trial lies there, and there is nothing to wait for."""
    original = reference_kernel.trial_of
    monkeypatch.setattr(reference_kernel, "trial_of", lambda case, platform: original(case, platform, device="cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def on_a_slot(
    kernel: ReferenceKernel, case: KernelCase
) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The kernel bound to one slot in host memory, with the slot's inputs and outputs."""
    signature = OPERATORS[case.operator].signature(case)
    arena = plan(signature, num_slots=1)
    memory = Memory(bytearray(arena.num_bytes))
    slot = arena.slots[0]
    invoke = kernel.bind(memory, slot, dict(signature.scalars))
    inputs = {item.spec.name: tensor_view(memory, item) for item in slot.inputs}
    return invoke, inputs, {item.spec.name: tensor_view(memory, item) for item in slot.outputs}


@pytest.mark.usefixtures("nothing_installed", "gpu")
@pytest.mark.parametrize(
    ("ref", "operator", "shape"), [("flashinfer", "topk", (4, 8, 2)), ("fla", "gdn", (1, 1, 16, 16, 8))]
)
def test_an_absent_library_has_the_words_that_make_a_skip(ref: str, operator: str, shape: tuple[int, ...]) -> None:
    case = make_case(operator, shape, "fp16", ref)
    with pytest.raises(ModuleNotFoundError, match=rf"^No module named '{ref}[\w.]*'$"):
        ReferenceKernel(job(case, "sm90"))


def test_a_gpus_library_is_refused_on_a_cpu() -> None:
    with pytest.raises(UsageError, match=r"the reference cublas runs on sm80, .*sm90, .*sm120, not on cpu"):
        ReferenceKernel(job(make_case("gemm", (4, 4, 4), "fp32", "cublas")))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("platform", ["cpu", "sm90"])
def test_a_call_fills_its_slot(platform: str) -> None:
    case = make_case("gemm", (4, 5, 6), "fp32", "torch")
    invoke, inputs, outputs = on_a_slot(ReferenceKernel(job(case, platform)), case)
    for tensor in inputs.values():
        tensor.normal_()
    assert invoke() is None
    assert torch.equal(outputs["c"], inputs["a"] @ inputs["b"])
    assert not hasattr(invoke, "before")


@pytest.mark.usefixtures("gpu", "flashinfer")
@pytest.mark.parametrize("before", [False, True])
def test_a_conversion_is_bound_too(before: bool) -> None:
    case = make_case("gdn", (1, 2, 128, 64, 12), "bf16", "flashinfer")
    invoke, inputs, _outputs = on_a_slot(ReferenceKernel(job(case, "sm90")), case)
    for seed in (1, 2):
        made = OPERATORS["gdn"].make_inputs(case, torch.Generator().manual_seed(seed), "well_conditioned")
        for name, tensor in inputs.items():
            tensor.copy_(made[name])
        if before:
            invoke.before()
        expected = OPERATORS["gdn"].oracle(case, made)
        found = invoke()
        assert torch.allclose(found["state"].double(), expected["state"], atol=1e-3)


def test_before_takes_the_conversion_out_of_the_call() -> None:
    converted: list[int] = []

    def convert(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converted.append(1)
        return {"x": inputs["x"].clone()}

    bound = Converted(Variant(lambda inputs, outputs: {"y": inputs["x"]}, convert), {"x": torch.ones(1)}, {})
    bound()
    bound()
    assert len(converted) == 2, "it was not asked for before: it is part of every call"
    bound.before()
    bound()
    bound()
    assert len(converted) == 3


def test_the_trial_is_made_for_the_platform(trial: Any) -> None:
    made = trial(make_case("gemm", (4, 5, 6), "bf16", "cublas"), "sm120")
    assert isinstance(made, TrialTensors)
    assert (made.platform, made.device.type) == ("sm120", "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in made.inputs.items()} == {"a": (4, 6), "b": (6, 5)}
    assert {name: tensor.dtype for name, tensor in made.outputs.items()} == {"c": torch.bfloat16}
