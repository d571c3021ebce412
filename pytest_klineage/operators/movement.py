"""Whether a definition only moves or truncates numbers, so that a framework's copies and casts are all of its work: by
what it calls, or by what it gives on several problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors

CAST = "_to_copy"
"""An operator of the framework that converts elements to another type."""
MOVES = frozenset({
    CAST, "clone", "copy", "copy_", "lift_fresh", "cat", "stack", "repeat", "flip", "roll", "rot90", "tril",
    "triu", "constant_pad_nd", "index", "index_select", "index_copy", "gather", "take", "embedding", "empty",
    "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "ones", "full", "full_like", "fill_", "zero_",
    "arange", "_unsafe_view", "select_scatter", "slice_scatter", "diagonal_scatter", "where", "masked_fill",
    "masked_fill_", "masked_select", "masked_scatter", "masked_scatter_", "repeat_interleave", "new_ones", "new_full",
    "scalar_tensor", "trunc",
})  # fmt: skip
"""Operators of the framework that make, move, convert or repeat elements, beside its views; a cast truncates."""
COMPARES = frozenset({
    "sort.stable", "argsort.stable", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "any", "all", "logical_and",
    "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "amax",
    "amin", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "neg", "abs", "searchsorted", "bucketize",
    "argmax", "argmin", "max", "min",
})  # fmt: skip
"""Operators that round nothing and say which of several equal numbers they mean."""
PAIRS = (COMPARES - {"isnan", "isinf", "bucketize"}) | {"add", "sub", "rsub"}
"""Of integers, those that put two together, so that there is room for the result."""
STEPS = frozenset({"round", "floor", "ceil", "trunc", "frac", "fmod", "remainder", "floor_divide"})
"""Operators with steps at whole numbers, or at multiples of one."""
OPEN_TIES = frozenset({"topk", "sort", "argsort", "kthvalue", "mode", "median", "nanmedian"})
"""Those that return indices and leave open which one, where elements are equal; a stable sort does not."""
SAMPLES = 16
"""Elements of an output that must occur among the inputs before all are looked for."""
MIX = 0x2545F4914F6CDD1D
"""An odd number: multiplying by it loses nothing of 64 bits."""


@contextmanager
def recording(names: set[str]) -> Iterator[None]:
    """Add the name of every operator of the framework that is called inside to `names`; views are left out."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own has no annotations
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not function.is_view:
                stable = bool((kwargs or {}).get("stable"))
                name = function.overloadpacket.__name__
                names.add(f"{name}{'.stable' * stable}")
                if name in ("copy", "copy_") and args[0].dtype != args[1].dtype:
                    names.add(CAST)
            return function(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]  # as above
        yield


def is_rearrangement(problems: Sequence[tuple[Tensors, Tensors]]) -> bool:
    """Whether every output element is one and the same input element in all problems, or constant; not all constant.

    `problems` are inputs and exact outputs. A maximum is an input element as well, but not always the same one. Where
    two elements cannot be distinguished, which element was copied is not known, and nothing is claimed.
    """
    import torch

    if len(problems) < 2 or not all(occurs(tensor, problems[0][0]) for tensor in samples(problems)):
        return False
    known = torch.cat([keys([inputs[name] for inputs, _ in problems]) for name in problems[0][0]]).sort().values
    moved = 0
    for name, tensor in problems[0][1].items():
        every = [outputs[name].reshape(-1) for _, outputs in problems]
        wanted = keys(every)
        count = torch.searchsorted(known, wanted, right=True) - torch.searchsorted(known, wanted)
        constant = torch.ones(tensor.numel(), dtype=torch.bool)
        for other in every[1:]:
            constant &= other == every[0]
        if not bool(((count == 1) | constant).all()):
            return False
        moved += int((~constant).sum())
    return moved > 0


def is_truncation(problems: Sequence[tuple[Tensors, Tensors]]) -> bool:
    """Whether every output element is one and the same input element without its fraction, or constant, in all."""
    if len(problems) < 2 or not all(is_whole(one) for one in samples(problems)):
        return False
    first = without_fractions(problems[0][0])
    if not all(occurs(one, first) for one in samples(problems)):
        return False
    return is_rearrangement([(without_fractions(inputs), outputs) for inputs, outputs in problems])


def is_cast(problems: Sequence[tuple[Tensors, Tensors]], types: Mapping[str, torch.dtype]) -> bool:
    """Whether every output is an input, or its axes in another order, cast to the output's type, in all problems.

    A cast to booleans compares with zero, one to fewer bits takes a remainder.
    """
    return len(problems) > 1 and all(
        any(
            all(same_cast(inputs[key].permute(order), outputs[name], dtype) for inputs, outputs in problems)
            for key, tensor in problems[0][0].items()
            for order in permutations(range(tensor.dim()))
            if tensor.permute(order).shape == problems[0][1][name].shape
        )
        for name, dtype in types.items()
    )


def same_cast(given: torch.Tensor, answer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether both are the same in this type; of 8-bit floats, which cannot be compared, nothing is claimed."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return False
    return bool((given.to(dtype) == answer.to(dtype)).all())


def is_whole(element: torch.Tensor) -> bool:
    """Whether an element has no fraction."""
    return not element.is_floating_point() or bool(element == element.trunc())


def without_fractions(tensors: Tensors) -> Tensors:
    """Floats as whole numbers in float64; others as they are."""
    return {name: tensor.double().trunc() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def samples(problems: Sequence[tuple[Tensors, Tensors]]) -> Iterator[torch.Tensor]:
    """Some elements of every output of the first problem, of those that are not the same in the second."""
    import torch

    for name, tensor in problems[0][1].items():
        flat = tensor.reshape(-1)
        some = torch.linspace(0, max(0, flat.numel() - 1), min(SAMPLES, flat.numel())).long()
        yield from flat[some][flat[some] != problems[1][1][name].reshape(-1)[some]]


def occurs(element: torch.Tensor, inputs: Tensors) -> bool:
    """Whether an input has an element of exactly this value."""
    return any(
        bool((tensor == element.to(tensor.dtype)).any())
        for tensor in inputs.values()
        if bool(element.to(tensor.dtype).to(element.dtype) == element)
    )


def keys(draws: Sequence[torch.Tensor]) -> torch.Tensor:
    """For every element a number that its values in all draws give; of unlike ones they are unlike, but for chance."""
    import torch

    found = torch.zeros(draws[0].numel(), dtype=torch.int64, device=draws[0].device)
    for tensor in draws:
        # Adding zero makes one of both zeros.
        found = found * MIX + (tensor.reshape(-1).double() + 0.0).view(torch.int64)
    return found
