"""A process that calls one built native kernel twice and ends, for a tool that watches it.

gate/stages/sanitize.py starts it under compute-sanitizer: `python -m pytest_klineage.worker.sanitized JOBFILE`. torch
makes the inputs on the CPU; all that the GPU sees is plain allocations, copies and the kernel, for tools slow down
everything that they watch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_klineage.errors import HarnessError
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.distributions import torch_dtype
from pytest_klineage.records import DTYPES, Code, KernelCase, Placement, Signature, Slot, TensorSpec
from pytest_klineage.records.messages import Job, KernelLoaded, LoadFailed
from pytest_klineage.surfaces import SurfaceFailure, surface_backend
from pytest_klineage.worker.device import memory as device
from pytest_klineage.worker.failures import bounded, describe
from pytest_klineage.worker.sandbox import containment

if TYPE_CHECKING:
    import torch

CALLS = 2
"""The second call finds what the first one left behind."""
SEED = 1
ALARM_S = 150
"""A little longer than the judge waits: a tool that is ended may leave the process that it watches behind."""
ANSWER = "answer.json"
"""Name of the answer in the job's directory: Loaded when both calls have come to their end, else LoadFailed."""


class Apart:
    """Tensors in allocations of their own, so that an access beside one of them is outside of all memory.

    It stands for an arena that begins at address 0: offsets are addresses.
    """

    address = 0

    def __init__(self, stream: int) -> None:
        self.stream = stream

    @property
    def bytes(self) -> torch.Tensor:
        """There is no such tensor. Raises SurfaceFailure: a kernel that needs one is not native."""
        raise SurfaceFailure(Code.EXCEPTION, "tensors lie apart here, and only native kernels take them like that")


def main(arguments: list[str]) -> int:
    """Serve the job in the file that is named. Returns 0, or 1 when a call failed; the answer says why."""
    signal.alarm(ALARM_S)
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Job)
    answer = attempt(job)
    Path(job.workdir, ANSWER).write_bytes(msgspec.json.encode(answer))
    return 0 if isinstance(answer, KernelLoaded) else 1


def attempt(job: Job) -> KernelLoaded | LoadFailed:
    """Load the kernel and call it; whatever goes wrong becomes an answer."""
    try:
        return KernelLoaded(containment=tuple(call_twice(job)))
    except SurfaceFailure as failure:
        return LoadFailed(code=failure.code, message=bounded(failure.message))
    except HarnessError as error:
        return LoadFailed(code=Code.CUDA_ERROR, message=bounded(str(error)))
    except BaseException as error:  # process boundary: whatever a candidate raises when it is loaded becomes an answer
        return LoadFailed(code=Code.EXCEPTION, message=describe(error))


def call_twice(job: Job) -> list[str]:
    """Everything in order. Returns what contained the kernel.

    Raises SurfaceFailure for a kernel that cannot be loaded or refuses, HarnessError for an error of the device.
    """
    from cuda.bindings import driver

    if job.case is None:
        raise HarnessError("the job names no case")
    signature = operator_of(job.case).signature(job.case)
    inputs = host_inputs(job.case, signature)
    # The context comes first, as in every worker on a GPU: the driver, and the tool in it, open their files here.
    handle = open_context()
    memory = Apart(int(device.call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)))
    slot = Slot(
        inputs=tuple(uploaded(spec, tensor) for spec, tensor in zip(signature.inputs, inputs, strict=True)),
        outputs=tuple(allocated(spec) for spec in signature.outputs),
    )
    device.call(driver.cuCtxSynchronize)
    active = contain(job)
    kernel = surface_backend(job.surface).load(Path(job.artifact), job.entry, job.module)
    invoke = kernel.bind(memory, slot, signature.scalars)
    for _ in range(CALLS):
        invoke()
        device.call(driver.cuCtxSynchronize)
    # Some findings are reported when their context ends.
    device.call(driver.cuDevicePrimaryCtxReset, handle)
    return active


def host_inputs(case: KernelCase, signature: Signature) -> list[torch.Tensor]:
    """Well-conditioned inputs in host memory, in the order and with the strides of the signature."""
    import torch

    chosen = operator_of(case)
    made = chosen.make_inputs(case, torch.Generator().manual_seed(SEED), chosen.input_distributions[0])
    return [
        torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype)).copy_(made[spec.name])
        for spec in signature.inputs
    ]


def open_context() -> Any:
    """Make the first visible GPU's primary context current. Returns the device. Raises HarnessError."""
    from cuda.bindings import driver

    device.call(driver.cuInit, 0)
    handle = device.call(driver.cuDeviceGet, 0)
    device.call(driver.cuCtxSetCurrent, device.call(driver.cuDevicePrimaryCtxRetain, handle))
    return handle


def allocated(spec: TensorSpec) -> Placement:
    """Device memory for one tensor, to the byte, and without any content."""
    from cuda.bindings import driver

    num_bytes = spec.num_elements * DTYPES[spec.dtype]
    return Placement(spec=spec, offset=int(device.call(driver.cuMemAlloc, num_bytes)), num_bytes=num_bytes)


def uploaded(spec: TensorSpec, tensor: torch.Tensor) -> Placement:
    """Device memory with the content of a dense tensor."""
    from cuda.bindings import driver

    placement = allocated(spec)
    device.call(driver.cuMemcpyHtoD, placement.offset, tensor.data_ptr(), placement.num_bytes)
    return placement


def contain(job: Job) -> list[str]:
    """Let the kernel write to the job's directory and the GPU only, and print nowhere. Returns what is active.

    System calls are not filtered, and sizes not limited: the tool's own part of this process talks to the tool.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if not job.sandbox:
        return []
    devices = [str(path) for path in Path("/dev").glob("nvidia*")]
    active = containment.restrict_files(["/"], [job.workdir, "/dev/shm", *devices])
    return active + containment.drop_capabilities()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
