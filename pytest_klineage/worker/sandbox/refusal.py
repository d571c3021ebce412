"""Making the framework's computing operations raise, process-wide, so that a wrapper around the framework shows.

Every operator gets CPU and CUDA implementations that raise, except allocation, views, copies and type glue; where a
definition only moves bytes, copies raise too. The override sits in the dispatcher, so it also holds in other threads
and for calls from C++. A direct call of a function of the framework's library meets a trap (traps.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from typing import Any

from pytest_klineage.worker.sandbox import whole_numbers
from pytest_klineage.worker.sandbox.kept_ranges import keep
from pytest_klineage.worker.traps import Operators, code_ranges, prepared, set_traps

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
        "copy",
        # Says which of several implementations will be called.
        "_fused_sdp_choice",
    ]
)
"""Operators that move or make tensors and compute nothing."""
UNMASKING = frozenset({"bitwise_xor", "bitwise_xor_"})
"""By these the gate unmasks inputs in a candidate's process on a GPU; CPU tensors are refused them."""
COPIES = frozenset({"copy_", "_to_copy", "clone", "copy"})
"""By these every copy and every cast is made in the end, also contiguous() and to()."""
KEYS = (
    "CPU", "MkldnnCPU", "SparseCPU", "SparseCsrCPU", "QuantizedCPU", "NestedTensorCPU",
    "CUDA", "SparseCUDA", "SparseCsrCUDA", "QuantizedCUDA", "NestedTensorCUDA",
)  # fmt: skip
"""Where the dispatcher keeps implementations for CPUs and GPUs: by the layout of the tensors."""
LAZY_KEYS = ("Conjugate", "Negative")
"""Marks of views whose numbers the next copy makes negative, which is computing. Every clone and cast ends in copy_."""
DIRECT = frozenset([
    "_nnpack_spatial_convolution", "_grid_sampler_2d_cpu_fallback", "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation", "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation", "fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix",
    "fbgemm_linear_quantize_weight", "_saturate_weight_to_fp16", "_rowwise_prune", "choose_qparams_optimized",
    "_sobol_engine_ff_", "_sobol_engine_draw", "_sobol_engine_scramble_", "_sobol_engine_initialize_state_",
])  # fmt: skip
"""Operators that are declared as composed of others and yet compute themselves."""


IN_FORCE: list[bool] = []
"""Not empty once this process refuses."""
COPIED: list[bool] = []
"""Not empty once it refuses copies as well."""
COPIES_REFUSED = 'the definition only moves bytes or casts; a kernel of its own (library="forbid") does that itself'
REFUSED: set[str] = set()
"""Operators that were called in this process and refused, also where a candidate caught what they raised."""


class FrameworkRefused(RuntimeError):
    """A computing operation of the framework was called where only the candidate's own kernel may compute."""


def refuse_compute(*, unmasking: bool = False) -> None:
    """Replace the CPU and CUDA implementations of every computing operator in this process. There is no way back.

    `unmasking` leaves what unmasks inputs on a GPU. A second call does nothing: a template's workers inherit this.
    """
    import torch

    if IN_FORCE:
        return
    IN_FORCE.append(True)
    names, libraries = trapped_names(unmasking), dict[str, Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(set(torch._C._dispatch_get_all_op_names())):
            namespace, _, rest = name.partition("::")
            for key in refused_keys(name, unmasking):
                if namespace not in libraries:
                    libraries[namespace] = immortal_library(namespace)
                # One that somebody else has replaced from Python already calls operators that are refused.
                with contextlib.suppress(RuntimeError):
                    libraries[namespace].impl(rest, key, replacement(name), False)
    set_traps(names)


def refuse_copies(*, unmasking: bool = False) -> None:
    """Have copies and casts raise as well, for a definition that does nothing else. There is no way back."""
    import torch

    if COPIED:
        return
    COPIED.append(True)
    library = immortal_library("aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(set(torch._C._dispatch_get_all_op_names())):
            if name.startswith("aten::") and plain_name(name) in COPIES:
                with contextlib.suppress(RuntimeError):
                    library.impl(name.partition("::")[2], "CPU", refuser(name, COPIES_REFUSED), False)
    set_traps(trapped_names(unmasking), moving=True)


def keep_traps(*, unmasking: bool, may_filter: bool) -> list[str]:
    """Have no call map other code over the traps. Returns what sees to that."""
    return keep(code_ranges(trapped_names(unmasking)), may_filter=may_filter)


def immortal_library(namespace: str) -> Any:
    """Registrations that nothing ends and Python cannot reach once the caller drops them.

    They end with their object. torch.library.Library would keep it where weakref and its own methods find it; this one
    is a bare C++ object, which the garbage collector does not list, with one reference too many.
    """
    import torch

    library: Any = torch._C._dispatch_library("IMPL", namespace, "", __file__, 0)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(library))
    return library


def refused_keys(name: str, unmasking: bool) -> list[str]:
    """Under which keys an operator is to raise: none for glue but copies that change signs."""
    plain = plain_name(name)
    if plain in GLUE:
        return list(LAZY_KEYS) if name == "aten::copy_" else []
    keys = [key for key in KEYS if has_kernel(name, key) or (key == "CPU" and plain in DIRECT)]
    left = name == whole_numbers.OPERATOR or (unmasking and plain in UNMASKING)
    return [key for key in keys if not (left and key == "CUDA")]


def replacement(name: str) -> Any:
    """What takes an operator's place: nothing but a refusal, except where whole numbers are only written down."""
    if name == whole_numbers.OPERATOR:
        return whole_numbers.stand_in(refuser(name, whole_numbers.REFUSED))
    return refuser(name)


@functools.cache
def trapped_names(unmasking: bool) -> Operators:
    """The operators as they are before any is replaced. One that is made of others calls those, which say why not."""
    import torch

    names = set(torch._C._dispatch_get_all_op_names())

    def having(*keys: str) -> set[str]:
        return {plain_name(name) for name in names if any(has_kernel(name, key) for key in keys)}

    made = having("CompositeImplicitAutograd") - having("CPU") - DIRECT
    harmless = frozenset(name.rstrip("_") for name in GLUE) | GLUE | made
    # Its machine code is the same for both devices.
    harmless |= UNMASKING if unmasking else frozenset()
    # Of any operator there is an overload with a destination that only copies.
    names = {name for name in names if not name.endswith("out")}
    composed = having("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return Operators(frozenset(having(*KEYS) | DIRECT) - harmless, frozenset(composed), harmless)


def plain_name(name: str) -> str:
    """An operator without namespace and overload: add of aten::add.Tensor."""
    return name.partition("::")[2].partition(".")[0]


def prepare(*, unmasking: bool, copies: bool) -> None:
    """Make the traps that are not set yet before workers are forked, each of which would make its own."""
    names = trapped_names(unmasking)
    if not IN_FORCE:
        prepared(names, False)
    if copies:
        prepared(names, True)


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator is implemented under this key itself, rather than composed of others."""
    import torch

    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def refuser(name: str, why: str = 'this case asks for a kernel of its own (library="forbid")') -> Any:
    """A function that refuses one operator by name."""

    def refuse(*_arguments: object, **_named: object) -> None:
        REFUSED.add(name)
        raise FrameworkRefused(f"{name} was called; {why}")

    return refuse
