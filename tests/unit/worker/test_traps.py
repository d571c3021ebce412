"""Which functions of loaded libraries compute, by their names, and that they crash once they are trapped."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_klineage.worker.traps import Operators, computes, operator_of

OPERATORS = Operators(
    computing=frozenset({"mm", "add", "addmm", "topk", "_softmax", "copysign", "linalg_qr", "sum"}),
    composed=frozenset({"sum", "matmul"}),
    harmless=frozenset({"copy", "copy_", "empty", "view", "matmul", "to", "fill"}),
)


@pytest.mark.parametrize(
    "name",
    [
        "sgemm_", "SGEMM", "cblas_sgemm", "scipy_cblas_dgemm64_", "GEMM_BF16BF16F32", "cblas_sdot", "DAXPY", "sger_",
        "MKL_SPARSE_S_MM", "DftiComputeForward", "dnnl_sgemm", "nnc_aten_matmul", "cblas_strmm", "ssymv_64_",
        "_ZN2at3cpu6mm_outERNS_6TensorERKS1_S4_", "_ZN2at6native21structured_mm_out_cpu4implERKNS_6TensorES4_S4_",
        "_ZN2at6native10add_sparseERKNS_6TensorES3_", "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff",
        "_ZN2at6native7cpublas4gemmENS0_13TransposeTypeES2_lllffPKflS4_lfPfl", "_ZN2at6native9linalg_qrERKNS_6TensorE",
        "_ZN2at3cpu13something_newERKNS_6TensorE", "aoti_torch_cpu_mm_out",
        "_ZN2at6native18structured_sum_out4implERKNS_6TensorE", "aoti_torch_cpu__softmax_out",
    ],
)  # fmt: skip
def test_what_computes_is_known_by_its_name(name: str) -> None:
    assert computes(name, OPERATORS)


@pytest.mark.parametrize(
    "name",
    [
        "malloc", "omp_get_max_threads", "aoti_torch_cpu_copy_", "aoti_torch_empty_strided", "cblas_errprn",
        "_ZN2at3cpu5copy_ERNS_6TensorERKS1_b", "_ZN2at6native5copy_ERNS_6TensorERKS1_b", "_ZN3c106Device4typeEv",
        "_ZN2at6native6matmulERKNS_6TensorES3_", "_ZN2at6native12empty_sparseEv", "PyInit__C",
        "_ZN2at4_ops2mm4callERKNS_6TensorES4_",
        "_ZN2at6native13resize_outputERKNS_6TensorE", "_ZN2at6native3sumERKNS_6TensorE", "sigemptyset", "scaldtb",
    ],
)  # fmt: skip
def test_what_moves_bytes_or_goes_through_the_dispatcher_is_left_alone(name: str) -> None:
    assert not computes(name, OPERATORS)


@pytest.mark.parametrize(
    ("word", "operator"),
    [("add_sparse_out", "add"), ("copysign_out", "copysign"), ("structured_mm_out_cpu", "mm"), ("mmx", ""),
     ("to_sparse", "to"), ("foreach_tensor_add_list_kernel_slow", "add")],
)  # fmt: skip
def test_a_name_begins_with_its_operator(word: str, operator: str) -> None:
    assert operator_of(word, OPERATORS) == operator


SCRIPT = """
import ctypes, sys
import torch
from pytest_klineage.worker.sandbox.refusal import refuse_compute
graph = torch._C.parse_ir("graph(%a : Tensor, %b : Tensor):\\n  %c : Tensor = aten::mm(%a, %b)\\n  return (%c)")
static = torch._C._jit_to_static_module(graph)
a = torch.ones(8, 8, dtype=torch.bfloat16)
assert float(static(a, a)[0, 0]) == 8
refuse_compute()
print("refused", float(a.clone()[0, 0]), flush=True)
static(a, a)
print("computed", flush=True)
"""


def test_the_static_runtime_crashes_where_it_would_compute() -> None:
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert out.stdout.split() == ["refused", "1.0"], out.stderr
    assert out.returncode < 0
