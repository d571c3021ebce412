"""The cuda surface: CUDA C++ built by nvcc for one architecture into a shared library of the native ABI.

No device is needed to build. What is asked for (source, flags, architecture) is kept apart from what it is made with
(toolkit, host compiler, versions of headers): see `recipe` and surfaces/artifacts.py.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import ClassVar

from pytest_klineage.records import GPU_PLATFORMS, Build, Code, KernelSource, Surface, gpu_platform
from pytest_klineage.surfaces import artifacts
from pytest_klineage.surfaces.base import Built, LoadedKernel, SurfaceBackend, SurfaceFailure
from pytest_klineage.surfaces.compiling import bounded, compile_once, digest_of, scratch
from pytest_klineage.surfaces.elf import check_entry
from pytest_klineage.surfaces.native import HEADER, INCLUDE_DIR, NativeKernel, shared_headers
from pytest_klineage.surfaces.resources import parse_ptxas, with_instructions
from pytest_klineage.surfaces.toolkit import HEADER_LIBRARIES, HeaderLibrary, Toolkit, find_headers, find_toolkit

BASE_FLAGS = ("-shared", "-Xcompiler=-fPIC", "--cudart=static", "-lineinfo", "-Xptxas=-v")
DEFAULT_FLAGS = {"-std": "-std=c++17", "-O": "-O3"}
"""By option. nvcc takes each of them once: a source's own replaces it, all its other flags come on top."""
PTXAS_FLAG = (
    r"-O[0-3]|-d[ls]cm=[a-z]{2}|--def-(load|store)-cache=[a-z]{2}|--warn-on-(spills|local-memory-usage)"
    r"|--allow-expensive-optimizations=(true|false)"
)
ALLOWED_FLAGS = (
    r"-O[0-3]", r"-std=c\+\+\d\d", r"-D\w+(=[\w.+-]*)?", r"--?use_fast_math", r"--?maxrregcount=\d{1,3}",
    r"--expt-relaxed-constexpr", r"--(extended|expt-extended)-lambda", r"--(ftz|prec-div|prec-sqrt|fmad)=(true|false)",
    r"--diag-suppress=\d+(,\d+)*", rf"-Xptxas=({PTXAS_FLAG})(,({PTXAS_FLAG}))*", r"-lcuda",
)  # fmt: skip
"""What a source may ask of nvcc; `--include=NAME` is ours. What names a file or another library is not here."""
INCLUDE = "--include="
DRIVER = "-lcuda"
STUB = "stub.cpp"
RESOURCE_LOG_LIMIT = 8 << 20
"""Characters of compiler output that are read for resources; templates have names of thousands of characters."""


class CudaBackend(SurfaceBackend):
    """Builds one translation unit; further files lie beside it and may be included by name."""

    surface: ClassVar[Surface] = Surface.CUDA
    platforms: ClassVar[tuple[str, ...]] = tuple(GPU_PLATFORMS)
    needs_torch: ClassVar[bool] = False

    def build(self, source: KernelSource, cache: Path, *, platform: str, timeout_s: float) -> Built:
        recipe, shown = self.recipe(source, platform=platform), shown_command(source, platform)
        toolkit = find_toolkit(platform)
        headers = [find_headers(flag.removeprefix(INCLUDE)) for flag in source.flags if flag.startswith(INCLUDE)]
        digest = digest_of(recipe, toolkit.description, *(f"{item.name} {item.version}" for item in headers))
        directory = cache / "cuda" / digest
        if (hit := artifacts.cached(directory)) is not None:
            return hit
        with scratch(cache) as staging:
            for file in source.files:
                (staging / file.name).write_text(file.text)
            if DRIVER in source.flags:
                make_driver_stub(toolkit, staging, timeout_s)
            command = command_on(toolkit, headers, shown)
            log, seconds = compile_once(command, staging, timeout_s=timeout_s, limit=RESOURCE_LOG_LIMIT)
            kernels, said = parse_ptxas(log)
            library = staging / artifacts.LIBRARY
            content = library.read_bytes()
            check_entry(content, source.entry)
            build = Build(
                digest=digest, recipe=recipe, platform=platform, command=shlex.join(shown), seconds=seconds,
                toolchain=toolkit.description, log=bounded(said),
                includes=includes_of(source, headers),
                kernels=with_instructions(kernels, library, toolkit.disassembler),
            )  # fmt: skip
            return artifacts.publish(directory, content, source, build)

    def recipe(self, source: KernelSource, *, platform: str) -> str:
        shown = shlex.join(shown_command(source, platform))
        shared = (f"{header.name}\n{header.text}" for header in shared_headers(source))
        return digest_of(source.digest, HEADER.read_bytes(), *shared, shown, os.uname().machine)

    def load(self, artifact: Path, entry: str, module: str) -> LoadedKernel:
        return NativeKernel(artifact, entry)


