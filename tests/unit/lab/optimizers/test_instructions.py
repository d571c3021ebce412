"""The contract says what a kernel's author must know: arguments, ABI, flags, tolerance, what is refused."""

from __future__ import annotations

import msgspec
import pytest

from pytest_klineage import operator
from pytest_klineage.errors import UnknownName
from pytest_klineage.lab.optimizers.instructions import cpu_features, instructions_for, machine_text
from pytest_klineage.operators import OPERATORS, make_case, paper_case
from pytest_klineage.records import LibraryPolicy, Machine, Surface
from pytest_klineage.surfaces.cpp import check_flags
from pytest_klineage.surfaces.native import HEADER


@operator("x[M,N] -> y[M]", dtypes=("fp32",))
def longest(x, *, power: int = 2):
    return x.abs().pow(power).sum(1)


TIERS = {"cpu": Surface.CPP, "gpu": Surface.CUDA}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["conv2d", "fmha", "gdn", "gemm", "topk"])
def test_every_argument_is_described(name: str, tier: str) -> None:
    case = paper_case(name, tier, "torch")
    text = instructions_for(case, TIERS[tier], "cpu" if tier == "cpu" else "sm90")
    signature = OPERATORS[name].signature(case)
    for spec in (*signature.inputs, *signature.outputs):
        assert f"| {spec.name} | {spec.dtype} | {list(spec.shape)} | {list(spec.strides)} |" in text
    for scalar in signature.scalars:
        assert f"{scalar} = " in text
    assert HEADER.read_text() in text
    assert all(input_distribution in text for input_distribution in OPERATORS[name].input_distributions)
    assert ("no tolerance" in text) is OPERATORS[name].exact


def test_a_users_definition_is_quoted() -> None:
    text = instructions_for(make_case(longest, (8, 16), "fp32", "torch", power=3), Surface.CPP, "cpu")
    assert "x[M,N] -> y[M], by this definition" in text
    assert "return x.abs().pow(power).sum(1)" in text
    assert "Options: power = 3." in text


def test_entry_flags_and_machine_are_the_targets() -> None:
    case = make_case("gemm", (64, 64, 64), "fp32", "torch", also_shapes=((1, 7, 33),))
    machine = Machine(platform="cpu", device="Some CPU", cores=8, cache_bytes=32 << 20)
    text = instructions_for(
        case, Surface.CPP, "cpu", "my_gemm", ("-O2", "-mavx2"), reference="the expert kernel",
        machine=machine_text(machine, threads=2, features=("avx2", "avx512")),
    )  # fmt: skip
    assert 'extern "C" int my_gemm(const klineage_call *call)' in text
    assert "The flags `-O2 -mavx2` are yours" in text
    assert "- M = 1, N = 7, K = 33" in text
    assert "In turns with the reference the expert kernel" in text
    assert "Some CPU; 2 threads; last-level cache 32 MiB; instructions: avx2, avx512." in text


def test_flags_that_the_text_names_are_accepted() -> None:
    check_flags(("-O3", "-Ofast", "-ffast-math", "-fno-math-errno", "-mavx2", "-mfma", "-mavx512f", "-march=x86-64-v4"))


def test_what_a_case_demands_is_said() -> None:
    case = msgspec.structs.replace(paper_case("gemm", "gpu", "torch"), max_spills=0, requires=("wgmma",))
    text = instructions_for(case, Surface.CUDA, "sm90")
    assert "more than 0 bytes of spilled registers" in text
    assert "without these instructions: wgmma" in text
    assert "work done by a library" in text
    assert "sm_90a" in text
    allowed = msgspec.structs.replace(case, library=LibraryPolicy.ALLOW)
    assert "work done by a library" not in instructions_for(allowed, Surface.CUDA, "sm90")


@pytest.mark.parametrize("surface", [Surface.TRITON, Surface.TILELANG, Surface.PYTHON])
def test_languages_on_tensors_are_called_otherwise(surface: Surface) -> None:
    text = instructions_for(paper_case("topk", "gpu", "torch"), surface, "sm90")
    assert "klineage_call" not in text
    assert "The file defines `run`" in text


def test_an_unknown_operator_is_refused() -> None:
    case = msgspec.structs.replace(paper_case("gemm", "cpu", "torch"), operator="gemmm")
    with pytest.raises(UnknownName):
        instructions_for(case, Surface.CPP, "cpu")


def test_a_gpu_is_called_by_its_name() -> None:
    assert machine_text(Machine(platform="sm90", device="NVIDIA H200")) == "NVIDIA H200."


def test_features_of_this_cpu_are_capabilities() -> None:
    assert set(cpu_features()) <= {"avx2", "avx512"}
    assert cpu_features({"sse2", "avx2", "fma", "avx512f"}) == ("avx2", "avx512")
    assert cpu_features({"sse2"}) == ()
