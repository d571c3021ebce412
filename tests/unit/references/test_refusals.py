"""Who does not take a case: kept apart from a fault, found in a worker's traceback, and who takes it instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_klineage.errors import HarnessError, UsageError
from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelCase
from pytest_klineage.references import REFERENCES, TrialTensors, UnsupportedCase, Variant, alternatives, reference
from pytest_klineage.references.device import DeviceReference
from pytest_klineage.references.refusals import refusal_in, refuses
from pytest_klineage.worker.failures import describe

MakeTrial = Callable[..., TrialTensors]


def raised(error: BaseException, cause: BaseException | None = None) -> str:
    """What a worker sends of an exception."""
    try:
        raise error from cause
    except BaseException as caught:  # whatever it is, as at a process's boundary
        return describe(caught)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: no kernel image is available for execution on the device",
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA out of memory. Tried to allocate 2 GiB",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "cuDNN error: CUDNN_STATUS_MAPPING_ERROR",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        "cuBLAS API failed with status 14",
        "Failed to find C compiler. Please specify via CC environment variable",
        "`ptxas` failed with error code 255",
        "Ninja build failed: unsupported gpu architecture",
        "The NVIDIA driver on your system is too old, and must be updated",
        "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
        "odd",
        "",
    ],
)
def test_a_machine_that_fails_and_a_bug_do_not_refuse(said: str) -> None:
    assert not refuses(f"RuntimeError: {said}")


@pytest.mark.parametrize(
    "said",
    [
        "No available kernel. Aborting execution.",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`",
        "head_dim must be 64, 128 or 256",
        "Unsupported head_dim: 96",
        "ChunkGatedDeltaRuleFunction does not support float32",
        "\"addmm_impl_cpu_\" not implemented for 'Half'",
    ],
)
def test_what_a_library_says_about_a_case_is_a_refusal(said: str) -> None:
    assert refuses(said)


class TestInATraceback:
    @pytest.mark.parametrize("tried", [True, False])
    def test_the_exception_for_it_is_always_found(self, tried: bool) -> None:
        error = UnsupportedCase("no variant of the reference runs: a: RuntimeError: odd\nrows")
        assert refusal_in(raised(error), tried=tried) == str(error)
        assert refusal_in(raised(error, cause=RuntimeError("odd")), tried=tried) == str(error)

    @pytest.mark.parametrize("kind", [RuntimeError, ValueError, AssertionError, NotImplementedError])
    def test_where_nothing_was_tried_a_librarys_exceptions_count(self, kind: type[Exception]) -> None:
        text = raised(kind("\"addmm\" not implemented for 'Half'\nat all"))
        assert refusal_in(text, tried=False) == f"{kind.__name__}: \"addmm\" not implemented for 'Half'\nat all"
        assert refusal_in(text, tried=True) == ""
        assert refusal_in(raised(kind()), tried=False) == ""

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            KeyError("c"),
            TypeError("ValueError: not this one"),
            HarnessError("no variant of the reference runs: there is none"),
            UsageError("the reference cublas runs on sm90, not on cpu"),
        ],
    )
    def test_a_fault_is_no_refusal(self, error: Exception) -> None:
        assert refusal_in(raised(error), tried=False) == ""
        assert refusal_in(raised(error, cause=ValueError("odd rows are not supported")), tried=False) == ""

    @pytest.mark.parametrize("text", ["", "ValueError: odd", "it ended", "Traceback (most recent call last):"])
    def test_text_without_a_traceback_is_no_refusal(self, text: str) -> None:
        assert refusal_in(text, tried=False) == ""


# --- a library that is asked for more than it takes -------------------------------------------------------------------


def planning(error: Exception) -> Callable[..., dict[str, Variant]]:
    """A library that cannot plan."""

    def variants(self: DeviceReference, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        raise error

    return variants


@pytest.mark.parametrize("ref", ["cublas", "vendor"])
def test_a_library_that_refuses_when_it_plans(ref: str, monkeypatch: pytest.MonkeyPatch, trial: MakeTrial) -> None:
    case = make_case("gemm", (4, 4, 4), "bf16", ref)
    monkeypatch.setattr(type(reference("cublas")), "variants", planning(ValueError("rows must come in eights")))
    with pytest.raises(UnsupportedCase, match="rows must come in eights"):
        reference(ref).prepare(case, trial(case))
    fault = RuntimeError("CUDA error: unspecified launch failure")
    monkeypatch.setattr(type(reference("cublas")), "variants", planning(fault))
    with pytest.raises((HarnessError, RuntimeError), match="unspecified launch failure"):
        reference(ref).prepare(case, trial(case))


@pytest.mark.usefixtures("flashinfer")
def test_one_fault_among_vendors_libraries_is_no_refusal(monkeypatch: pytest.MonkeyPatch, trial: MakeTrial) -> None:
    case = make_case("gdn", (1, 2, 128, 64, 20), "bf16", "vendor")
    for name, error in (("flashinfer", ValueError("NOT_SUPPORTED")), ("fla", RuntimeError("no nvcc"))):
        monkeypatch.setattr(type(reference(name)), "variants", planning(error))
    with pytest.raises(HarnessError, match=r"flashinfer: NOT_SUPPORTED; fla: no nvcc"):
        reference("vendor").prepare(case, trial(case))


@pytest.mark.parametrize(
    ("ref", "operator", "shape", "dtype", "platform", "others"),
    [
        ("cudnn", "fmha", (1, 1, 64, 256), "fp16", "sm120", ("torch", "flashinfer", "vendor")),
        ("cudnn", "fmha", (1, 1, 64, 68), "fp16", "sm90", ("torch", "vendor")),
        ("flashinfer", "gdn", (1, 1, 64, 64, 64), "fp32", "sm90", ("torch",)),
        ("flashinfer", "gdn", (1, 1, 64, 64, 64), "bf16", "sm90", ("torch", "fla", "vendor")),
        ("vendor", "gdn", (1, 1, 64, 64, 64), "fp32", "sm90", ("torch",)),
        ("vendor", "fmha", (1, 1, 64, 64), "fp32", "sm90", ()),
        ("cublas", "gemm", (4, 4, 4), "fp32", "sm90", ("torch",)),
        ("torch", "gemm", (4, 4, 4), "fp32", "cpu", ()),
    ],
)
def test_which_references_may_take_a_refused_case(
    ref: str, operator: str, shape: tuple[int, ...], dtype: str, platform: str, others: tuple[str, ...]
) -> None:
    """For gemm, vendor asks cublas alone: whom cublas has refused gets no answer there."""
    case = make_case(operator, shape, dtype, ref)
    assert alternatives(case, platform) == others
    for name in others:
        REFERENCES[name].check(case, platform)
