"""The cpp surface: C++17 with OpenMP, built by the system's compiler into a shared library of the native ABI."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

import msgspec

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import Build, Code, KernelSource, Surface
from pytest_klineage.surfaces import artifacts
from pytest_klineage.surfaces.base import Built, LoadedKernel, SurfaceBackend, SurfaceFailure
from pytest_klineage.surfaces.compiling import compile_once, digest_of, scratch
from pytest_klineage.surfaces.elf import check_entry
from pytest_klineage.surfaces.native import HEADER, INCLUDE_DIR, NativeKernel
from pytest_klineage.surfaces.reads import ASSEMBLED, INCLUDED, foreign_reads

BASE_FLAGS = ("-std=c++17", "-shared", "-fPIC", "-fvisibility=default")
DEFAULT_FLAGS = ("-O3", "-fopenmp")
ALLOWED_FLAGS = (
    r"-O([0-3sg]|fast)?", r"-g", r"-std=(c|gnu)\+\+\d\d", r"-fopenmp(-simd)?", r"-m[a-z0-9][a-z0-9.-]*(=[\w.+-]+)?",
    r"-f(no-)?[a-z][a-z0-9-]*", r"-D\w+(=[\w.+-]*)?", r"-W[a-z][a-z-]*", r"--param=[a-z-]+=\d+",
)  # fmt: skip
"""What a source may ask of the compiler. Anything that names a file, a library or a plugin is not here."""
LISTING = ("-MD", "-MF", INCLUDED, f"-Wa,--MD,{ASSEMBLED}", "-fno-lto")
"""Has compiler and assembler list what they read; under -flto the assembler would work for the linker, unlisted."""


class CppBackend(SurfaceBackend):
    """Builds one translation unit; further files lie beside it and may be included by name."""

    surface: ClassVar[Surface] = Surface.CPP
    platforms: ClassVar[tuple[str, ...]] = ("cpu",)
    needs_torch: ClassVar[bool] = False

    def build(self, source: KernelSource, cache: Path, *, platform: str, timeout_s: float) -> Built:
        shown = shown_command(source)
        compiler = find_compiler()
        toolchain = compiler_version(compiler)
        command = [compiler, f"-I{INCLUDE_DIR}", *shown[1:-2], *listing(toolchain), *shown[-2:]]
        digest = digest_of(source.digest, HEADER.read_bytes(), toolchain, shlex.join(shown), *LISTING)
        build = Build(
            digest=digest, recipe=self.recipe(source, platform=platform), platform=platform, command=shlex.join(shown),
            toolchain=toolchain,
        )  # fmt: skip
        published = cache / "cpp" / digest
        if (hit := artifacts.cached(published)) is not None:
            return hit
        with scratch(cache) as directory:
            for file in source.files:
                (directory / file.name).write_text(file.text)
            log, seconds = compile_once(command, directory, timeout_s=timeout_s)
            content = (directory / "kernel.so").read_bytes()
            check_entry(content, source.entry)
            reads = foreign_reads(directory, lambda: header_folders(compiler))
            build = msgspec.structs.replace(build, seconds=seconds, log=log, reads=reads)
            return artifacts.publish(published, content, source, build)

    def recipe(self, source: KernelSource, *, platform: str) -> str:
        return digest_of(source.digest, HEADER.read_bytes(), shlex.join(shown_command(source)), os.uname().machine)

    def load(self, artifact: Path, entry: str, module: str) -> LoadedKernel:
        return NativeKernel(artifact, entry)


def listing(toolchain: str) -> tuple[str, ...]:
    """Flags that have everything listed; Clang's own assembler lists nothing."""
    return (*LISTING, "-fno-integrated-as") if "clang" in toolchain else LISTING


def shown_command(source: KernelSource) -> list[str]:
    """The command without paths of this machine. Raises SurfaceFailure for a source that cannot be built."""
    flags = source.flags or DEFAULT_FLAGS
    check_flags(flags)
    if source.main is None:
        raise SurfaceFailure(Code.SOURCE_MISSING, "a cpp kernel needs a source file")
    return ["g++", *BASE_FLAGS, *flags, source.main.name, "-o", artifacts.LIBRARY]


def check_flags(flags: tuple[str, ...]) -> None:
    """Raise SurfaceFailure for a flag that is not on the allow-list."""
    for flag in flags:
        if flag.endswith("=native"):
            said = f"{flag!r} builds another kernel on every machine; name the architecture, such as -march=x86-64-v4"
            raise SurfaceFailure(Code.FLAG_REFUSED, said)
        if not any(re.fullmatch(pattern, flag) for pattern in ALLOWED_FLAGS):
            said = f"the compiler flag {flag!r} is not allowed; -O, -m, -f, -D, -W and -std flags without files are"
            raise SurfaceFailure(Code.FLAG_REFUSED, said)


def find_compiler() -> str:
    """Path of the C++ compiler: what $CXX names when it is set, else g++, c++ or clang++. Raises MissingDependency."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        if path := shutil.which(chosen):
            return path
        # Another compiler in its place would give other figures than the ones that were asked for.
        remedy = "apt-get install g++   (and unset CXX, or let it name one program, without arguments)"
        raise MissingDependency(f"the C++ compiler that CXX names, {chosen!r},", remedy)
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return path
    raise MissingDependency("a C++ compiler", "apt-get install g++   (or set CXX)")


@functools.lru_cache
def compiler_version(compiler: str) -> str:
    """First line of `--version`."""
    out = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return out.partition("\n")[0].strip() or compiler


@functools.lru_cache
def header_folders(compiler: str) -> tuple[str, ...]:
    """Folders in which a compiler looks for headers by itself, as it lists them under -v."""
    out = subprocess.run(
        [compiler, "-E", "-v", "-x", "c++", os.devnull], capture_output=True, text=True, timeout=30, check=False
    ).stderr
    listed = out.partition("#include <...> search starts here:")[2].partition("End of search list.")[0]
    return tuple(line.strip() for line in listed.splitlines() if line.strip())
