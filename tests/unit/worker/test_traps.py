"""Which functions of loaded libraries compute, by their names, and that they crash once they are trapped."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pytest_klineage.worker.traps import MOVING, SERVES, Operators, computes, is_openblas, operator_of

OPERATORS = Operators(
    computing=frozenset({"mm", "add", "addmm", "topk", "_softmax", "copysign", "linalg_qr", "sum"}),
    composed=frozenset({"sum", "matmul"}),
    harmless=frozenset({"copy", "copy_", "empty", "view", "matmul", "to", "fill"}),
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/venv/numpy.libs/libscipy_openblas64_-32a4b2a6.so", True),
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3", True),
        ("/home/u/openblas-bench/.venv/lib/torch/lib/libtorch_cpu.so", False),
        ("/opt/openblas/libtorch_cpu.so", False),
    ],
)
def test_openblas_is_known_by_its_file(path: str, *, expected: bool) -> None:
    assert is_openblas(path) is expected


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
        "_ZN6fbgemm13SparseDenseMMEiiPKiS1_PKfS3_iPfib", "_ZNK6fbgemm11PackBMatrixIaiE10metaEqualsERKS1_",
        "_ZN7qnnpack13qnnpackLinearEmmmhPKhPKfhhhS1_mPvPhmP11pthreadpool", "_ZN4gloo3sumIfEEvPvPKvS3_m",
        "_ZN18PackedLinearWeight10apply_implILb0EEERN2at6TensorERKS2_", "pytorch_qnnp_run_operator",
        "nnp_convolution_output", "mkl_blas_avx2_xztrmm_left_lower_fullacopybcopy", "MKLGDFTFwdBatch_32fc", "sgetrf_64",
        "scipy_dgesdd_64_", "LAPACKE_sgels", "vsExp", "VMDLN_64_", "sscal_", "inplace_scaled_exp_minus_c__avx2",
        "_ZN2at6native10arange_outERKN3c106ScalarES4_S4_RNS_6TensorE",
        "_ZN2at3cpu10arange_outERNS_6TensorERKN3c106ScalarE",
        "_ZN2at6native24structured_ufunc_add_CPU4implERKNS_6TensorES4_RKN3c106ScalarES4_", "_gfortran_matmul_r4",
        "_gfortran_msum_r8", "_gfortran_ssum_i4", "_gfortran_norm2_r4", "_gfortran_maxloc0_4_r4", "_gfortran_siall_i1",
        "_gfortran_mminloc1_8_r8", "_gfortran_findloc0_r4", "_gfortran_smaxval_r4", "_gfortran_count_4_l",
        "_gfortran_any_l4", "_gfortran_iparity_i4", "_gfortran_product_c8",
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
        "_ZN6fbgemm11PackBMatrixIaiED1Ev", "_ZN6fbgemm18fbgemmSupportedCPUEv", "_ZN4gloo7ContextD1Ev",
        "mkl_serv_malloc", "_ZN6fbgemm20FloatToFloat16_avx2EPKfPtmb", "_ZN6fbgemm19Float16ToFloat_simdEPKtPfm",
        "mkl_set_num_threads_local", "pytorch_qnnp_initialize", "vmlSetMode", "Sleef_expf16_u10avx512f", "scopy_",
        "_ZN2at6native10arange_outERKN3c106ScalarERNS_6TensorE", "_gfortran_specific__exp_r4", "_gfortran_pow_r8_i4",
        "_gfortran_st_write", "_gfortran_string_index", "_gfortran_reshape_r4", "_gfortran_runtime_error",
    ],
)  # fmt: skip
def test_byte_moves_and_dispatched_calls_are_left_alone(name: str) -> None:
    assert not computes(name, OPERATORS)


@pytest.mark.parametrize(
    "name",
    ["_ZN2at6native5copy_ERNS_6TensorERKS1_b", "_ZN2at25compositeexplicitautograd5cloneERKNS_6TensorE", "scopy_",
     "cblas_dcopy", "_ZN6fbgemm20FloatToFloat16_avx2EPKfPtmb", "_gfortran_transpose_r4", "_gfortran_internal_pack",
     "_gfortran_cshift0_4"],
)  # fmt: skip
def test_what_copies_is_known_by_its_name(name: str) -> None:
    assert MOVING.match(name)
    assert not computes(name, OPERATORS)


@pytest.mark.parametrize("name", ["_ZN2at6native8copysignERKNS_6TensorE", "memcpy", "_ZN2at6native5fill_ERNS_6TensorE"])
def test_other_names_are_not_those_of_copies(name: str) -> None:
    assert not MOVING.match(name)


@pytest.mark.parametrize(
    "name",
    ["_init", "_fini", "blas_memory_alloc", "blas_thread_shutdown_", "exec_blas_async", "gotoblas_quit",
     "get_num_procs", "openblas_fork_handler", "scipy_openblas_get_config64_", "__xerbla", "scipy_cblas_xerbla64_",
     "scipy_scopy_64_", "scipy_cblas_zswap64_", "qcopy_k_HASWELL"],
)  # fmt: skip
def test_what_serves_a_blas_is_left_alone(name: str) -> None:
    assert SERVES.match(name)


@pytest.mark.parametrize(
    "name",
    ["scipy_cblas_ismax64_", "isamax_k_HASWELL", "iqmin_", "chemv_L_HASWELL", "sgbmv_thread_n", "qdot_k_HASWELL",
     "dlaswp_plus", "scipy_LAPACKE_cgetrf_work64_", "blas_level1_thread", "scipy_openblas"],
)  # fmt: skip
def test_all_else_of_a_blas_is_trapped(name: str) -> None:
    assert not SERVES.match(name)


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
MORE
static(a, a)
print("computed", flush=True)
"""