def includes_of(source: KernelSource, libraries: list[HeaderLibrary]) -> dict[str, str]:
    """What a build included beside its own files: versions of libraries, digests of the package's own headers."""
    shared = {header.name: f"sha256 {header.digest}" for header in shared_headers(source)}
    return {library.name: library.version for library in libraries} | shared


def shown_command(source: KernelSource, platform: str) -> list[str]:
    """The command without paths of this machine. Raises SurfaceFailure for a source that cannot be built."""
    check_flags(source.flags)
    if source.main is None:
        raise SurfaceFailure(Code.SOURCE_MISSING, "a cuda kernel needs a source file")
    architecture = gpu_platform(platform).target
    own = source.flags
    defaults = [flag for option, flag in DEFAULT_FLAGS.items() if not any(one.startswith(option) for one in own)]
    return [
        "nvcc", f"-gencode=arch=compute_{architecture},code=sm_{architecture}", *BASE_FLAGS, *defaults, *source.flags,
        source.main.name, "-o", artifacts.LIBRARY,
    ]  # fmt: skip


def command_on(toolkit: Toolkit, headers: list[HeaderLibrary], shown: list[str]) -> list[str]:
    """The command with this machine's compilers and folders."""
    here = [toolkit.nvcc, f"-ccbin={toolkit.host_compiler}", f"-I{INCLUDE_DIR}"]
    here += [f"-I{folder}" for item in headers for folder in item.folders]
    here += [f"-L{folder}" for folder in toolkit.library_dirs]
    if DRIVER in shown:
        # Ubuntu's linker leaves out a library that no symbol was found in, and the stub has none.
        here += ["-L.", "-Xlinker=--no-as-needed"]
    else:
        # A name that no library has would otherwise be found when the kernel is loaded, which needs a device.
        here.append("-Xlinker=-z,defs")
    return here + [part for part in shown[1:] if not part.startswith(INCLUDE)]


def make_driver_stub(toolkit: Toolkit, directory: Path, timeout_s: float) -> None:
    """Put an empty libcuda.so to link with into `directory`: the driver's library is not there without a driver."""
    (directory / STUB).write_text("")
    command = [toolkit.host_compiler, "-shared", "-Wl,-soname,libcuda.so.1", STUB, "-o", "libcuda.so"]
    compile_once(command, directory, timeout_s=timeout_s)


def check_flags(flags: tuple[str, ...]) -> None:
    """Raise SurfaceFailure for a flag that is not on the allow-list, or a header library that is not known."""
    for flag in flags:
        if flag.startswith(INCLUDE):
            if flag.removeprefix(INCLUDE) not in HEADER_LIBRARIES:
                valid = ", ".join(sorted(HEADER_LIBRARIES))
                said = f"{flag!r} names no header library that is known here; valid: {valid}. Own files go into also="
                raise SurfaceFailure(Code.FLAG_REFUSED, said)
        elif not any(re.fullmatch(pattern, flag) for pattern in ALLOWED_FLAGS):
            where = "the list is in docs/reference/surfaces.md, and the architecture is the platform's"
            raise SurfaceFailure(Code.FLAG_REFUSED, f"the compiler flag {flag!r} is not allowed; {where}")
