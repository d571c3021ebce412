"""The line that describes an operator's tensors: "inout x[M,N], w[N]: fp32, idx[T]: int64 < V -> y[M,N]".

Tensors are separated by commas, outputs stand after "->". A dimension is an axis, a number, or a formula over axes
and options, such as (H + 2*pad - K)//stride + 1. A tensor without a type has the case's. "< V" bounds what an integer
input holds: 0 to V - 1.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.records import DTYPES, TensorSpec
from pytest_klineage.records.signature import dense

TENSOR = re.compile(
    r"(?P<inout>inout\s+)?(?P<name>[A-Za-z_]\w*)\s*\[(?P<dims>[^\]]*)\]"
    r"(?:\s*:\s*(?P<dtype>\w+))?(?:\s*<\s*(?P<below>[^<>]+))?"
)
EXAMPLE = 'written like "x[M,N], w[N]: fp32 -> y[M,N]"'
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
}
"""What a formula may be made of."""


@dataclass(frozen=True)
class Formula:
    """A whole number that depends on sizes, such as 2*N."""

    text: str
    tree: ast.expr

    @property
    def axis(self) -> str:
        """The axis that it is, or nothing when it is a number or a formula."""
        return self.tree.id if isinstance(self.tree, ast.Name) else ""

    @property
    def names(self) -> tuple[str, ...]:
        """Axes and options in it, in the order of the text."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        return tuple(node.id for node in sorted(found, key=lambda node: node.col_offset))

    def value(self, sizes: Mapping[str, float]) -> int:
        """Its value for these sizes."""
        return evaluate(self.tree, sizes)


@dataclass(frozen=True)
class TensorPattern:
    """One tensor of the line."""

    name: str
    dims: tuple[Formula, ...]
    dtype: str
    """Empty for the case's own."""
    inout: bool
    below: Formula | None
    """What an integer input stays under."""

    def spec(self, sizes: Mapping[str, float], dtype: str) -> TensorSpec:
        """The tensor at these sizes. Raises UsageError for a dimension below one."""
        shape = tuple(dim.value(sizes) for dim in self.dims)
        for dim, size in zip(self.dims, shape, strict=True):
            if size < 1:
                raise UsageError(f"{self.name} has the size {dim.text} = {size}; it must be 1 at least")
        return dense(self.name, self.dtype or dtype, *shape)


@dataclass(frozen=True)
class SignatureLine:
    """All tensors, in the order of the text."""

    text: str
    inputs: tuple[TensorPattern, ...]
    outputs: tuple[TensorPattern, ...]
    """Those with memory of their own."""

    @property
    def results(self) -> tuple[TensorPattern, ...]:
        """What the definition returns, in order: new contents of inout tensors, then the outputs."""
        return (*(tensor for tensor in self.inputs if tensor.inout), *self.outputs)

    @property
    def names(self) -> tuple[str, ...]:
        """Axes and options in all dimensions, in the order in which they first appear."""
        dims = [dim for tensor in (*self.inputs, *self.outputs) for dim in tensor.dims]
        bounds = [tensor.below for tensor in self.inputs if tensor.below is not None]
        return _names(*dims, *bounds)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Axes and options in dimensions and bounds of inputs."""
        bounds = [tensor.below for tensor in self.inputs if tensor.below is not None]
        dims = [dim for tensor in self.inputs for dim in tensor.dims]
        return _names(*dims, *bounds)

    @property
    def bare(self) -> frozenset[str]:
        """Axes that are a dimension by themselves."""
        return frozenset(dim.axis for tensor in (*self.inputs, *self.outputs) for dim in tensor.dims) - {""}


def _names(*formulas: Formula) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for item in formulas for name in item.names))


def parse_signature(text: str) -> SignatureLine:
    """Read the line. Raises UsageError, which says what is wrong with which part."""
    if not text.strip():
        raise UsageError(f"the signature is a string, {EXAMPLE}, got {text!r}")
    left, arrow, right = text.partition("->")
    inputs = tuple(_tensor(part, text) for part in _parts(left))
    outputs = tuple(_tensor(part, text) for part in _parts(right)) if arrow else ()
    if not inputs:
        raise UsageError(f"the signature {text!r} has no inputs; it is {EXAMPLE}")
    if not outputs and not any(tensor.inout for tensor in inputs):
        raise UsageError(f"the signature {text!r} has neither outputs after '->' nor inout tensors; it is {EXAMPLE}")
    for tensor in outputs:
        if tensor.inout or tensor.below is not None:
            raise UsageError(f"in {text!r}: {tensor.name} is an output, so it takes neither inout nor a bound")
    names = [tensor.name for tensor in (*inputs, *outputs)]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"in {text!r}: {name} occurs twice; write inout before an input that is overwritten")
    return SignatureLine(text=" ".join(text.split()), inputs=inputs, outputs=outputs)


def formula(text: str) -> Formula:
    """A size written with + - * // % over names and whole numbers. Raises UsageError for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _check(tree)
    except (SyntaxError, ValueError):
        raise UsageError(
            f"{text.strip()!r} is no size: write a number, an axis, or a formula of them with + - * // %"
        ) from None
    return Formula(text.strip(), tree)


def evaluate(tree: ast.expr, sizes: Mapping[str, float]) -> int:
    """The value of a checked formula. Raises UsageError for a division by zero."""
    if isinstance(tree, ast.Constant):
        return int(tree.value)  # type: ignore[arg-type]  # _check lets whole numbers through only
    if isinstance(tree, ast.Name):
        return int(sizes[tree.id])
    if isinstance(tree, ast.UnaryOp):
        return -evaluate(tree.operand, sizes)
    if not isinstance(tree, ast.BinOp):
        raise UsageError(f"{ast.unparse(tree)!r} is no size")
    try:
        return OPERATIONS[type(tree.op)](evaluate(tree.left, sizes), evaluate(tree.right, sizes))
    except ZeroDivisionError:
        raise UsageError(f"{ast.unparse(tree)} divides by zero") from None


def _check(tree: ast.expr) -> None:
    """Raise ValueError for what is no formula."""
    if isinstance(tree, ast.BinOp) and type(tree.op) in OPERATIONS:
        _check(tree.left)
        _check(tree.right)
    elif isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        _check(tree.operand)
    elif not (isinstance(tree, ast.Name) or (isinstance(tree, ast.Constant) and type(tree.value) is int)):
        raise ValueError


def _parts(text: str) -> Iterator[str]:
    """Text between the commas that stand outside of brackets."""
    depth, part = 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            yield part
            part = ""
        else:
            part += character
    if part.strip():
        yield part


def _tensor(part: str, text: str) -> TensorPattern:
    found = TENSOR.fullmatch(part.strip())
    if found is None:
        raise UsageError(f"in the signature {text!r}: {part.strip()!r} is no tensor; it is {EXAMPLE}")
    dtype = found["dtype"] or ""
    if dtype and dtype not in DTYPES:
        raise UnknownName(f"dtype of {found['name']} in the signature", dtype, DTYPES)
    dims = tuple(formula(dim) for dim in found["dims"].split(",")) if found["dims"].strip() else ()
    below = formula(found["below"]) if found["below"] else None
    if below is not None and "int" not in dtype:
        raise UsageError(f"in the signature {text!r}: only a tensor of integers has a bound, such as idx[T]: int64 < V")
    return TensorPattern(name=found["name"], dims=dims, dtype=dtype, inout=found["inout"] is not None, below=below)
