"""A worker's life after the fork: contain itself, load a kernel or a reference, run it on request, nothing else.

It is the only code of ours that shares a process with a candidate. It holds no expected value, no seed and no verdict;
what it reports is checked by the oracle against shared memory and against the oracle's own clock.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.channel import Channel
from pytest_klineage.records.messages import DENORMALS, Job, KernelLoaded, LoadFailed
from pytest_klineage.records.verdict import Code
from pytest_klineage.surfaces import SurfaceFailure, surface_backend
from pytest_klineage.surfaces.base import LoadedKernel
from pytest_klineage.worker.failures import bounded, describe
from pytest_klineage.worker.host.callers_settings import CallersSettings
from pytest_klineage.worker.host.calls import CallLoop, materialise_if_needed
from pytest_klineage.worker.host.scheduling import MainThread
from pytest_klineage.worker.sandbox import containment, reading

if TYPE_CHECKING:
    from pytest_klineage.worker.device.calls import DeviceClock

GPU_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "FLASHINFER_CUDA_ARCH_LIST", "MAX_JOBS",
)  # fmt: skip
"""What a worker on a GPU keeps of the judge's environment, beside what every worker keeps."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES")
"""How many threads there are, and where OpenMP binds them."""
REFERENCE_VARIABLES = (
    "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "FLAGGEMS_CACHE_DIR",
)  # fmt: skip
"""Where a reference keeps what it has compiled. No candidate may write to these folders."""


def run_worker(job: Job, channel_fd: int, log_fd: int, active: list[str]) -> None:
    """Serve one job until the oracle says stop. Returns when done; the caller exits the process."""
    containment.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redirect_output(log_fd)
    channel = Channel.from_fd(keep_only(channel_fd))
    set_environment(job)
    main_thread = MainThread(job.processors)
    main_thread.widen()
    try:
        # A GPU's context and its clock come first: the driver opens its files here, and binds them to no candidate.
        clock = device_clock(job) if on_gpu(job) else None
        materialise_if_needed()
        # What is frozen is not found by looking through all objects.
        gc.freeze()
        containment_report = contain(job, active) + refuse(job)
        # Before the kernel's code is there, which may change what its thread is set to when it is loaded.
        callers = CallersSettings()
        kernel = load(job)
        if job.sandbox and clock is None and not reading.needs_torch(job):
            containment_report += containment.freeze_code()
    except SurfaceFailure as failure:
        channel.send(LoadFailed(code=failure.code, message=bounded(failure.message)))
        return
    except MemoryError:
        channel.send(LoadFailed(code=Code.OUT_OF_MEMORY, message="out of memory while loading"))
        return
    except BaseException as error:  # process boundary: whatever a candidate raises at import becomes an answer
        channel.send(LoadFailed(code=Code.EXCEPTION, message=describe(error)))
        return
    main_thread.widen()
    gc.collect()
    gc.disable()
    said = settings(job)
    callers.framework.keep_threads()
    if callers.processor.keep(DENORMALS):
        # GCC links code that does so to what is built with -Ofast. Anything else that has changed is found at a call.
        said[DENORMALS] = "treated otherwise since the kernel was loaded"
    channel.send(KernelLoaded(containment=tuple(containment_report), settings=said))
    if clock is None:
        CallLoop(channel, kernel, main_thread.settle, callers).serve()
    else:
        from pytest_klineage.worker.device.calls import DeviceLoop

        DeviceLoop(channel, kernel, clock).serve()


def on_gpu(job: Job) -> bool:
    """Whether this worker's tensors lie in device memory."""
    return job.platform != "cpu"


def device_clock(job: Job) -> DeviceClock:
    """The context, the stream and the events of a worker on a GPU."""
    from pytest_klineage.worker.device import memory
    from pytest_klineage.worker.device.calls import DeviceClock

    memory.initialise()
    return DeviceClock(job.flush_bytes)


def redirect_output(log_fd: int) -> None:
    """Standard output and error go to the judge's pipe, standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)


def keep_only(channel_fd: int) -> int:
    """Move the channel to descriptor 3 and close everything else. Returns its new number."""
    os.dup2(channel_fd, 3)
    os.closerange(4, 4096)
    return 3


def set_environment(job: Job) -> None:
    """The same neutral environment for checks and for timing; private HOME and TMPDIR."""
    names = ["PATH", *THREAD_VARIABLES, "LC_ALL", *(GPU_VARIABLES if on_gpu(job) else ())]
    names += REFERENCE_VARIABLES if job.surface == "reference" else ()
    kept = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.clear()
    os.environ.update(kept, HOME=job.workdir, TMPDIR=job.workdir, XDG_CACHE_HOME=job.workdir, USER="kernel")
    os.chdir(job.workdir)
    sys.argv = ["kernel"]
    if job.surface != "cpp" and "torch" in sys.modules:
        import torch

        torch.set_num_threads(job.threads)


def contain(job: Job, active: list[str]) -> list[str]:
    """Apply what this kernel offers, outermost first. Returns the names of what is now active."""
    fewer_cores = containment.limit_cores(job.threads)
    if not job.sandbox:
        return active
    devices = [str(path) for path in Path("/dev").glob("nvidia*")] if on_gpu(job) else []
    # CUDA reserves more address space than any limit on it would leave room for.
    report = [*active, *containment.limit_resources(address_space=not on_gpu(job))]
    if reading.is_narrow(job):
        reading.load_runtime(job)
    report += containment.restrict_files(reading.readable_paths(job, on_gpu=on_gpu(job)), [job.workdir, *devices])
    report += containment.drop_capabilities()
    report += containment.filter_calls(allow_processes=job.allow_processes, allow_cores=not fewer_cores)
    return report


def refuse(job: Job) -> list[str]:
    """Have the framework refuse to do the work of a kernel that is to be its own. Returns what keeps it refusing."""
    if job.surface == "reference" or not job.refuse_framework:
        return []
    from pytest_klineage.worker.sandbox import refusal

    unmasking = on_gpu(job)
    refusal.refuse_compute(unmasking=unmasking)
    if job.refuse_copies:
        refusal.refuse_copies(unmasking=unmasking)
    return refusal.keep_traps(unmasking=unmasking, may_filter=job.sandbox)


def load(job: Job) -> LoadedKernel:
    """Load the job's kernel or reference. Raises SurfaceFailure."""
    if job.surface == "reference":
        from pytest_klineage.worker.reference_kernel import ReferenceKernel

        return ReferenceKernel(job)
    return surface_backend(job.surface).load(Path(job.artifact), job.entry, job.module)


def settings(job: Job) -> dict[str, str]:
    """Thread counts and flags in force, for the record."""
    report = {"threads": str(job.threads), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "")}
    if job.surface == "reference" and job.case is not None:
        from pytest_klineage.references import reference_of

        report.update(reference_of(job.case).describe(job.case))
    return report
