"""Checks of a user's operator that the user has not declared: unusual inputs, and other values of its options.

They are there for gross errors, such as a softmax without its maximum or an option that is ignored. So they are left
out wherever the definition does not allow them, and bounds are lenient: a kernel may also err by what rounding its
inputs once would change. None of them is timed.
"""

from __future__ import annotations

import functools
import inspect
import math
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION
from pytest_klineage.operators.changes import (
    ALONE,
    BY_SLICE,
    BY_TURNS,
    CHANGES,
    COMPARED,
    IN_16_BITS,
    INTEGERS,
    PAIRED,
    SMALL,
    STEPPED,
    TURNS,
    WHOLE,
    WIDER,
    whole_range,
)
from pytest_klineage.operators.distributions import torch_dtype
from pytest_klineage.operators.evaluation import is_float
from pytest_klineage.operators.movement import CAST, COMPARES, MOVES, PAIRS, STEPS
from pytest_klineage.operators.open_inputs import bound_of, finished, numbers
from pytest_klineage.operators.tolerance import UNIT_ROUNDOFF, Expected, rounded_inputs
from pytest_klineage.records import KernelCase, Option, Signature

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors
    from pytest_klineage.operators.defined import DefinedOperator

CLEARLY = 10.0
"""By how many bounds the answer for another value of an option must differ on usual inputs."""


PAIRING = (MOVES - {CAST}) | PAIRS
"""What a definition may call that is checked with integers beyond those of a double: a cast would round them."""
APART = (MOVES | COMPARES) - {CAST, "neg", "abs"}
"""The same for all of a type's range, whose lowest integer has no counterpart."""
ONE_SIDED = ("constant", "far", BY_TURNS)
"""Changes after which sums may add nearly one number many times: every rounding then errs to the same side."""


class Unusable(Exception):
    """Why a check is left out."""


def names(operator: DefinedOperator, case: KernelCase) -> tuple[str, ...]:
    """Distributions that change an input of the signature's types, then other values of options."""
    return (*changes(operator, case), *other_options(operator, case))


def changes(operator: DefinedOperator, case: KernelCase) -> tuple[str, ...]:
    """Distributions that change an input of the signature's types."""
    inputs = operator.signature(case).inputs
    floats = {is_float(spec.dtype) for spec in inputs}
    found = [
        name for name in operator.defaults
        if (name not in INTEGERS) in floats and name not in operator.distributions and is_for(operator, case, name)
    ]  # fmt: skip
    heeded = [spec.name for spec in inputs if is_float(spec.dtype) and spec.name not in operator.may_ignore]
    alone = [f"{ALONE}:{name}" for name in heeded]
    return tuple(one for name in found for one in (alone if name == ALONE else [name]))


def elsewhere(operator: DefinedOperator, case: KernelCase) -> tuple[str, ...]:
    """Those that a case of a further shape may have, the one with several kinds of inputs first."""
    return (*([BY_TURNS] if turns(operator) else []), *changes(operator, case))


def turns(operator: DefinedOperator) -> list[str]:
    """Changes of TURNS that the user wants, and has not replaced."""
    return [name for name in TURNS if name in operator.defaults and name not in operator.distributions]


def other_options(operator: DefinedOperator, case: KernelCase) -> dict[str, KernelCase]:
    """By a name such as "eps=0.5", the case with another value of one of the options that reach a kernel as numbers.

    Every other value that is declared, or one where any is allowed. Sizes that follow from an option stay.
    """
    found = {}
    for name in sorted(set(operator.options) - operator.may_ignore - set(operator.line.names)):
        for value in other_values(operator, case, name):
            other = msgspec.structs.replace(case, options={**case.options, name: value}, also_shapes=())
            found[f"{name}={value}"] = other
    return found


def other_values(operator: DefinedOperator, case: KernelCase, name: str) -> Iterator[Option]:
    """Values of an option that are not the case's; none for strings, which a kernel does not get."""
    own = operator.option(case, name)
    if name not in operator.free:
        yield from (value for value in operator.options[name] if value != own and not isinstance(value, str))
    elif isinstance(own, int):
        yield own + 1
    elif isinstance(own, float) and math.isfinite(own):
        factor = not_foreseen(name, own)
        values = [1.5 * own + math.copysign(0.5, own), 10 * own or -0.5]
        if max(map(abs, values)) < 1:
            values.append(math.copysign(2.5, own))
        yield from (float(f"{factor * value:.3g}") for value in values)
        if own:
            yield 0.0


@functools.cache
def not_foreseen(name: str, own: float) -> float:
    """A factor from 1 to 1.25, drawn in each process: a kernel that knew the values could heed no others."""
    return 1 + secrets.randbelow(251) / 1000


