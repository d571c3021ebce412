"""Sizes of a problem's file, set to other values in its text: by name, or all of the large ones made smaller."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from pytest_klineage.errors import UnknownName, UsageError


def with_sizes(text: str, sizes: Mapping[str, Any]) -> str:
    """The text with a line after the last assignment of each name that gives it another value.

    What the file computes from it follows. Raises UnknownName for a name that the file does not assign at its top.
    """
    lines = text.splitlines()
    assigned = assignments(text)
    for name in sizes:
        if name not in assigned:
            raise UnknownName("size at the top of the file", name, assigned)
    for name in sorted(sizes, key=lambda name: assigned[name].end_lineno or 0, reverse=True):
        lines.insert(assigned[name].end_lineno or 0, f"{name} = {sizes[name]!r}")
    return "\n".join(lines) + "\n"


def assignments(text: str) -> dict[str, ast.Assign]:
    """By name, where a file assigns it at its top. Raises UsageError for text that is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"it is not valid Python: {error}") from None
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                found.update({item.id: node for item in names if isinstance(item, ast.Name)})
    return found


def shrunk(text: str, values: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Smaller values of the sizes over `limit` that a file gives as numbers, or as tuples of them.

    Each is divided by its smallest prime factors until it is `limit` at most, so that what divides it mostly still
    does; a prime over `limit` becomes `limit`. What is computed from other names follows them and is left alone.
    """
    own = [name for name, node in assignments(text).items()
           if not any(isinstance(part, ast.Name) for part in ast.walk(node.value))]  # fmt: skip
    smaller = {name: smaller_value(values[name], limit) for name in own if name in values}
    keep_apart({name: values[name] for name in smaller if type(values[name]) is int}, smaller)
    return {name: value for name, value in smaller.items() if value != values[name]}


def keep_apart(values: Mapping[str, int], smaller: dict[str, Any]) -> None:
    """Divide the smaller sizes again that have become equal to what was a multiple of theirs.

    With as many groups as channels a normalisation would leave nothing of its input.
    """
    for name in sorted(values, key=lambda name: -values[name]):
        multiples = {smaller[other] for other in values if values[other] > values[name] > 1
                     and not values[other] % values[name]}  # fmt: skip
        while smaller[name] in multiples and smallest_factor(smaller[name]) < smaller[name]:
            smaller[name] //= smallest_factor(smaller[name])


def smaller_value(value: Any, limit: int) -> Any:
    """A number, or the numbers of a tuple, at most `limit`; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(smaller_value(item, limit) for item in value)
    if type(value) is not int:
        return value
    while value > limit:
        value = limit if smallest_factor(value) == value else value // smallest_factor(value)
    return value


def smallest_factor(value: int) -> int:
    """The smallest prime factor of a number; itself where it is prime, or 1."""
    return next((other for other in range(2, int(value**0.5) + 1) if value % other == 0), value)
