"""Null models: answers that compute nothing. A case that accepts one measures nothing and must not be scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Operator
from pytest_klineage.operators.distributions import torch_dtype
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase, TensorSpec

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors


def null_models(
    operator: Operator,
    case: KernelCase,
    inputs: Tensors,
    expected_outputs_of_another_input: Tensors,
    generator: torch.Generator,
) -> Iterator[tuple[str, Tensors]]:
    """Yield (name, outputs) of answers to `inputs` that need no computation, in the case's types and shapes.

    zeros, constant (the mean of the right output), passthrough (the bytes of the inputs), previous (the right answer to
    other inputs) and, where an output has several rows, shuffled (the right rows, each in its successor's place).
    """
    import torch

    outputs = operator.signature(case).outputs
    right = operator.baseline_output(case, inputs)
    yield "zeros", {spec.name: torch.zeros_like(right[spec.name]) for spec in outputs}
    if not operator.single_numbers or any(spec.num_elements > 1 for spec in outputs):
        yield "constant", {spec.name: torch.full_like(right[spec.name], mean(right[spec.name])) for spec in outputs}
    source = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in inputs.values()])
    yield "passthrough", {spec.name: tiled(source, spec) for spec in outputs}
    previous = expected_outputs_of_another_input
    yield "previous", {spec.name: previous[spec.name].to(right[spec.name].dtype) for spec in outputs}
    rows = {spec.name: as_rows(right[spec.name]) for spec in outputs}
    shortest = min(len(matrix) for matrix in rows.values())
    if shortest > 1:
        step = 1 + int(torch.randint(shortest - 1, (1,), generator=generator, device=generator.device))
        moved = {spec.name: rows[spec.name].roll(step, 0) for spec in outputs}
        yield "shuffled", {name: tensor.view(right[name].dtype).view_as(right[name]) for name, tensor in moved.items()}


def lint_case(operator: Operator, case: KernelCase, generator: torch.Generator) -> list[str]:
    """What makes a case not scorable, in its default input distribution: empty when nothing does.

    Names of accepted null models ("zeros", or "zeros:state" when that output is accepted beside right other outputs),
    "oracle not finite", and "input … does not influence outputs".
    """
    inputs, others = (operator.make_inputs(case, generator, DEFAULT_DISTRIBUTION) for _ in range(2))
    expected = Expected(operator, case, inputs)
    findings = []
    if not all(bool(output.isfinite().all()) for output in expected.outputs.values()):
        findings.append("oracle not finite")
    right = operator.baseline_output(case, inputs)
    for name, outputs in null_models(operator, case, inputs, operator.oracle(case, others), generator):
        # A single number may be its own mean, and another problem's answer, by chance.
        single = {output for output in outputs if operator.single_numbers and right[output].numel() == 1}
        telling = [output for output in outputs if output not in single or name == "zeros"]
        mixtures = {f"{name}:{output}": {**right, output: outputs[output]} for output in telling if len(outputs) > 1}
        findings += [label for label, answer in {name: outputs, **mixtures}.items() if expected.accepts(answer)]
    for name in [name for name in inputs if name not in operator.may_ignore]:
        other = unlike(inputs[name], others[name])
        if other is not None and expected.accepts(operator.baseline_output(case, {**inputs, name: other})):
            findings.append(f"input {name} does not influence outputs")
    return findings


def unlike(tensor: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor | None:
    """Other values of an input than it has: those of another draw, else, where every draw is the same, changed ones.

    None for such a tensor of integers or 8-bit floats: it may be one that only a few values fit into.
    """
    import torch

    if not torch.equal(as_rows(tensor), as_rows(drawn)):
        return drawn
    return tensor * 2 + 1 if tensor.is_floating_point() and tensor.element_size() > 1 else None


def as_rows(output: torch.Tensor) -> torch.Tensor:
    """An output as a matrix of its rows; one of 8-bit floats by its bytes, which can be moved about."""
    import torch

    plain = output.view(torch.uint8) if output.element_size() == 1 else output
    return plain.flatten(0, -2) if output.dim() > 1 else plain.view(1, -1)


def mean(output: torch.Tensor) -> float:
    """Mean of the finite elements; for integers rounded towards zero when stored."""
    values = output.double()
    finite = values[values.isfinite()]
    return float(finite.mean()) if finite.numel() else 0.0


def tiled(source: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The bytes of `source`, repeated or cut to fill a contiguous tensor of this type and shape."""
    dtype = torch_dtype(spec.dtype)
    needed = spec.num_elements * dtype.itemsize
    repeated = source.repeat(-(-needed // source.numel()))[:needed]
    return repeated.view(dtype).view(spec.shape)