COPYING = """
import ctypes
from pathlib import Path
import torch
from pytest_klineage.worker.sandbox.refusal import FrameworkRefused, refuse_compute, refuse_copies
a = torch.arange(12.0).view(3, 4)
refuse_compute()
refuse_copies()
print(a[1:].t().shape == (4, 2), a.contiguous().to(torch.float32) is a, torch.tensor([[1.5]]).tolist(), sep="")
own = torch.empty(3, 4)
for function in (a.clone, a.t().contiguous, a.half, lambda: own.copy_(a), lambda: a.t().reshape(12),
                 lambda: torch.permute_copy(a, (1, 0)), lambda: own.untyped_storage().copy_(a.untyped_storage())):
    try:
        function()
        print("copied")
    except FrameworkRefused as error:
        print("refused" if "only moves bytes" in str(error) else str(error))
print("end", flush=True)
library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
getattr(library, "_ZN2at6native5copy_ERNS_6TensorERKS1_b")(0, 0, 0)
"""


def test_copies_are_refused_where_they_are_all_of_the_work() -> None:
    out = subprocess.run([sys.executable, "-c", COPYING], capture_output=True, text=True, timeout=120, check=False)
    assert out.stdout.split("\n")[:-1] == ["TrueTrue[[1.5]]", *["refused"] * 7, "end"], out.stderr
    assert out.returncode == -signal.SIGILL


DROPPED = """
from pathlib import Path
for line in Path("/proc/self/maps").read_text().splitlines():
    low, high = (int(end, 16) for end in line.split()[0].split("-"))
    if "libtorch_cpu" in line or "klineage-code" in line:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), 4 if " r-x" in line else 0)
"""


@pytest.mark.parametrize("more", ["", DROPPED], ids=["at-once", "after-dropping-pages"])
def test_the_static_runtime_crashes_where_it_would_compute(more: str) -> None:
    assert crashed(SCRIPT.replace("MORE", more))


BEHIND = """
library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
product = getattr(library, "_ZN2at6native21structured_mm_out_cpu4implERKNS_6TensorES4_S4_")
ctypes.CFUNCTYPE(None)(ctypes.cast(product, ctypes.c_void_p).value + 8)()
"""


def test_behind_a_functions_beginning_there_are_traps() -> None:
    assert crashed(SCRIPT.replace("MORE", "from pathlib import Path" + BEHIND))


FORKED = """
import os, signal
import torch
from pytest_klineage.records.messages import Job
from pytest_klineage.worker.mappings import foreign_code, mappings_of
from pytest_klineage.worker.sandbox import refusal
graph = torch._C.parse_ir("graph(%a : Tensor, %b : Tensor):\\n  %c : Tensor = aten::mm(%a, %b)\\n  return (%c)")
static = torch._C._jit_to_static_module(graph)
a = torch.ones(8, 8, dtype=torch.bfloat16)
refusal.prepare(unmasking=True, copies=True)
before = mappings_of(os.getpid())
ready, done = os.pipe(), os.pipe()
worker = os.fork()
if worker == 0:
    refusal.refuse_compute(unmasking=True)
    refusal.refuse_copies(unmasking=True)
    kept = refusal.keep_traps(unmasking=True, may_filter=True)
    os.write(ready[1], b"x")
    os.read(done[0], 1)
    print("kept" if kept else "open", torch.arange(3).tolist(), flush=True)
    static(a, a)
    os._exit(0)
os.read(ready[0], 1)
job = Job(surface="python", workdir="/tmp/private")
print(foreign_code(mappings_of(worker), before, job).libraries, float(static(a, a)[0, 0]), flush=True)
os.write(done[1], b"x")
print(os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGILL)
"""


def test_prepared_traps_are_set_in_workers_alone() -> None:
    out = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert out.stdout.splitlines() == ["() 8.0", "kept [0, 1, 2]", "True"], out.stderr


def test_without_files_in_memory_pages_are_changed() -> None:
    assert crashed("import os\ndel os.memfd_create\n" + SCRIPT.replace("MORE", ""))


def crashed(script: str) -> bool:
    """Whether a script refuses, copies, and ends at a trap then."""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert out.stdout.split() == ["refused", "1.0"], out.stderr
    return out.returncode == -signal.SIGILL
