"""Operators of a user's own on a real GPU: honest kernels of three languages pass, generic attacks do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from device import need_module, need_nvcc
from open_kernels import ATTACKS, COMPILER_LIMITS, FILES, HONEST, Attack, case_of, source_of

from pytest_klineage.records import Status, Surface, Verdict

pytestmark = pytest.mark.gpu
Judge = Callable[..., Verdict]


def need(surface: Surface) -> None:
    """Skips where a language's compiler is not installed."""
    if surface is not Surface.CUDA:
        need_module(surface.value)
    if surface is not Surface.TRITON:
        need_nvcc()


def said(verdict: Verdict) -> str:
    """Codes, sentences and checks of a verdict, for a test's message."""
    return f"{[(item.code.value, item.message) for item in verdict.reasons]} {verdict.log} {verdict.notes}"


@pytest.mark.parametrize("surface", FILES, ids=lambda surface: surface.value)
@pytest.mark.parametrize("operator", HONEST)
def test_a_correct_kernel_is_accepted(operator: str, surface: Surface, judge: Judge) -> None:
    """Plain, in place, with several outputs, from and to 8-bit floats, and with integer outputs."""
    need(surface)
    verdict = judge(case_of(operator), source_of(surface, operator), **COMPILER_LIMITS)
    assert verdict.scored, said(verdict)
    assert verdict.reference["label"] == "the definition, eager"
    assert any("permuted along" in note for note in verdict.notes), said(verdict)
    assert {tuple(check.shape.values()) for check in verdict.checks} == {(), (3, 77)}


def test_the_kernel_that_remembers_contents_is_right(judge: Judge) -> None:
    """It is the same kernel, without its memory, that is fast."""
    need(Surface.CUDA)
    verdict = judge(case_of("iterated", at_least=1), source_of(Surface.CUDA, "iterated"), time_limit_s=30.0)
    assert verdict.status is Status.ACCEPTED, said(verdict)


@pytest.mark.parametrize("policy", ["do_bench", "cudagraph"])
def test_inout_tensors_are_fresh_in_long_queues_and_in_graphs(policy: str, judge: Judge) -> None:
    """A queue longer than its slots, and a replayed graph, would overwrite what they have overwritten."""
    need(Surface.CUDA)
    verdict = judge(case_of("add_norm"), source_of(Surface.CUDA, "add_norm"), also_policies=(policy,))
    assert verdict.scored, said(verdict)
    assert [timing.policy for timing in verdict.other_timings] == [policy]


def test_the_definition_compiled_is_a_reference(judge: Judge) -> None:
    need(Surface.CUDA)
    case = case_of("layer_norm", reference="torch.compile")
    verdict = judge(case, source_of(Surface.CUDA, "layer_norm"))
    assert verdict.scored, said(verdict)
    assert "torch.compile" in verdict.reference["label"]
    assert any("triton" in kernel.name for kernel in verdict.reference_kernels), verdict.reference_kernels


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda item: f"{item.name}-{item.surface.value}")
def test_a_generic_attack_is_rejected(attack: Attack, judge: Judge) -> None:
    need(attack.surface)
    verdict = judge(attack.case, attack.source, **COMPILER_LIMITS)
    assert verdict.code.value in attack.codes, said(verdict)
