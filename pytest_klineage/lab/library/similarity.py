"""How alike contexts are in each dimension, for whole libraries at a time: figures from 0 to 1, and no decisions.

Every distinct case, language, platform and set of steps has a number, and is compared with a target once, however many
cards were verified there.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TypeVar

from pytest_klineage.operators import family_of
from pytest_klineage.records import GPU_PLATFORMS, Category, KernelCase

OPERATOR_WEIGHT, DTYPE_WEIGHT, SHAPE_WEIGHT = 0.6, 0.2, 0.2
SAME_FAMILY = 0.5
"""Similarity of what is related but not the same: operators of a family, languages or platforms of a kind."""
LANGUAGES = (frozenset({"cpp", "cuda"}), frozenset({"triton", "tilelang"}))
"""Surfaces whose code reads alike: pointers and threads; blocks of tensors."""
VENDORS = (frozenset(GPU_PLATFORMS),)
DTYPES_ALIKE = (frozenset({"fp16", "bf16"}), frozenset({"fp32", "fp64"}), frozenset({"int32", "int64"}))
NOWHERE = 1 << len(Category)
"""The set of steps of a card that was verified nowhere: it shares nothing with any, not even with the empty one."""

K = TypeVar("K", bound=Hashable)
Shape = tuple[tuple[str, int], ...]
ProblemKey = tuple[str, str, Shape]
"""Operator, data type and shape, the axes sorted by name."""

_BITS = {category: 1 << position for position, category in enumerate(Category)}


class Interner(dict[K, int]):
    """Distinct keys, numbered in the order in which they came."""

    def number(self, key: K) -> int:
        """The number of a key, a new one if need be."""
        return self.setdefault(key, len(self))


def same_family(one: str, other: str, groups: Sequence[frozenset[str]]) -> float:
    """1 for the same name, SAME_FAMILY for two of one group, 0 otherwise."""
    if one == other:
        return 1.0
    return SAME_FAMILY if any(one in group and other in group for group in groups) else 0.0


def same_operator(one: str, other: str) -> float:
    """1 for the same operator, SAME_FAMILY for two of one family, 0 otherwise."""
    alike = family_of(one) == family_of(other) != ""
    return same_family(one, other, [frozenset({one, other})] if alike else [])


def steps_mask(steps: Iterable[Category]) -> int:
    """A set of steps as bits."""
    mask = 0
    for step in steps:
        mask |= _BITS[step]
    return mask


def step_similarities(done: Collection[Category], masks: Iterable[int]) -> list[float]:
    """Steps that both have over steps that either has; two kernels to which nothing was done are alike."""
    mine = steps_mask(done)
    if not mine:
        return [0.0 if mask else 1.0 for mask in masks]
    return [(mask & mine).bit_count() / (mask | mine).bit_count() for mask in masks]


class CaseTable:
    """Distinct cases in columns: by operator and type, and for each operator and set of axes by size."""

    def __init__(self, problem_keys: Iterable[ProblemKey]) -> None:
        kinds: Interner[tuple[str, str]] = Interner()
        self._kind_of: list[int] = []
        self._groups: dict[tuple[str, tuple[str, ...]], list[tuple[int, Shape]]] = {}
        for number, (operator, dtype, shape) in enumerate(problem_keys):
            self._kind_of.append(kinds.number((operator, dtype)))
            if shape:
                axes = tuple(axis for axis, _ in shape)
                self._groups.setdefault((operator, axes), []).append((number, shape))
        self._kinds = tuple(kinds)

    def similarities(self, case: KernelCase) -> list[float]:
        """One figure per case of the table: operator and type, and the shape where operator and axes are the same."""
        values = [
            OPERATOR_WEIGHT * same_operator(case.operator, operator)
            + DTYPE_WEIGHT * same_family(case.dtype, dtype, DTYPES_ALIKE)
            for operator, dtype in self._kinds
        ]
        result = [values[kind] for kind in self._kind_of]
        shape = sorted(case.shape.items())
        group = self._groups.get((case.operator, tuple(axis for axis, _ in shape)), ())
        sums = [0.0] * len(group)
        for position, (_, mine) in enumerate(shape):
            sizes = [other[position][1] for _, other in group]
            ratios = {size: _ratio(mine, size) for size in set(sizes)}
            sums = [total + ratios[size] for total, size in zip(sums, sizes, strict=True)]
        for (number, _), total in zip(group, sums, strict=True):
            result[number] += SHAPE_WEIGHT * total / len(shape)
        return result


def _ratio(one: int, other: int) -> float:
    """The smaller size over the larger."""
    return min(one, other) / max(one, other, 1)
