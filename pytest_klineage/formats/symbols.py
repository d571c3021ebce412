"""Values that foreign code comes to without being executed: constants, tensors of known shape, results of calls."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pytest_klineage.errors import UsageError


class Tensor(msgspec.Struct, frozen=True):
    """A tensor that a function is given, or that a problem makes."""

    name: str
    """The argument that it is; empty before it is bound to one."""
    shape: tuple[int, ...]
    dtype: str
    """A short name, such as "fp32"."""


class Dotted(msgspec.Struct, frozen=True):
    """Something of a package, by its full name, such as "torch.nn.functional.conv2d"."""

    name: str


class Layer(msgspec.Struct, frozen=True):
    """A module with weights: what makes it, and the attribute that holds it."""

    kind: str
    settings: dict[str, Value]
    attribute: str = ""


class Applied(msgspec.Struct, frozen=True):
    """The result of one known function."""

    function: str
    """Full name, such as "torch.matmul"."""
    arguments: dict[str, Value]


class Part(msgspec.Struct, frozen=True):
    """One of several results."""

    whole: Applied
    index: int


Constant: TypeAlias = int | float | bool | str | None
Value: TypeAlias = "Constant | tuple[Value, ...] | dict[str, Value] | Tensor | Dotted | Layer | Applied | Part"


class NotStatic(UsageError):
    """Code whose value is not known without executing it, or that this reader does not know."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}" if line else what)


DTYPES = {
    "torch.float64": "fp64", "torch.double": "fp64", "torch.float32": "fp32", "torch.float": "fp32",
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "torch.int64": "int64",
    "torch.long": "int64", "torch.int32": "int32", "torch.int": "int32",
}  # fmt: skip
CASTS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}
"""Methods of a tensor that change its type."""
SAME = frozenset({"contiguous", "cuda", "cpu", "detach", "clone", "requires_grad_"})
"""Methods whose result is the same tensor, as far as a case goes."""
RANDOM = frozenset({"torch.rand", "torch.randn"})
"""Functions that make a tensor of a shape. Which numbers are in it is the operator's business here."""
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "torch.matmul": ("input", "other"),
    "torch.mm": ("input", "other"),
    "torch.topk": ("input", "k", "dim", "largest", "sorted"),
    "torch.conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "torch.nn.functional.conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "torch.nn.functional.scaled_dot_product_attention": (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ),
}  # fmt: skip
"""By full name, the parameters of functions that an operator here stands for."""
LAYERS: dict[str, tuple[str, ...]] = {
    "torch.nn.Conv2d": (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias",
        "padding_mode", "device", "dtype",
    ),
}  # fmt: skip
METHODS = {"matmul": "torch.matmul", "mm": "torch.mm", "topk": "torch.topk"}
"""Methods of a tensor that are such functions."""
