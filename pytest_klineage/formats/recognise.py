"""From one call of a known function on tensors to a case of ours, where there is one. What differs is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pytest_klineage.errors import UsageError
from pytest_klineage.formats.symbols import Applied, Layer, NotStatic, Part, Tensor, Value
from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelCase

CONV_DEFAULTS: dict[str, Value] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


class Found(NamedTuple):
    """A case, and whose argument each of its inputs is."""

    case: KernelCase
    inputs: dict[str, str]
    """By our name of an input: the function's argument, or the parameter of a module, as in "conv.weight"."""
    notes: tuple[str, ...] = ()


def recognised(result: Value, reference: str) -> Found:
    """The case that computes a result. Raises NotStatic, which says what is in the way."""
    applied = _whole(result)
    kinds = {
        "torch.matmul": _gemm, "torch.mm": _gemm, "torch.topk": _topk, "torch.nn.Conv2d": _conv_layer,
        "torch.conv2d": _conv, "torch.nn.functional.conv2d": _conv,
        "torch.nn.functional.scaled_dot_product_attention": _fmha,
    }  # fmt: skip
    try:
        return kinds[applied.function](applied.arguments, reference)
    except UsageError as error:
        if isinstance(error, NotStatic):
            raise
        raise NotStatic(0, str(error)) from error


def _whole(result: Value) -> Applied:
    """The call behind a result: itself, or all of its parts in order, as a tuple or by name."""
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, tuple) and len(result) == 1:
        result = result[0]
    if isinstance(result, Applied):
        return result
    if isinstance(result, tuple) and result and all(isinstance(item, Part) for item in result):
        parts = [item for item in result if isinstance(item, Part)]
        if [part.index for part in parts] == [0, 1] and parts[0].whole == parts[1].whole:
            return parts[0].whole
    raise NotStatic(0, "what is returned is not the result of one known function")


def _gemm(given: Mapping[str, Value], reference: str) -> Found:
    a, b = _tensor(given, "input"), _tensor(given, "other")
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise NotStatic(0, f"a product of {len(a.shape)} and {len(b.shape)} dimensions; gemm here has two matrices")
    if a.shape[1] != b.shape[0]:
        raise NotStatic(0, f"matrices of {list(a.shape)} and {list(b.shape)} have no product")
    case = make_case("gemm", (a.shape[0], b.shape[1], a.shape[1]), _one_type(a, b), reference)
    return Found(case, {"a": a.name, "b": b.name})


def _topk(given: Mapping[str, Value], reference: str) -> Found:
    x, k = _tensor(given, "input"), given.get("k")
    if len(x.shape) != 2 or type(k) is not int:
        raise NotStatic(0, "topk here is of the rows of one matrix, with a known k")
    if given.get("dim", -1) not in (-1, 1) or given.get("largest", True) is not True:
        raise NotStatic(0, "topk here takes the largest of every row")
    notes = ("any order of the k largest is right here",) if given.get("sorted", True) else ()
    return Found(make_case("topk", (*x.shape, k), _one_type(x), reference), {"x": x.name}, notes)


def _fmha(given: Mapping[str, Value], reference: str) -> Found:
    q, k, v = (_tensor(given, name) for name in ("query", "key", "value"))
    if len(q.shape) != 4 or q.shape != k.shape or q.shape != v.shape:
        raise NotStatic(0, "fmha here has q, k and v of one shape [B,H,S,D]")
    plain = given.get("attn_mask") is None and given.get("scale") is None
    if not plain or given.get("dropout_p", 0.0) != 0.0:
        raise NotStatic(0, "fmha here has no mask, no dropout and the scale 1/sqrt(D)")
    causal = given.get("is_causal", False)
    if not isinstance(causal, bool) or given.get("enable_gqa", False):
        raise NotStatic(0, "is_causal must be known, and heads are as many on both sides")
    case = make_case("fmha", q.shape, _one_type(q, k, v), reference, causal=causal)
    return Found(case, {"q": q.name, "k": k.name, "v": v.name})


def _conv_layer(given: Mapping[str, Value], reference: str) -> Found:
    x, layer = _tensor(given, "input"), given["layer"]
    if not isinstance(layer, Layer):
        raise NotStatic(0, "a layer that is not known")
    settings = layer.settings
    if settings.get("bias", True) is not False or settings.get("padding_mode", "zeros") != "zeros":
        raise NotStatic(0, "conv2d here has no bias, and pads with zeros: the problem must say bias=False")
    if settings.get("dtype") is not None:
        raise NotStatic(0, "a layer with a type of its own")
    channels, filters = settings.get("in_channels"), settings.get("out_channels")
    size = _square(settings.get("kernel_size"), "kernel_size")
    if type(channels) is not int or type(filters) is not int:
        raise NotStatic(0, "channels and filters must be known")
    weight = Tensor(f"{layer.attribute}.weight", (filters, channels, size, size), x.dtype)
    return _convolution(x, weight, settings, reference)


def _conv(given: Mapping[str, Value], reference: str) -> Found:
    if given.get("bias") is not None:
        raise NotStatic(0, "conv2d here has no bias")
    return _convolution(_tensor(given, "input"), _tensor(given, "weight"), given, reference)


def _convolution(x: Tensor, w: Tensor, settings: Mapping[str, Value], reference: str) -> Found:
    if len(x.shape) != 4 or len(w.shape) != 4 or x.shape[1] != w.shape[1] or w.shape[2] != w.shape[3]:
        raise NotStatic(0, "conv2d here has images [N,C,H,W], square filters [F,C,K,K], and one group")
    known = {**CONV_DEFAULTS, **{name: settings[name] for name in CONV_DEFAULTS if name in settings}}
    stride, pad, dilation = (_square(known[name], name) for name in ("stride", "padding", "dilation"))
    if dilation != 1 or known["groups"] != 1:
        raise NotStatic(0, "conv2d here has neither dilation nor groups")
    n, c, height, width = x.shape
    case = make_case("conv2d", (n, c, height, width, w.shape[0], w.shape[2], stride, pad), _one_type(x, w), reference)
    return Found(case, {"x": x.name, "w": w.name})


def _tensor(given: Mapping[str, Value], name: str) -> Tensor:
    found = given.get(name)
    if not isinstance(found, Tensor):
        raise NotStatic(0, f"{name} is not an input as it was given: another function has changed it")
    return found


def _one_type(*tensors: Tensor) -> str:
    types = sorted({tensor.dtype for tensor in tensors})
    if len(types) > 1:
        raise NotStatic(0, f"inputs of several types: {', '.join(types)}")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise NotStatic(0, "one input in two places")
    return types[0]


def _square(value: Value, name: str) -> int:
    """A size that is the same in both directions."""
    sizes = value if isinstance(value, tuple) else (value, value)
    first = sizes[0] if sizes else None
    if type(first) is int and len(sizes) == 2 and sizes[1] == first:
        return first
    raise NotStatic(0, f"conv2d here has the same {name} in both directions, as a number")
