"""What a slot holds before a call, and what is wrong with it afterwards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias

import torch

from pytest_klineage.records import Check, Code, Reason, TensorSpec
from pytest_klineage.worker.host.arena import OracleArena, flat_bits, is_poison, poison, same_bits
from pytest_klineage.worker.problems import Plain, TransformedProblem

if TYPE_CHECKING:
    from pytest_klineage.operators.base import Tensors

LARGEST = sys.float_info.max
"""Stands for an infinite error in records: JSON has no infinity."""

View: TypeAlias = TransformedProblem | Plain


def prepare(arena: OracleArena, slot: int, view: View, kind: int, defences: frozenset[str]) -> None:
    """Poison the outputs and write the inputs; without poison, leave the right answer lying about as a heap would."""
    outputs = arena.outputs(slot)
    for item in arena.arena.slots[slot].outputs:
        if "poison" in defences:
            poison(item.spec, outputs[item.spec.name], kind)
        else:
            outputs[item.spec.name].copy_(view.problem.expected.outputs[item.spec.name])
    # Last, because a thread of the candidate may be waiting for them.
    for name, tensor in arena.inputs(slot).items():
        tensor.copy_(view.inputs[name])


def compare(
    arena: OracleArena, slot: int, view: View, kind: int, early: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[Check], list[Reason]]:
    """Compare a slot's outputs with the oracle's, and with what they were the moment the call had returned."""
    # A private copy: what is compared must not change between two looks at it.
    outputs = {name: tensor.clone() for name, tensor in arena.outputs(slot).items()}
    problem = view.problem
    errors = problem.expected.errors(view.undo(dict(outputs)))
    checks, reasons = [], []
    for item in arena.arena.slots[slot].outputs:
        name, error, bound = item.spec.name, errors[item.spec.name], problem.expected.bounds[item.spec.name]
        passed = error <= bound
        shown, allowed = min(error, LARGEST), min(bound, LARGEST)
        checks.append(
            Check(input_distribution=problem.input_distribution, output=name, error=shown, bound=allowed, passed=passed)
        )
        if not passed:
            unwritten = count_unwritten(item.spec, outputs[name], problem.expected.outputs[name], kind)
            reasons.append(explain(name, view, outputs, unwritten, error, bound))
    for name, (where, seen) in early.items():
        live = arena.outputs(slot)[name]
        settled = flat_bits(live)[where]
        if not same_bits(seen, settled):
            message = f"output {name} still changed after the call had returned"
            reasons.insert(0, Reason(code=Code.LATE_WORK, message=message))
    return checks, reasons


def count_unwritten(spec: TensorSpec, output: torch.Tensor, expected: torch.Tensor, kind: int) -> int:
    """Elements that still hold the poison; in 8 bits it may be a right value, and as many as should have it are not."""
    poisoned = int(is_poison(spec, output, kind).sum())
    right = is_poison(spec, expected.to(output.dtype), kind) if output.element_size() == 1 else torch.zeros(1)
    return max(0, poisoned - int(right.sum()))


def explain(name: str, view: View, outputs: Tensors, unwritten: int, error: float, bound: float) -> Reason:
    """Why an output is wrong, in one reason."""
    input_distribution = view.problem.input_distribution
    evidence: dict[str, float | int | str | bool] = {"input_distribution": input_distribution, "output": name}
    evidence |= {"error": min(error, LARGEST), "bound": min(bound, LARGEST)}
    if unwritten:
        evidence["unwritten_elements"] = unwritten
        message = f"{unwritten} of {outputs[name].numel()} elements of {name} were never written ({input_distribution})"
        return Reason(code=Code.UNWRITTEN, message=message, evidence=evidence)
    if (
        outputs[name].is_floating_point()
        and not bool(outputs[name].double().isfinite().all())
        and error == float("inf")
    ):
        message = (
            f"{name} has NaN or infinities where the oracle has none, or the other way round ({input_distribution})"
        )
        return Reason(code=Code.NON_FINITE, message=message, evidence=evidence)
    message = f"{name} is off by {error:.3g} rounding units, allowed are {bound:.3g} ({input_distribution})"
    return Reason(code=Code.MISMATCH, message=message, evidence=evidence)
