"""Operators of a user's own on a real GPU: honest kernels of three languages pass, generic attacks do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device import need_module, need_nvcc

from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelCase, KernelSource, SourceFile, Surface, Verdict

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parent / "open"
KINDS = {
    "softmax": 0, "add_norm": 1, "layer_norm": 2, "quantise": 3, "unwritten row": 10, "memo by pointer": 11,
    "stream escape": 12, "mutated input": 13, "lower precision": 14, "residual left": 15, "memo in place": 16,
    "memo by samples": 17,
}  # fmt: skip
Judge = Callable[..., Verdict]


def case_of(operator: str, shape: tuple[int, ...] = (512, 1000), reference: str = "torch", **given: Any) -> KernelCase:
    name = f"{FOLDER}/definitions.py:{operator}"
    return make_case(name, shape, "bf16", reference, at_least=1e-4, also_shapes=[(3, 77)], **given)


def cuda(kind: str) -> KernelSource:
    files = tuple(SourceFile(name=name, text=(FOLDER / name).read_text()) for name in ("kernels.cu", "rows.cuh"))
    return KernelSource(
        surface=Surface.CUDA, files=files, entry="run", flags=(f"-DKERNEL={KINDS[kind]}",), label=kind
    )  # fmt: skip


def triton(name: str) -> KernelSource:
    file = SourceFile(name=f"{name}.py", text=(FOLDER / f"{name}.py").read_text())
    return KernelSource(surface=Surface.TRITON, files=(file,), entry="run", label=name)


def said(verdict: Verdict) -> str:
    """Codes, sentences and checks of a verdict, for a test's message."""
    return f"{[(item.code.value, item.message) for item in verdict.reasons]} {verdict.log} {verdict.notes}"


@pytest.mark.parametrize("operator", ["softmax", "add_norm", "layer_norm", "quantise"])
def test_a_correct_cuda_kernel_is_accepted(operator: str, judge: Judge) -> None:
    need_nvcc()
    verdict = judge(case_of(operator), cuda(operator))
    assert verdict.scored, said(verdict)
    assert verdict.reference["label"] == "the definition, eager"
    assert any("permuted along" in note for note in verdict.notes), said(verdict)
    assert {tuple(check.shape.values()) for check in verdict.checks} == {(), (3, 77)}


@pytest.mark.parametrize("operator", ["softmax", "quantise"])
def test_a_correct_triton_kernel_is_accepted(operator: str, judge: Judge) -> None:
    need_module("triton")
    verdict = judge(case_of(operator), triton(operator))
    assert verdict.scored, said(verdict)


@pytest.mark.parametrize("policy", ["do_bench", "cudagraph"])
def test_inout_tensors_are_fresh_in_long_queues_and_in_graphs(policy: str, judge: Judge) -> None:
    """A queue longer than its slots, and a replayed graph, would overwrite what they have overwritten."""
    need_nvcc()
    verdict = judge(case_of("add_norm"), cuda("add_norm"), also_policies=(policy,))
    assert verdict.scored, said(verdict)
    assert [timing.policy for timing in verdict.other_timings] == [policy]


def test_the_definition_compiled_is_a_reference(judge: Judge) -> None:
    need_nvcc()
    verdict = judge(case_of("layer_norm", reference="torch.compile"), cuda("layer_norm"))
    assert verdict.scored, said(verdict)
    assert "torch.compile" in verdict.reference["label"]
    assert any("triton" in kernel.name for kernel in verdict.reference_kernels), verdict.reference_kernels


ATTACKS = {
    "unwritten row": ("softmax", "wrong_value.unwritten cheat.replay"),
    "memo by pointer": ("softmax", "wrong_value.mismatch cheat.replay"),
    "memo by samples": ("softmax", "wrong_value.mismatch cheat.replay"),
    "stream escape": ("softmax", "cheat.late_work"),
    "mutated input": ("softmax", "wrong_value.input_mutated"),
    "lower precision": ("softmax", "wrong_value.mismatch cheat.replay"),
    "residual left": ("add_norm", "wrong_value.mismatch cheat.replay"),
    "memo in place": ("add_norm", "wrong_value.mismatch cheat.replay"),
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_generic_attack_is_rejected(kind: str, judge: Judge) -> None:
    need_nvcc()
    operator, codes = ATTACKS[kind]
    verdict = judge(case_of(operator), cuda(kind))
    assert verdict.code.value in codes.split(), said(verdict)
