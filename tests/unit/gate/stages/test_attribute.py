"""Whose kernels were executed: names as an H200's tracing wrote them, and what follows from shares and spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.gate.stages.attribute import (
    Owner,
    foreign_part,
    foreign_reason,
    hidden_reason,
    owner_of,
    short,
    watched_reason,
)
from pytest_klineage.records import Code, KernelTime
from pytest_klineage.records.messages import Profiled

VENDOR_NAMES = (
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    "void flashinfer::sampling::FilteredTopKUnifiedKernel<float, int, 4, false>(float*, int*)",
    "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true>(int)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<>>(int)",
    "void cublasLt::splitKreduce_kernel<32, 16>(int)",
    "ampere_sgemm_128x64_nn",
)
FRAMEWORK_NAMES = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>(int)",
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(int)",
)
OWN_NAMES = (
    "topk_rank_select(float const*, float*, long*)", "matmul_kernel", "Memset (Device)", "Memcpy DtoD",
    "void hopper_gemm<128, 256>(CUtensorMap_st)", "my_flashattn(float*)", "gemm_for_ampere_class(float*)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
)  # fmt: skip


def profiled(*kernels: tuple[str, int], busy_ns: int = 1000, claimed_ns: int = 1000, calls: int = 20) -> Profiled:
    return Profiled(
        kernels=tuple(KernelTime(name=name, calls=calls, total_ns=spent) for name, spent in kernels),
        calls=calls, busy_ns=busy_ns, claimed_ns=claimed_ns,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "owner"), [(VENDOR_NAMES, Owner.VENDOR), (FRAMEWORK_NAMES, Owner.FRAMEWORK), (OWN_NAMES, Owner.OWN)]
)
def test_owner_by_name(names: tuple[str, ...], owner: Owner) -> None:
    assert {name: owner_of(name) for name in names} == dict.fromkeys(names, owner)


def test_a_name_that_the_build_has_produced_is_its_own() -> None:
    name = "void cutlass::device_kernel<my::Gemm>(my::Gemm::Params)"
    assert owner_of(name) is Owner.VENDOR
    assert owner_of(name, own_symbols=("device_kernel",)) is Owner.OWN


def test_a_part_of_a_name_is_not_the_name() -> None:
    """A kernel that is called "e", or as a vendor's is in full, makes no vendor's kernel its own."""
    borrowed = ("e", "nvjet", "gemm", "kernel", VENDOR_NAMES[0])
    assert all(owner_of(name, own_symbols=borrowed) is Owner.VENDOR for name in VENDOR_NAMES)


@pytest.mark.parametrize(
    ("name", "code"), [(VENDOR_NAMES[0], Code.WRAPPER_LIBRARY), (FRAMEWORK_NAMES[0], Code.WRAPPER_FRAMEWORK)]
)
def test_a_wrapper_is_named(name: str, code: Code) -> None:
    reason = foreign_reason(profiled((name, 900), ("own", 100)))
    assert reason is not None
    assert reason.code is code
    assert short(name) in reason.message
    assert repr(foreign_part(name)) in reason.message


def test_the_part_of_a_name_that_is_a_vendors_is_shown() -> None:
    """Without it the name would have no owner, so an author knows what to change."""
    assert foreign_part("my_implicit_gemm_v2(float*)") == "implicit_gemm"
    assert owner_of("my_implicit_gemm_v2(float*)".replace("implicit_gemm", "")) is Owner.OWN


def test_a_small_share_of_others_is_nothing() -> None:
    assert foreign_reason(profiled((FRAMEWORK_NAMES[0], 99), ("own", 901))) is None
    assert foreign_reason(profiled()) is None


def test_work_beside_the_calls_is_hidden() -> None:
    assert hidden_reason(profiled(("own", 1), busy_ns=1_200_000, claimed_ns=1_000_000)) is None
    reason = hidden_reason(profiled(("own", 1), busy_ns=1_300_000, claimed_ns=1_000_000))
    assert reason is not None
    assert reason.code is Code.CLOCK


def test_short_calls_are_given_what_the_events_themselves_take() -> None:
    assert hidden_reason(profiled(("own", 1), busy_ns=20 * 6_000, claimed_ns=20 * 3_000)) is None


def test_no_device_work_is_no_kernel() -> None:
    reason = hidden_reason(profiled(busy_ns=0))
    assert reason is not None
    assert reason.code is Code.NO_DEVICE_WORK


def test_copies_alone_are_no_kernel() -> None:
    reason = hidden_reason(profiled(("Memcpy HtoD", 500), ("Memset (Device)", 10)))
    assert reason is not None
    assert reason.code is Code.NO_DEVICE_WORK


def test_a_kernel_that_is_slower_when_watched_was_not_timed() -> None:
    assert watched_reason(profiled(("own", 1), busy_ns=20 * 29_000), timed_ms=0.010) is None
    reason = watched_reason(profiled(("own", 1), busy_ns=20 * 31_000), timed_ms=0.010)
    assert reason is not None
    assert reason.code is Code.CLOCK
    assert watched_reason(profiled(("own", 1), busy_ns=20 * 1_900_000), timed_ms=1.0) is None


def test_gaps_between_kernels_are_the_tracing_itself() -> None:
    assert watched_reason(profiled(("own", 1), busy_ns=20 * 17_000, claimed_ns=20 * 52_000), timed_ms=0.017) is None


@given(st.text(max_size=300))
def test_short_names_are_short(name: str) -> None:
    assert len(short(name)) <= 63
