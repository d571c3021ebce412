"""What is checked in a user's definition before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_klineage.operators.evaluation import open_ties
from pytest_klineage.operators.movement import recording
from pytest_klineage.operators.open_symmetry import SEED, alike
from pytest_klineage.records import KernelCase

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors
    from pytest_klineage.operators.defined import DefinedOperator

NULL_ANSWERS = {
    "zeros": "zeros", "constant": "one number everywhere", "passthrough": "the bytes of the inputs",
    "previous": "the answer to other inputs", "shuffled": "the right rows in another order",
}  # fmt: skip


def examine(operator: DefinedOperator, case: KernelCase, inputs: Tensors) -> list[str]:
    """Notes on how a case of a user's operator is timed.

    Raises UsageError, with the line, for a definition that changes its inputs, gives two answers to one question, or
    whose declared symmetry does not hold.
    """
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    versions = {name: tensor._version for name, tensor in inputs.items()}
    first, second = (operator.oracle(case, inputs) for _ in range(2))
    called: set[str] = set()
    with recording(called):
        operator.baseline_output(case, inputs)
    operator.called[case.id] = frozenset(called)
    # A version counts what torch does to a tensor; its bytes show what was done through NumPy or `.data`.
    touched = [
        name
        for name, tensor in inputs.items()
        if tensor._version != versions[name] or not same_bytes(tensor, before[name])
    ]
    if touched:
        raise operator.error(
            f"the definition changes its input {', '.join(touched)}; return new contents instead, "
            "those of inout tensors first"
        )
    if different := [name for name in first if not same(first[name], second[name])]:
        raise operator.error(f"the definition is not deterministic: two calls give different {', '.join(different)}")
    if operator.symmetry_function is not None:
        check_symmetry(operator, case, inputs, first)
    return [timing_note(operator, case), *tie_notes(operator, case, inputs, first)]


def tie_notes(operator: DefinedOperator, case: KernelCase, inputs: Tensors, expected: Tensors) -> list[str]:
    """A note when elements are not compared because the definition leaves ties open."""
    if not operator.leaves_ties_open:
        return []
    tied = {name: int(where.sum()) for name, where in open_ties(operator, case, inputs, expected).items()}
    return [
        f"{count} of {expected[name].numel()} elements of {name} follow from ties, which the definition leaves open: "
        "such are not compared, unless it sorts with stable=True"
        for name, count in tied.items() if count
    ]  # fmt: skip


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal, with NaN in the same places. Parallel sums on a GPU may differ by their order."""
    return alike(left, right) if left.is_cuda else bool(((left == right) | ((left != left) & (right != right))).all())


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one type and shape hold the same bytes, NaN included."""
    import torch

    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (left, right)))


def check_symmetry(operator: DefinedOperator, case: KernelCase, inputs: Tensors, expected: Tensors) -> None:
    """Raise UsageError unless a declared symmetry leads back to the answer."""
    import torch

    generator = torch.Generator(next(iter(inputs.values())).device.type).manual_seed(SEED)
    moved, undo = operator.symmetry_transform(case, inputs, generator)
    back = undo(operator.oracle(case, moved))
    if wrong := [name for name in expected if not alike(back[name], expected[name])]:
        raise operator.error(
            f"this is no symmetry: it does not lead back to the right {', '.join(wrong)}", operator.symmetry_function
        )


def timing_note(operator: DefinedOperator, case: KernelCase) -> str:
    """How timed inputs are kept new."""
    if operator.symmetry_function is not None:
        return f"timed inputs are drawn by the symmetry {operator.symmetry_function.__name__}"
    if axes := operator.permutable_axes(case):
        return f"timed inputs are permuted along {', '.join(axes)}, which the definition was found to allow"
    return "no symmetry was declared or found: every timed input is a new problem"


def objection(findings: Sequence[str]) -> str:
    """Why a case cannot be judged, from the lint's findings."""
    accepted = [item for item in findings if item.partition(":")[0] in NULL_ANSWERS]
    others = [item for item in findings if item not in accepted]
    if not accepted:
        idle = tuple(item.split()[1] for item in others if item.startswith("input "))
        advice = f"; declare .inputs in which it does, another shape, or may_ignore={idle}" if idle else ""
        return f"the case proves nothing: {'; '.join(others)}{advice}"
    names = [f"{NULL_ANSWERS[item.partition(':')[0]]}{item.partition(':')[2] and ' as ' + item.partition(':')[2]}"
             for item in accepted]  # fmt: skip
    more = f"; {'; '.join(others)}" if others else ""
    return (
        f"the tolerance accepts answers that compute nothing: {', '.join(names)}{more}; declare a tighter "
        "tolerance=, other .inputs, or another shape"
    )
