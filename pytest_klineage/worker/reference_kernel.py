"""A reference as something a worker can call: the vendor's implementation on views of the arena."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_klineage.errors import MissingDependency
from pytest_klineage.operators import DEFAULT_DISTRIBUTION, OpenOperator, Operator, operator_of
from pytest_klineage.operators.resolve import adopt, search_also
from pytest_klineage.records import DefinitionFile, KernelCase, Slot, TensorSpec
from pytest_klineage.records.messages import Job
from pytest_klineage.references import TrialTensors, Variant, reference_of
from pytest_klineage.surfaces.base import Invoke, LoadedKernel, MappedMemory
from pytest_klineage.surfaces.python import tensor_view

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pytest_klineage.references.base import Call, Tensors

NOWHERE = DefinitionFile()
TRIAL_SEED = 20260401
"""Variants are compared on the same numbers every time; what is timed later has others."""


class ReferenceKernel(LoadedKernel):
    """The prepared call of a reference for one case."""

    # It is trusted, and what it returns is what a user of the library works on.
    copied_under_the_clock = False

    def __init__(self, job: Job) -> None:
        if job.case is None:
            raise ValueError("a reference needs its case")
        search_also(job.definition.search)
        adopt(job.case, job.definition)
        chosen = reference_of(job.case)
        chosen.check(job.case, job.platform)
        try:
            if job.platform == "cpu":
                self._call = chosen.prepare(job.case, trial_on_cpu(job) if chosen.needs_trial else None)
            else:
                self._call = prepared_on_gpu(job.case, job.platform, job.variant, job.variant_ms, job.definition)
        except MissingDependency as missing:
            # The judge knows an absent module by these words and skips with the remedy.
            raise ModuleNotFoundError(f"No module named {missing.what!r}") from None

    def bind(self, memory: MappedMemory, slot: Slot, scalars: dict[str, float]) -> Invoke:
        inputs = {item.spec.name: tensor_view(memory, item) for item in slot.inputs}
        outputs = {item.spec.name: tensor_view(memory, item) for item in slot.outputs}
        call = self._call
        if isinstance(call, Variant) and call.convert is not None:
            return Converted(call, inputs, outputs)
        # A variant without a conversion is its call.
        timed = call.call if isinstance(call, Variant) else call

        def invoke() -> Any:
            return timed(inputs, outputs)

        return invoke


class Converted:
    """A call whose inputs a user of the library keeps in the library's own convention.

    A loop that calls `before` whenever inputs have changed keeps the conversion out of its clock. One that never does
    gets it inside of every call.
    """

    def __init__(self, variant: Variant, inputs: Tensors, outputs: Tensors) -> None:
        self._variant, self._inputs, self._outputs = variant, inputs, outputs
        self._ready: Tensors | None = None

    def before(self) -> None:
        """Convert the inputs as they are now."""
        if self._variant.convert is not None:
            self._ready = self._variant.convert(self._inputs)

    def __call__(self) -> Any:
        if self._ready is None:
            return self._variant(self._inputs, self._outputs)
        return self._variant.call(self._ready, self._outputs)


def prepared_on_gpu(
    case: KernelCase, platform: str, only: str = "", only_ms: float = 0.0, definition: DefinitionFile = NOWHERE
) -> Call:
    """The prepared call, after its variants, or the one named, ran on random tensors, whose memory is given back.

    `only_ms`: the median of the one that is named when it was compared, in milliseconds; 0 where that is not known.
    """
    import torch

    trial = replace(trial_of(case, platform), only=only, only_ms=only_ms, files=definition.files)
    call = reference_of(case).prepare(case, trial)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return call


def trial_on_cpu(job: Job) -> TrialTensors:
    """What a reference on a CPU is tried on, for those that want it. Raises ValueError for a job without a case."""
    if job.case is None:
        raise ValueError("a reference needs its case")
    return replace(trial_of(job.case, "cpu", "cpu"), only=job.variant, files=job.definition.files)


def trial_of(case: KernelCase, platform: str, device: str = "cuda") -> TrialTensors:
    """Random inputs of the operator's default distribution, and outputs, with the strides of the case's signature."""
    import torch

    chosen = operator_of(case)
    made = chosen.make_inputs(case, torch.Generator(device).manual_seed(TRIAL_SEED), DEFAULT_DISTRIBUTION)
    signature = chosen.signature(case)
    inputs = {spec.name: empty(spec, device).copy_(made[spec.name]) for spec in signature.inputs}
    outputs = {spec.name: inputs.get(spec.name, empty(spec, device).zero_()) for spec in signature.outputs}
    named = chosen.sizes(case) if isinstance(chosen, OpenOperator) else dict[str, Any](signature.scalars)
    return TrialTensors(platform, inputs, outputs, definition=own_definition(chosen, case), named=named)


def own_definition(chosen: Operator, case: KernelCase) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A definition with the case's options, results in their declared types; of a class, its baseline."""
    from pytest_klineage.operators.distributions import torch_dtype

    signature = chosen.signature(case)
    if not isinstance(chosen, OpenOperator):
        taken, made = [spec.name for spec in signature.inputs], [spec.name for spec in signature.outputs]

        def baseline(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = chosen.baseline_output(case, dict(zip(taken, inputs, strict=True)))
            return tuple(found[name] for name in made)

        return baseline
    dtypes = [torch_dtype(spec.dtype) for spec in signature.outputs]
    named, function = chosen.keywords(case), chosen.function

    def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = function(*inputs, **named)
        values = results if isinstance(results, tuple | list) else (results,)
        return tuple(value.to(dtype) for value, dtype in zip(values, dtypes, strict=True))

    return call


def empty(spec: TensorSpec, device: str) -> torch.Tensor:
    """An uninitialised tensor of this shape, type and order of memory."""
    import torch

    from pytest_klineage.operators.distributions import torch_dtype

    return torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device=device)