def problem(
    operator: DefinedOperator, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
) -> tuple[Tensors, Expected] | str:
    """Inputs and answer of a check, or why it is left out; "" where it is no other check than the usual one.

    `wrong` is the answer to other inputs.
    """
    drawn = numbers(operator, case, generator)
    state = generator.get_state()
    kind = name.partition(":")[0]
    usual = finished(operator, case, generator, DEFAULT_DISTRIBUTION, copied(drawn))
    try:
        if kind not in (*CHANGES, BY_TURNS):
            return option(operator, case, other_options(operator, case)[name], usual, generator)
        generator.set_state(state)
        if name in INTEGERS:
            other = integers_changed(operator, case, drawn, name, generator)
        else:
            other = changed(operator, case, drawn, name, generator)
        inputs = finished(operator, case, generator, name, drawn | other)
        if all(same(inputs[item], usual[item]) for item in inputs):
            return ""
        if name in INTEGERS:
            object_to_overflow(operator, case, inputs)
        return usable(operator, case, inputs, generator, wrong, kind=kind)
    except Unusable as error:
        return str(error)
    except UsageError:
        return "the definition fails"


def is_for(operator: DefinedOperator, case: KernelCase, name: str) -> bool:
    """Whether a change is one for a definition that calls what this one does."""
    if name in COMPARED:
        return rounds_nothing(operator, case) and not operator.calls_only(case, MOVES)
    if name == STEPPED:
        return not STEPS.isdisjoint(operator.called.get(case.id, ()))
    needed = {PAIRED: PAIRING, WHOLE: APART}
    return name not in needed or operator.calls_only(case, needed[name])


def rounds_nothing(operator: DefinedOperator, case: KernelCase) -> bool:
    """Whether the definition only compares and moves numbers, with one right answer where some are equal."""
    return operator.calls_only(case, MOVES | COMPARES)


def allow_one_sided(operator: DefinedOperator, case: KernelCase, expected: Expected) -> None:
    """Let a kernel err by a float32's rounding per element of the longest axis: adding one number n times may.

    Where it may not err, nothing is added.
    """
    signature = operator.signature(case)
    terms = max(size for spec in signature.inputs for size in (spec.shape[1:] or spec.shape or (1,)))
    for spec in signature.outputs:
        if is_float(spec.dtype) and spec.name not in operator.tolerances and expected.bounds[spec.name]:
            roundings = terms * min(1.0, UNIT_ROUNDOFF["fp32"] / UNIT_ROUNDOFF[spec.dtype])
            expected.bounds[spec.name] = max(expected.bounds[spec.name], roundings)


def option(
    operator: DefinedOperator, case: KernelCase, other: KernelCase, usual: Tensors, generator: torch.Generator
) -> tuple[Tensors, Expected]:
    """Another value of an option, on inputs of several kinds, else on usual ones, or on small ones where it shows only
    there. Raises Unusable."""
    with suppress(Unusable, UsageError):
        if turns(operator):
            several = after(operator, case, BY_TURNS, generator)
            wrong = operator.oracle(case, several)
            return usable(operator, other, several, generator, wrong, CLEARLY, kind=BY_TURNS)
    with suppress(Unusable):
        return usable(operator, other, usual, generator, operator.oracle(case, usual), CLEARLY)
    drawn = numbers(operator, case, generator)
    less = {name: values * SMALL for name, values in drawn.items() if values.is_floating_point()}
    small = finished(operator, case, generator, "small", drawn | less)
    return usable(operator, other, small, generator, operator.oracle(case, small))


def after(operator: DefinedOperator, case: KernelCase, name: str, generator: torch.Generator) -> Tensors:
    """Inputs after a change of floats."""
    drawn = numbers(operator, case, generator)
    return finished(operator, case, generator, name, drawn | changed(operator, case, drawn, name, generator))


def copied(values: Tensors) -> Tensors:
    """Copies, since a user's function may change what it takes."""
    return {name: tensor.clone() for name, tensor in values.items()}


def changed(
    operator: DefinedOperator, case: KernelCase, values: Tensors, name: str, generator: torch.Generator
) -> Tensors:
    """Those that are floats after the change of this name, from a stream of random numbers of its own."""
    import torch

    if name == BY_TURNS:
        return by_turns(operator, case, values, generator)
    own = torch.Generator(generator.device).manual_seed(generator.initial_seed() ^ 1)
    name, _, only = name.partition(":")
    types = {spec.name: spec.dtype for spec in operator.signature(case).inputs if is_float(spec.dtype)}
    wide = name in BY_SLICE and any(values[key].dim() > 1 for key in types)
    return {
        key: IN_16_BITS.get((name, dtype), CHANGES[name])(values[key], own)
        for key, dtype in types.items() if only in ("", key) and (values[key].dim() > 1 or not wide)
    }  # fmt: skip


def by_turns(operator: DefinedOperator, case: KernelCase, values: Tensors, generator: torch.Generator) -> Tensors:
    """Those that are floats, whose slices along the first axis are after one change each; vectors beside tensors with
    more axes are left alone."""
    wanted = turns(operator)
    found = {spec.name: values[spec.name].clone() for spec in operator.signature(case).inputs if is_float(spec.dtype)}
    least = min(2, max((tensor.dim() for tensor in found.values()), default=1))
    for place, name in enumerate(wanted, start=1):
        for key, tensor in changed(operator, case, values, name, generator).items():
            if tensor.dim() >= max(1, least):
                found[key][place :: len(wanted) + 1] = tensor[place :: len(wanted) + 1]
    return found


