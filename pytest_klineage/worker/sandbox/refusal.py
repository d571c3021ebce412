"""Making the framework's computing operations raise, process-wide, so that a wrapper around the framework shows.

Every operator gets CPU and CUDA implementations that raise, except allocation, views, copies and type glue. The
override sits in the dispatcher, so it also holds in other threads and for calls from C++. It does not hold for whoever
calls a function of the framework's library directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import warnings
from pathlib import Path
from typing import Any

GLUE = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "ones",
        "full",
        "full_like",
        "new_zeros",
        "new_full",
        "scalar_tensor",
        "arange",
        "view",
        "_unsafe_view",
        "as_strided",
        "as_strided_",
        "reshape",
        "_reshape_alias",
        "transpose",
        "transpose_",
        "t",
        "t_",
        "permute",
        "expand",
        "expand_as",
        "squeeze",
        "unsqueeze",
        "slice",
        "select",
        "narrow",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "diagonal",
        "alias",
        "detach",
        "detach_",
        "lift",
        "lift_fresh",
        "movedim",
        "flatten",
        "unflatten",
        "copy_",
        "_to_copy",
        "to",
        "clone",
        "contiguous",
        "zero_",
        "fill_",
        "set_",
        "resize_",
        "item",
        "_local_scalar_dense",
        "is_pinned",
        "pin_memory",
        "stride",
        "size",
        "numel",
        "dim",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "is_contiguous",
        "storage_offset",
        "unfold",
        "real",
        "view_as_real",
        "view_as_complex",
        "view_as",
        "squeeze_",
        "unsqueeze_",
        "swapaxes",
        "atleast_1d",
        "atleast_2d",
        "_conj",
        "conj",
        "resolve_conj",
        "resolve_neg",
        "equal",
        "copy",
        # By which inputs are unmasked on a GPU.
        "bitwise_xor",
        "bitwise_xor_",
    ]
)
"""Operators that move or make tensors and compute nothing."""
KEYS = (
    "CPU", "MkldnnCPU", "SparseCPU", "SparseCsrCPU", "QuantizedCPU", "NestedTensorCPU",
    "CUDA", "SparseCUDA", "SparseCsrCUDA", "QuantizedCUDA", "NestedTensorCUDA",
)  # fmt: skip
"""Where the dispatcher keeps implementations for CPUs and GPUs: by the layout of the tensors."""
DIRECT = frozenset(["_nnpack_spatial_convolution", "_grid_sampler_2d_cpu_fallback"])
"""Operators that are declared as composed of others and yet compute themselves."""


class FrameworkRefused(RuntimeError):
    """A computing operation of the framework was called where only the candidate's own kernel may compute."""


def refuse_compute() -> None:
    """Replace the CPU and CUDA implementations of every computing operator in this process. There is no way back."""
    import torch

    libraries: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(set(torch._C._dispatch_get_all_op_names())):
            namespace, _, rest = name.partition("::")
            plain = rest.partition(".")[0]
            if plain in GLUE:
                continue
            for key in KEYS:
                if not (has_kernel(name, key) or (key == "CPU" and plain in DIRECT)):
                    continue
                if namespace not in libraries:
                    make: Any = torch.library.Library  # torch has no types here
                    libraries[namespace] = make(namespace, "IMPL")
                # One that somebody else has replaced from Python already calls operators that are refused.
                with contextlib.suppress(RuntimeError):
                    libraries[namespace].impl(rest, refuser(name), key)
    trap_blas()
    # The registrations end with the library objects; they must live as long as the process.
    setattr(torch, "_klineage_refusal", libraries)  # noqa: B010  # mypy knows no such attribute


def trap_blas() -> None:
    """Overwrite the entry points of the BLAS that the framework brings, so that calling one by its symbol crashes.

    The pages are this process's own copies; nobody else sees the change. Without effect where the symbols are hidden.
    """
    trap = {"x86_64": b"\x0f\x0b", "aarch64": b"\x00\x00\x00\x00"}.get(platform.machine())  # ud2, udf #0
    if trap is None:
        return
    process, libc = ctypes.CDLL(None), ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    for path in framework_libraries():
        library = ctypes.CDLL(path)
        for name in BLAS_NAMES:
            for handle in (library, process):
                with contextlib.suppress(AttributeError):
                    address = ctypes.cast(getattr(handle, name), ctypes.c_void_p).value or 0
                    start, length = address & -page, (address & (page - 1)) + len(trap)
                    writable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
                    if libc.mprotect(ctypes.c_void_p(start), length, writable) == 0:
                        ctypes.memmove(address, trap, len(trap))
                        libc.mprotect(ctypes.c_void_p(start), length, mmap.PROT_READ | mmap.PROT_EXEC)


def framework_libraries() -> list[str]:
    """The framework's shared libraries that may export a BLAS."""
    import torch

    return sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu*.so*"))


def blas_names() -> list[str]:
    """Names under which a BLAS exports its products: Fortran's and C's, all four types."""
    products = (
        "gemm",
        "gemv",
        "ger",
        "symm",
        "symv",
        "syrk",
        "trmm",
        "trsm",
        "dot",
        "axpy",
        "gemm3m",
        "gemmt",
        "gemm_batch",
    )
    names = [f"{kind}{product}" for kind in "sdcz" for product in products]
    fortran = [form for name in names for form in (name, f"{name}_", name.upper(), f"{name.upper()}_", f"{name}_64_")]
    return [*fortran, *(f"cblas_{name}" for name in names), *(f"cblas_{name}_64" for name in names), "dnnl_sgemm"]


BLAS_NAMES = blas_names()


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator is implemented under this key itself, rather than composed of others."""
    import torch

    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def refuser(name: str) -> Any:
    """A function that refuses one operator by name."""

    def refuse(*_arguments: object, **_named: object) -> None:
        raise FrameworkRefused(f'{name} was called; this case asks for a kernel of its own (library="forbid")')

    return refuse
