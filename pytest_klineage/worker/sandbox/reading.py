"""What a worker may read. A native kernel that must do its own work has no library within reach, under any name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import sysconfig
from pathlib import Path

from pytest_klineage.records.messages import Job
from pytest_klineage.surfaces import surface_backend
from pytest_klineage.surfaces.elf import needed_libraries

MACHINE_PATHS = ("/etc/ld.so.cache", "/etc/localtime", "/sys/devices/system/cpu", "/proc/cpuinfo")
"""What describes the machine."""
SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/bin", "/sbin", *MACHINE_PATHS)
RUNTIME = re.compile(
    r"ld-linux[\w-]*\.so\.\d+|ld-musl-\w+\.so\.\d+|libc\.musl-\w+\.so\.\d+"
    r"|lib(c|m|mvec|dl|rt|pthread|stdc\+\+|c\+\+|c\+\+abi|unwind|gcc_s|gomp|omp|iomp5|atomic|quadmath)\.so[.\d]*"
)
"""Libraries of the language itself, which compute no kernel: those of C, C++, OpenMP and the compiler."""


def is_narrow(job: Job) -> bool:
    """Whether the job's kernel may read no library of the machine."""
    return job.sandbox and job.own_files_only


def load_runtime(job: Job) -> None:
    """Load what a kernel's artifact needs of the language's runtime, as long as its files can be read.

    What it needs beside that will not be found. Unwinding at a thread's end loads libgcc_s when it is first needed.
    """
    needed = needed_libraries(Path(job.artifact).read_bytes())
    for name in ("libgcc_s.so.1", *filter(RUNTIME.fullmatch, needed)):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)


def readable_paths(job: Job, *, on_gpu: bool) -> list[str]:
    """What a kernel may need to read. Native kernels never see the framework's libraries."""
    paths = [*(MACHINE_PATHS if is_narrow(job) else SYSTEM_PATHS), *job.read_paths]
    if job.artifact:
        artifact = Path(job.artifact)
        paths.append(str(artifact if artifact.is_dir() else artifact.parent))
    if on_gpu:
        paths += ["/proc", "/sys", "/dev", *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    if needs_torch(job) or on_gpu:
        paths += [sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"], *(path for path in sys.path if path)]
    return [path for path in paths if path]


def needs_torch(job: Job) -> bool:
    """Whether this worker may use the framework's files."""
    return job.surface == "reference" or surface_backend(job.surface).needs_torch
