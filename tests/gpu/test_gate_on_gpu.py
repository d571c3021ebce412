"""The gate on a real GPU: its clock tells the truth, its policies agree, its verdicts say what was executed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_klineage.gate.stages.attribute import Owner, owner_of
from pytest_klineage.operators import make_case
from pytest_klineage.records import Code, KernelSource, LibraryPolicy, SourceFile, Surface, Verdict

pytestmark = pytest.mark.gpu

CASE = make_case("gemm", (256, 256, 256), "bf16", "torch", at_least=1e-4)
ALLOWED = make_case("gemm", (256, 256, 256), "bf16", "torch", at_least=1e-4, library=LibraryPolicy.ALLOW)
TOO_LARGE = make_case("gemm", (1 << 19, 1 << 19, 16), "bf16", "torch", at_least=1e-4)
"""Its output alone is half a terabyte."""
HONEST = "return honest::gemm(call);"
LIBRARY = "import torch\ndef run(a, b, out):\n    torch.mm(a, b, out=out)\n"
Make = Callable[[str], KernelSource]
Judge = Callable[..., Verdict]


def said(verdict: Verdict) -> list[tuple[str, str]]:
    """Codes and sentences of a verdict, for a test's message."""
    return [(reason.code.value, reason.message) for reason in verdict.reasons]


def test_a_verdict_says_where_it_was_made_and_what_was_executed(judge: Judge, cuda: Make, platform: str) -> None:
    verdict = judge(CASE, cuda(HONEST))
    assert verdict.scored, said(verdict)
    assert verdict.machine is not None
    assert verdict.machine.platform == platform
    assert verdict.machine.device_uuid
    assert any("gemm_kernel" in kernel.name for kernel in verdict.kernels)
    assert verdict.reference_kernels
    assert verdict.timing is not None
    assert verdict.timing.calls_per_sample > 1
    assert verdict.timing.flush_bytes > verdict.machine.cache_bytes


@pytest.mark.parametrize("milliseconds", [0.2, 1.0])
def test_the_clock_tells_the_truth(milliseconds: float, judge: Judge, cuda: Make) -> None:
    """A kernel that waits by the device's own nanosecond timer takes as long as it waits, and a little."""
    verdict = judge(CASE, cuda(f"honest::delay({milliseconds}, honest::stream(call));\n{HONEST}"))
    plain = judge(CASE, cuda(HONEST))
    assert verdict.timing is not None, said(verdict)
    assert plain.timing is not None, said(plain)
    waited = verdict.timing.candidate_ms - plain.timing.candidate_ms
    assert waited == pytest.approx(milliseconds, rel=0.05)


@pytest.mark.parametrize("policy", ["paper", "do_bench"])
def test_policies_agree(policy: str, judge: Judge, cuda: Make) -> None:
    verdict = judge(CASE, cuda(f"honest::delay(0.2, honest::stream(call));\n{HONEST}"), also_policies=(policy,))
    assert verdict.timing is not None, said(verdict)
    (other,) = verdict.other_timings
    assert other.candidate_ms == pytest.approx(verdict.timing.candidate_ms, rel=0.1)
    assert other.calls_per_sample == 1


def test_a_graph_is_not_slower_than_its_launches(judge: Judge, cuda: Make) -> None:
    verdict = judge(CASE, cuda(HONEST), also_policies=("cudagraph",))
    assert verdict.timing is not None, said(verdict)
    (graph,) = verdict.other_timings
    assert 0 < graph.candidate_ms <= 1.1 * verdict.timing.candidate_ms


def test_a_kernel_that_waits_for_the_host_cannot_be_recorded(judge: Judge, cuda: Make) -> None:
    waiting = "const int status = honest::gemm(call);\ncudaStreamSynchronize(honest::stream(call));\nreturn status;"
    verdict = judge(CASE, cuda(waiting), policy="cudagraph")
    assert verdict.code in (Code.NOT_CAPTURABLE, Code.RETURNED_ERROR, Code.CUDA_ERROR), said(verdict)
    assert judge(CASE, cuda(waiting)).scored


def test_the_same_kernel_on_both_sides_is_as_fast_as_itself(judge: Judge, cuda: Make) -> None:
    """Over several starts: within one, pairs differ by the places of their buffers."""
    source = cuda(HONEST)
    verdict = judge(CASE, source, against=source, time_limit_s=2.0, precision=0.01)
    assert verdict.timing is not None, said(verdict)
    assert len(verdict.timing.starts) > 1
    assert verdict.timing.speedup.estimate == pytest.approx(1, abs=0.03)


def test_a_library_is_named_where_it_is_allowed(judge: Judge, python: Make) -> None:
    verdict = judge(ALLOWED, python(LIBRARY))
    assert verdict.scored, said(verdict)
    owners = {owner_of(kernel.name) for kernel in verdict.kernels}
    assert owners & {Owner.VENDOR, Owner.FRAMEWORK}, [kernel.name for kernel in verdict.kernels]


def test_a_library_is_refused_where_a_kernel_is_asked_for(judge: Judge, python: Make) -> None:
    verdict = judge(CASE, python(LIBRARY))
    assert verdict.code in (Code.WRAPPER_FRAMEWORK, Code.WRAPPER_LIBRARY), said(verdict)


@pytest.mark.parametrize("text", [
    "import honest_gpu\ndef run(a, b):\n    return honest_gpu.gemm(a, b)\n",
    "import honest_gpu\ndef run(a, b, out):\n    honest_gpu.gemm(a, b, out)\n",
], ids=["returned", "filled"])  # fmt: skip
def test_a_python_kernel_with_machine_code_of_its_own(text: str, judge: Judge, python: Make) -> None:
    verdict = judge(CASE, python(text))
    assert verdict.scored, said(verdict)
    assert any("own_gemm" in kernel.name for kernel in verdict.kernels)


def test_a_kernel_for_the_cpu_is_not_judged_here(judge: Judge) -> None:
    text = '#include "klineage.h"\nextern "C" int run(const klineage_call *) { return 0; }\n'
    source = KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", text),), entry="run")
    assert judge(CASE, source).code is Code.SKIPPED_PLATFORM


def test_a_case_too_large_is_skipped_and_the_next_judged(judge: Judge, cuda: Make) -> None:
    verdict = judge(TOO_LARGE, cuda(HONEST))
    assert verdict.code is Code.SKIPPED_MEMORY, said(verdict)
    after = judge(CASE, cuda(HONEST))
    assert after.scored, said(after)
