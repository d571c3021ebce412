"""The torch reference is right in every type, layout and option, and says what it is."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch

from pytest_klineage.errors import UnknownName
from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import PLATFORMS, KernelCase, TensorSpec
from pytest_klineage.references import (
    REFERENCES,
    base,
    choose,
    cublas,
    cudnn,
    device,
    fla,
    flags,
    flashinfer,
    reference,
    torch_gdn,
    vendor,
)
from pytest_klineage.references import torch as torch_reference

CASES = {
    "gemm": ("gemm", (33, 17, 65), {}),
    "gemm-nt": ("gemm", (33, 17, 65), {"layout": "nt"}),
    "gemm-tt": ("gemm", (33, 17, 65), {"layout": "tt"}),
    "conv2d": ("conv2d", (2, 8, 9, 11, 5, 3, 2, 1), {}),
    "conv2d-nhwc": ("conv2d", (2, 8, 9, 11, 5, 3, 1, 1), {"layout": "nhwc"}),
    "fmha": ("fmha", (2, 3, 70, 16), {}),
    "fmha-causal-bshd": ("fmha", (2, 3, 70, 16), {"causal": True, "layout": "bshd"}),
    "fmha-group": ("fmha", (2, 4, 70, 16), {"group": 2}),
    "fmha-window-group": ("fmha", (2, 4, 70, 16), {"causal": True, "window": 16, "group": 4, "layout": "bshd"}),
    "topk": ("topk", (5, 99, 20), {}),
    "gdn": ("gdn", (2, 6, 32, 64, 192), {}),
    "gdn-ragged-state": ("gdn", (2, 4, 16, 32, 75), {"initial_state": True}),
    "gdn-odd-chunk": ("gdn", (1, 2, 16, 24, 48), {}),
    "gdn-tiny-chunk": ("gdn", (2, 2, 16, 8, 20), {}),
}

NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int64": torch.int64}


def strided(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=NAMES[spec.dtype])


def run(case: KernelCase, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    signature = OPERATORS[case.operator].signature(case)
    arguments = {spec.name: strided(spec).copy_(inputs[spec.name]) for spec in signature.inputs}
    outputs = {spec.name: strided(spec) for spec in signature.outputs}
    call = reference("torch").prepare(case)
    for _ in range(2):
        returned = call(arguments, outputs)
    assert all(torch.equal(arguments[name], inputs[name]) for name in inputs), "the reference changed its inputs"
    answer = outputs if returned is None else returned
    for spec in signature.outputs:
        assert (answer[spec.name].shape, answer[spec.name].dtype) == (spec.shape, NAMES[spec.dtype])
    return answer


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("key", CASES)
def test_it_is_right_for_every_distribution(key: str, dtype: str) -> None:
    name, shape, options = CASES[key]
    case = make_case(name, shape, dtype, "torch", **options)
    for input_distribution in OPERATORS[name].input_distributions:
        inputs = OPERATORS[name].make_inputs(case, torch.Generator().manual_seed(7), input_distribution)
        expected = Expected(OPERATORS[name], case, inputs)
        answer = run(case, inputs)
        assert expected.accepts(answer), (input_distribution, expected.errors(answer), expected.bounds)


def test_it_has_every_operator_and_runs_everywhere() -> None:
    chosen = reference("torch")
    assert isinstance(chosen, base.Reference)
    assert set(chosen.operators()) == set(OPERATORS)
    assert chosen.platforms == PLATFORMS
    assert list(REFERENCES) == ["torch", "cublas", "cudnn", "flashinfer", "fla", "vendor", "flaggems"]


def test_unknown_names() -> None:
    with pytest.raises(UnknownName, match="torch"):
        reference("tourch")
    case = KernelCase(operator="sort", shape={"N": 1}, dtype="fp32", reference="torch")
    with pytest.raises(UnknownName, match="gemm"):
        reference("torch").prepare(case)


def test_it_says_what_it_is() -> None:
    described = reference("torch").describe(make_case("gemm", (1, 1, 1), "fp32", "torch"))
    assert described["label"] == "torch"
    assert described["torch"] == torch.__version__
    assert described["threads"] == str(torch.get_num_threads())
    assert {"mkldnn", "mkl", "mkldnn_enabled", "float32_matmul_precision", "deterministic_algorithms"} <= set(described)
    assert all(isinstance(value, str) and value for value in described.values())
    composed = reference("torch").describe(make_case("gdn", (1, 1, 8, 8, 8), "fp32", "torch"))
    assert composed["label"] == "torch-chunked (our composition of torch ops)"


@pytest.mark.parametrize(
    "module", [torch_reference, torch_gdn, base, choose, cublas, cudnn, device, fla, flags, flashinfer, vendor]
)
def test_references_never_import_operators(module: object) -> None:
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert not [name for name in imported if name and name.startswith("pytest_klineage.operators")]


@pytest.mark.parametrize("size", [1, 8, 16, 32, 64, 128, 24])
def test_unit_lower_inverse(size: int) -> None:
    matrix = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / size**0.5
    product = (matrix.tril(-1) + torch.eye(size)) @ torch_gdn.unit_lower_inverse(matrix)
    assert torch.allclose(product, torch.eye(size, dtype=torch.float64).expand_as(product), atol=1e-8)
