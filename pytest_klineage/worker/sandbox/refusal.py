"""Making the framework's computing operations raise, process-wide, so that a wrapper around the framework shows.

Every operator gets CPU and CUDA implementations that raise, except allocation, views, copies and type glue. The
override sits in the dispatcher, so it also holds in other threads and for calls from C++. Whoever calls a function of
the framework's library directly meets a trap (traps.py).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

from pytest_klineage.worker.traps import Operators, places, set_traps

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
        # Says which of several implementations will be called.
        "_fused_sdp_choice",
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
DIRECT = frozenset([
    "_nnpack_spatial_convolution", "_grid_sampler_2d_cpu_fallback", "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation", "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation", "fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix",
    "fbgemm_linear_quantize_weight",
])  # fmt: skip
"""Operators that are declared as composed of others and yet compute themselves."""


class FrameworkRefused(RuntimeError):
    """A computing operation of the framework was called where only the candidate's own kernel may compute."""


def refuse_compute() -> None:
    """Replace the CPU and CUDA implementations of every computing operator in this process. There is no way back."""
    import torch

    names, libraries = trapped_names(), dict[str, Any]()
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
    set_traps(names)
    # The registrations end with the library objects; they must live as long as the process.
    setattr(torch, "_klineage_refusal", libraries)  # noqa: B010  # mypy knows no such attribute


@functools.cache
def trapped_names() -> Operators:
    """The operators as they are before any is replaced. One that is made of others calls those, which say why not."""
    import torch

    names = set(torch._C._dispatch_get_all_op_names())

    def having(*keys: str) -> set[str]:
        return {plain_name(name) for name in names if any(has_kernel(name, key) for key in keys)}

    made = having("CompositeImplicitAutograd") - having("CPU") - DIRECT
    harmless = frozenset(name.rstrip("_") for name in GLUE) | GLUE | made
    # Of any operator there is an overload with a destination that only copies.
    names = {name for name in names if not name.endswith("out")}
    composed = having("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return Operators(frozenset(having(*KEYS) | DIRECT) - harmless, frozenset(composed), harmless)


def plain_name(name: str) -> str:
    """An operator without namespace and overload: add of aten::add.Tensor."""
    return name.partition("::")[2].partition(".")[0]


def prepare() -> None:
    """Find what will be trapped before workers are forked, each of which would look for itself."""
    places(trapped_names())


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator is implemented under this key itself, rather than composed of others."""
    import torch

    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def refuser(name: str) -> Any:
    """A function that refuses one operator by name."""

    def refuse(*_arguments: object, **_named: object) -> None:
        raise FrameworkRefused(f'{name} was called; this case asks for a kernel of its own (library="forbid")')

    return refuse
