"""A reference as something a worker can call: the vendor's implementation on views of the arena."""

from __future__ import annotations

from typing import Any

from pytest_klineage.records import Slot
from pytest_klineage.records.messages import Job
from pytest_klineage.references import reference
from pytest_klineage.surfaces.base import Invoke, Loaded, Memory
from pytest_klineage.surfaces.python import tensor_view


class ReferenceKernel(Loaded):
    """The prepared call of a reference for one case."""

    def __init__(self, job: Job) -> None:
        if job.case is None:
            raise ValueError("a reference needs its case")
        self._call = reference(job.case.reference).prepare(job.case)

    def bind(self, memory: Memory, slot: Slot, scalars: dict[str, float]) -> Invoke:
        call = self._call
        inputs = {item.spec.name: tensor_view(memory, item) for item in slot.inputs}
        outputs = {item.spec.name: tensor_view(memory, item) for item in slot.outputs}

        def invoke() -> Any:
            return call(inputs, outputs)

        return invoke
