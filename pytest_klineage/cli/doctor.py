"""What this machine can run: a finding for every part, with the command that would add it. It changes nothing."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_klineage.errors import MissingDependency, UsageError
from pytest_klineage.extensions import GROUPS, extensions

LEAST_SHM_BYTES = 512 << 20
"""Inputs, outputs and guard bands of the largest CPU cases take about 200 MB of shared memory."""
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_VERSION_FLAG = 1
CLONE_NEW_USER_AND_NET = 0x10000000 | 0x40000000
PROBE_SOURCE = """\
#include <omp.h>
#include <cstdio>
int main() { int n = 0;
#pragma omp parallel reduction(+ : n)
  n += 1; std::printf("%d", n); return 0; }
"""


@dataclass(frozen=True, slots=True)
class MachinePart:
    """One part of the machine: there or not, and what would add it."""

    name: str
    present: bool
    detail: str
    needed: bool = False
    """The cpu platform cannot run without it."""
    remedy: str = ""
    """A command, when the part is missing."""


def examine(cache_dir: Path | None = None) -> list[MachinePart]:
    """Look at everything, most basic first. Takes a few seconds; torch is not imported."""
    probes: tuple[Callable[[], Iterator[MachinePart]], ...] = (
        _python,
        _compiler,
        lambda: _package("torch", needed=True, remedy="pip install 'pytest-klineage[cpu]'"),
        lambda: _package("pytest-xdist", remedy="pip install 'pytest-klineage[xdist]'"),
        lambda: _package("pytest-benchmark", remedy="pip install 'pytest-klineage[benchmark]'"),
        _cuda_compiler,
        _extensions,
        _gpu,
        _sandbox,
        _resources,
        lambda: _cache(cache_dir),
    )
    return [finding for probe in probes for finding in probe()]


def cpu_ready(findings: Sequence[MachinePart]) -> bool:
    """Whether everything that the cpu platform needs is there."""
    return all(finding.present for finding in findings if finding.needed)


def finding_lines(findings: Sequence[MachinePart]) -> list[str]:
    """The findings as text, and what follows from them."""
    size = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        state = "ok" if finding.present else "MISSING" if finding.needed else "absent"
        lines.append(f"{state:<8} {finding.name:<{size}}  {finding.detail}".rstrip())
        if not finding.present and finding.remedy:
            lines.append(f"{'':<8} {'':<{size}}  try: {finding.remedy}")
    lines.append("")
    if cpu_ready(findings):
        lines.append("The cpu platform can run: pytest --klineage-platform cpu")
    else:
        missing = ", ".join(finding.name for finding in findings if finding.needed and not finding.present)
        lines.append(f"The cpu platform cannot run: {missing}")
    return lines


def _python() -> Iterator[MachinePart]:
    yield MachinePart(
        "python", sys.version_info >= (3, 11), f"{platform.python_version()} {sys.executable}", needed=True
    )
    yield from _package("pytest", needed=True, remedy="pip install 'pytest>=8.4'")


def _package(name: str, *, needed: bool = False, remedy: str) -> Iterator[MachinePart]:
    try:
        yield MachinePart(name, True, importlib.metadata.version(name), needed)
    except importlib.metadata.PackageNotFoundError:
        yield MachinePart(name, False, "not installed", needed, remedy)


def _extensions() -> Iterator[MachinePart]:
    """What other packages register, and whether it is what it is registered as."""
    from pytest_klineage.operators import find_operator
    from pytest_klineage.records import gpu_platform
    from pytest_klineage.references import reference
    from pytest_klineage.surfaces import surface_backend

    take: dict[str, Callable[[str], object]] = {
        "operators": find_operator, "references": reference, "surfaces": surface_backend, "platforms": gpu_platform,
    }  # fmt: skip
    for kind in GROUPS:
        for name, extension in extensions(kind).items():
            try:
                take[kind](name)
            except UsageError as error:
                yield MachinePart(f"{kind[:-1]} {name}", False, str(error))
            else:
                yield MachinePart(f"{kind[:-1]} {name}", True, f"{extension.package} ({extension.point.value})")


def _compiler() -> Iterator[MachinePart]:
    from pytest_klineage.surfaces.cpp import compiler_version, find_compiler

    try:
        compiler = find_compiler()
        yield MachinePart("C++ compiler", True, f"{compiler_version(compiler)} ({compiler})", needed=True)
    except MissingDependency as error:
        detail = f"{error.what} is missing"
        yield MachinePart("C++ compiler", False, detail, needed=True, remedy=error.remedy)
        return
    problem, threads = _openmp(compiler)
    detail = problem or f"{threads} threads"
    yield MachinePart("OpenMP", not problem, detail, needed=True, remedy="apt-get install g++ libomp-dev")


def _openmp(compiler: str) -> tuple[str, str]:
    """Build and run five lines. Returns what went wrong (empty when nothing) and how many threads ran."""
    with tempfile.TemporaryDirectory(prefix="klineage-doctor-") as directory:
        source, program = Path(directory, "probe.cpp"), Path(directory, "probe")
        source.write_text(PROBE_SOURCE)
        built = _run([compiler, "-fopenmp", str(source), "-o", str(program)])
        if built is None or built.returncode:
            words = (built.stderr if built else "the compiler did not end").strip().splitlines()
            return (words[-1] if words else "the compiler failed"), ""
        ran = _run([str(program)])
        if ran is None or ran.returncode:
            return "a program built with -fopenmp does not run", ""
        return "", ran.stdout.strip()


def _cuda_compiler() -> Iterator[MachinePart]:
    from pytest_klineage.surfaces.toolkit import INSTALL, find_disassembler, find_headers, find_nvcc, find_toolkit

    try:
        nvcc = find_nvcc()
        yield MachinePart("nvcc", True, f"{find_toolkit().version} ({nvcc})")
    except MissingDependency as error:
        yield MachinePart("nvcc", False, f"{error.what} is missing; needed to build CUDA kernels", remedy=error.remedy)
    found = find_disassembler()
    detail = f"{found.description} ({found.cuobjdump})" if found else "not installed; for instructions of CUDA kernels"
    yield MachinePart("cuobjdump", found is not None, detail, remedy=INSTALL)
    try:
        yield MachinePart("CUTLASS headers", True, find_headers("cutlass").version)
    except MissingDependency as error:
        yield MachinePart("CUTLASS headers", False, "not installed; for --include=cutlass", remedy=error.remedy)


def _gpu() -> Iterator[MachinePart]:
    from pytest_klineage.gate.host.survey import gpu_parts

    yield from (MachinePart(part.name, part.present, part.detail, remedy=part.remedy) for part in gpu_parts())


def _sandbox() -> Iterator[MachinePart]:
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION_FLAG) if sys.platform == "linux" else -1
    detail = f"ABI {abi}: kernels cannot write outside their folder" if abi > 0 else "not in this kernel"
    yield MachinePart("Landlock", abi > 0, detail)
    seccomp = Path("/proc/sys/kernel/seccomp/actions_avail").exists()
    yield MachinePart("seccomp", seccomp, "system calls can be filtered" if seccomp else "not in this kernel")
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({CLONE_NEW_USER_AND_NET}) != 0)"
    tried = _run([sys.executable, "-I", "-c", code])
    spaces = tried is not None and tried.returncode == 0
    yield MachinePart(
        "namespaces", spaces, "kernels run without a network" if spaces else "user namespaces are not allowed here",
        remedy="sysctl -w user.max_user_namespaces=15000   (as root; containers often forbid it)",
    )  # fmt: skip


def _resources() -> Iterator[MachinePart]:
    from pytest_klineage.gate.host.cpu import usable_cores

    cores = usable_cores()
    yield MachinePart("cores", True, f"{cores} usable" + (": timings are noisy with one" if cores == 1 else ""))
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        yield MachinePart("/dev/shm", False, f"cannot be used: {error.strerror}", needed=True)
        return
    yield MachinePart(
        "/dev/shm", free >= LEAST_SHM_BYTES, f"{free >> 20} MB free", needed=True,
        remedy="mount -o remount,size=2G /dev/shm   (docker run --shm-size=2g)",
    )  # fmt: skip


def _cache(cache_dir: Path | None) -> Iterator[MachinePart]:
    from pytest_klineage.gate import GateSettings

    path = cache_dir or GateSettings().cache_dir
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    size = _size_mb(path) if path.is_dir() else 0
    detail = f"{path}: {size} MB" if writable else f"{path} cannot be written"
    yield MachinePart("cache", writable, detail, needed=True, remedy="pytest --klineage-cache-dir DIR")


def _size_mb(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total >> 20


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a probe; None when it is not installed or does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
