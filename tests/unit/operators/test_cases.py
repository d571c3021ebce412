"""Making cases: names, shapes, options, signatures, costs; and that none of it imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.operators import OPERATORS, make_case, operator, paper_case
from pytest_klineage.records import LibraryPolicy, TensorSpec


def test_operators_are_found_by_name() -> None:
    phases = ["gdn_cumsum", "gdn_kkt_solve", "gdn_fused_fwd"]
    assert list(OPERATORS) == sorted(["gemm", "conv2d", "fmha", "topk", "gdn", *phases])
    assert operator("fmha") is OPERATORS["fmha"]
    with pytest.raises(UnknownName, match="Did you mean 'gemm'"):
        operator("gem")


@pytest.mark.parametrize("module", ["pytest_klineage.operators", "pytest_klineage.references"])
def test_importing_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_shape_may_be_positional_or_named() -> None:
    case = make_case("conv2d", (1, 2, 8, 9, 3, 3, 1, 0), "fp32", "torch")
    assert case == make_case("conv2d", dict(reversed(case.shape.items())), "fp32", "torch")
    assert list(case.shape) == ["N", "C", "H", "W", "F", "K", "stride", "pad"]


def test_only_changed_options_are_kept() -> None:
    assert make_case("fmha", (1, 1, 4, 8), "fp32", "torch", causal=False, layout="bhsd").options == {}
    case = make_case("fmha", (1, 1, 4, 8), "fp16", "torch", causal=True, layout="bshd")
    assert case.options == {"causal": True, "layout": "bshd"}
    assert case.id == "fmha-1x1x4x8-fp16-causal-bshd"


def test_target_policy_and_further_shapes() -> None:
    case = make_case(
        "gemm", (4, 4, 4), "fp32", "torch", at_least=1.2,
        library=LibraryPolicy.ALLOW, also_shapes=[(3, 5, 7), {"M": 1, "N": 2, "K": 3}],
    )  # fmt: skip
    assert (case.at_least, case.library) == (1.2, LibraryPolicy.ALLOW)
    assert case.also_shapes == ({"M": 3, "N": 5, "K": 7}, {"M": 1, "N": 2, "K": 3})


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "options", "message"),
    [
        ("gemn", (1, 1, 1), "fp32", {}, "gemm"),
        ("gemm", (1, 1, 1), "fp8", {}, "bf16"),
        ("gemm", (1, 1, 1), "fp32", {"causal": True}, "option for gemm"),
        ("gemm", (1, 1, 1), "fp32", {"layout": "nhwc"}, "nt"),
        ("conv2d", (1, 1, 4, 4, 1, 3, 1, 1), "fp32", {"layout": "nwhc"}, "nhwc"),
        ("gemm", {"M": 1, "N": 1, "L": 1}, "fp32", {}, "axis of gemm"),
    ],
)
def test_unknown_names_list_the_valid_ones(
    name: str, shape: tuple[int, ...], dtype: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UnknownName, match=message):
        make_case(name, shape, dtype, "torch", **options)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gemm", (1, 1), "3 axes"),
        ("gemm", {"M": 1, "N": 1}, "also needs the axes K"),
        ("gemm", (1, 0, 1), "positive"),
        ("gemm", (1, True, 1), "positive"),
        ("gemm", (1, 2.0, 1), "positive"),
        ("conv2d", (1, 1, 2, 9, 1, 3, 1, 0), "does not fit"),
        ("conv2d", (1, 1, 9, 9, 1, 3, 1, 3), "must be smaller"),
        ("topk", (1, 4, 5), "exceeds"),
        ("gdn", (2, 3, 8, 8, 8), "multiple of HQK"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_case(name, shape, "fp32", "torch")


def test_further_shapes_are_checked_too() -> None:
    with pytest.raises(UsageError, match="exceeds"):
        make_case("topk", (1, 5, 5), "fp32", "torch", also_shapes=[(1, 4, 5)])


def test_paper_cases() -> None:
    assert {name: paper_case(name, "gpu", "cublas").id for name in OPERATORS} == {
        "gemm": "gemm-4096x4096x4096-bf16",
        "conv2d": "conv2d-8x64x56x56x128x3x1x1-fp16",
        "fmha": "fmha-8x64x2048x128-fp16",
        "topk": "topk-64x4096x512-fp32",
        "gdn": "gdn-16x48x128x64x4096-bf16",
        "gdn_cumsum": "gdn_cumsum-48x64x4096-fp32",
        "gdn_kkt_solve": "gdn_kkt_solve-16x48x128x64x4096-bf16",
        "gdn_fused_fwd": "gdn_fused_fwd-16x48x128x64x4096-bf16",
    }
    assert {paper_case(name, "cpu", "torch").dtype for name in OPERATORS} == {"fp32"}
    with pytest.raises(UnknownName, match="cpu, gpu"):
        paper_case("gemm", "tpu", "torch")
    with pytest.raises(UnknownName, match="conv2d"):
        paper_case("conv3d", "cpu", "torch")


def strides(specs: tuple[TensorSpec, ...]) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.strides for spec in specs}


def test_channels_last_strides_are_those_of_torch() -> None:
    case = make_case("conv2d", (2, 3, 5, 6, 4, 3, 1, 1), "fp16", "torch", layout="nhwc")
    signature = OPERATORS["conv2d"].signature(case)
    for spec in (*signature.inputs, *signature.outputs):
        tensor = torch.empty(spec.shape).to(memory_format=torch.channels_last)
        assert tensor.stride() == spec.strides, spec.name
    assert signature.outputs[0].shape == (2, 4, 5, 6)
    assert signature.scalars == {"stride": 1.0, "pad": 1.0}


@pytest.mark.parametrize(("layout", "transposed"), [("nn", ""), ("nt", "b"), ("tn", "a"), ("tt", "ab")])
def test_a_t_in_a_gemm_layout_is_a_transposed_operand(layout: str, transposed: str) -> None:
    signature = OPERATORS["gemm"].signature(make_case("gemm", (3, 5, 7), "bf16", "torch", layout=layout))
    for spec in (*signature.inputs, *signature.outputs):
        rows, columns = spec.shape
        tensor = torch.empty(columns, rows).t() if spec.name in transposed else torch.empty(rows, columns)
        assert tensor.stride() == spec.strides, spec.name
    assert [spec.shape for spec in signature.inputs] == [(3, 7), (7, 5)]


def test_bshd_strides() -> None:
    signature = OPERATORS["fmha"].signature(
        make_case("fmha", (2, 3, 5, 8), "fp16", "torch", causal=True, layout="bshd")
    )
    expected = torch.empty(2, 5, 3, 8).transpose(1, 2)
    assert set(strides((*signature.inputs, *signature.outputs)).values()) == {expected.stride()}
    assert {spec.shape for spec in signature.inputs} == {(2, 3, 5, 8)}
    assert signature.scalars == {"scale": 8**-0.5, "causal": 1.0}


def test_gdn_signature() -> None:
    case = make_case("gdn", (2, 6, 8, 16, 40), "bf16", "torch", initial_state=True)
    signature = OPERATORS["gdn"].signature(case)
    assert [(spec.name, spec.dtype, spec.shape) for spec in (*signature.inputs, *signature.outputs)] == [
        ("q", "bf16", (40, 2, 8)),
        ("k", "bf16", (40, 2, 8)),
        ("v", "bf16", (40, 6, 8)),
        ("g", "fp32", (40, 6)),
        ("beta", "fp32", (40, 6)),
        ("state0", "fp32", (6, 8, 8)),
        ("o", "bf16", (40, 6, 8)),
        ("state", "fp32", (6, 8, 8)),
    ]
    assert signature.scalars == {"scale": 8**-0.5, "chunk": 16.0}


def test_topk_signature() -> None:
    signature = OPERATORS["topk"].signature(make_case("topk", (3, 9, 4), "fp32", "torch"))
    assert [(spec.name, spec.dtype, spec.shape) for spec in (*signature.inputs, *signature.outputs)] == [
        ("x", "fp32", (3, 9)),
        ("values", "fp32", (3, 4)),
        ("indices", "int64", (3, 4)),
    ]


def test_costs_at_the_papers_sizes() -> None:
    flops = {name: OPERATORS[name].flops(paper_case(name, "gpu", "torch")) for name in OPERATORS}
    assert flops["gemm"] == 2 * 4096**3
    assert flops["conv2d"] == pytest.approx(3.70e9, rel=1e-3)
    assert flops["fmha"] == pytest.approx(1.0995e12, rel=1e-3)
    assert flops["topk"] == 64 * 4096
    assert flops["gdn"] == 7 * 4096 * 48 * 128**2
    causal = make_case("fmha", (1, 1, 4, 8), "fp32", "torch", causal=True)
    assert OPERATORS["fmha"].flops(causal) == 4 * 10 * 8
    window = make_case("fmha", (1, 2, 20, 8), "fp32", "torch", causal=True, window=16, group=2)
    assert OPERATORS["fmha"].flops(window) == 4 * 2 * 8 * (16 * 17 / 2 + 4 * 16)
    longer = make_case("fmha", (1, 1, 4, 8), "fp32", "torch", causal=True, window=16)
    assert OPERATORS["fmha"].flops(longer) == OPERATORS["fmha"].flops(causal)
    moved = {name: OPERATORS[name].min_bytes(paper_case(name, "gpu", "torch")) for name in OPERATORS}
    assert moved["gemm"] == 3 * 4096**2 * 2
    assert moved["conv2d"] == pytest.approx(9.78e6, rel=1e-3)
    assert moved["topk"] == 64 * (4096 * 4 + 512 * 12)