def integers_changed(
    operator: DefinedOperator, case: KernelCase, values: Tensors, name: str, generator: torch.Generator
) -> Tensors:
    """Those that are integers or booleans after the change of this name.

    Large numbers are for integers that neither the signature nor the default distribution bounds; the largest one that
    is allowed stands in the place of zeros where the signature bounds them.
    """
    own = operator.distributions.get(DEFAULT_DISTRIBUTION)
    drawn = set(inspect.signature(own).parameters) if own else set()
    found = {}
    for spec in operator.signature(case).inputs:
        if is_float(spec.dtype):
            continue
        bound = bound_of(operator, case, spec.name)
        free = spec.name not in drawn and bound is None
        if name == INTEGERS[-1]:
            if bound is not None:
                found[spec.name] = CHANGES[name](values[spec.name] - (bound - 1), generator) + (bound - 1)
        elif name == PAIRED:
            if spec.dtype == "int64" and free:
                found[spec.name] = CHANGES[name](values[spec.name], generator)
        elif name == WHOLE:
            if spec.dtype in WIDER and free:
                found[spec.name] = whole_range(values[spec.name], generator, spec.dtype)
        elif name != INTEGERS[0]:
            found[spec.name] = CHANGES[name](values[spec.name], generator)
        elif spec.dtype in WIDER and free:
            found[spec.name] = values[spec.name] * WIDER[spec.dtype]
    return found


def object_to_overflow(operator: DefinedOperator, case: KernelCase, inputs: Tensors) -> None:
    """Raise Unusable where integers of 64 bits give another answer: a right kernel may compute with these."""
    longer = {
        name: tensor if tensor.is_floating_point() or tensor.element_size() == 1 else tensor.long()
        for name, tensor in inputs.items()
    }
    usual, wide = operator.oracle(case, inputs), operator.oracle(case, longer)
    if not all(same(usual[name], wide[name]) for name in usual):
        raise Unusable("integers overflow")


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, of any type."""
    if left.element_size() == 1:
        return bool((left.double() == right.double()).all())
    return bool((left == right).all())


def usable(
    operator: DefinedOperator, case: KernelCase, inputs: Tensors, generator: torch.Generator, wrong: Tensors,
    times: float = 1.0, *, kind: str = "",
) -> tuple[Tensors, Expected]:  # fmt: skip
    """Inputs and answer. Raises Unusable where a right kernel may fail, or a wrong answer errs by so few bounds.

    `kind` is the change that the inputs are after.
    """
    signature = operator.signature(case)

    def rounded(outputs: Tensors) -> Tensors:
        object_to_range(signature, outputs)
        if rounds_nothing(operator, case) or (kind == STEPPED and is_exact(operator, case, inputs, outputs)):
            return {}
        return rounded_inputs(operator, case, inputs, outputs, generator)

    expected = Expected(operator, case, inputs, rounded)
    if not all(math.isfinite(float(unit.max())) for unit in expected.units.values() if unit.numel()):
        raise Unusable("the answer jumps")
    if not all(math.isfinite(bound) for bound in expected.bounds.values()):
        raise Unusable("the definition is not finite in this precision")
    if kind in ONE_SIDED:
        allow_one_sided(operator, case, expected)
    if any(not expected.bounds[spec.name] for spec in signature.outputs):
        object_to_jumps(operator, case, inputs, expected)
    if all(error <= times * expected.bounds[name] for name, error in expected.errors(wrong).items()):
        raise Unusable("another answer passes")
    return inputs, expected


def is_exact(operator: DefinedOperator, case: KernelCase, inputs: Tensors, outputs: Tensors) -> bool:
    """Whether the definition's own precision gives these floats, so that no rounding decides on which side of a step an
    element lies. Of integers nothing is claimed: they do not tell what was rounded to them."""
    own = operator.baseline_output(case, inputs)
    return all(values.is_floating_point() and same(own[name], values) for name, values in outputs.items())


def object_to_range(signature: Signature, outputs: Tensors) -> None:
    """Raise Unusable for answers that are not finite in the outputs' types; a little more rounds to the largest."""
    import torch

    for spec in signature.outputs:
        values = outputs[spec.name]
        if values.is_floating_point():
            limit = torch.finfo(torch_dtype(spec.dtype)).max * (1 + UNIT_ROUNDOFF[spec.dtype] / 2)
            if not bool((values.abs() <= limit).all()):
                raise Unusable("the answer is not finite")


def object_to_jumps(operator: DefinedOperator, case: KernelCase, inputs: Tensors, expected: Expected) -> None:
    """Raise Unusable where the definition's own precision gives other integers."""
    if not expected.accepts(operator.baseline_output(case, inputs)):
        raise Unusable("rounding decides the answer")
