"""Surfaces of languages that compile just in time: what their Python files declare in COMPILE is built ahead of a run.

Calling a kernel is the python surface's business, and so is what the language compiles at run time. The process that
compiles is ahead.py; what is said about one language lives in its own module.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import msgspec

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import GPU_PLATFORMS, Build, Code, KernelSource
from pytest_klineage.surfaces.base import Built, LoadedKernel, SurfaceFailure
from pytest_klineage.surfaces.compiling import bounded, digest_of, scratch
from pytest_klineage.surfaces.declared import AHEAD, Compiled, CompileTarget, compile_ahead, is_plain
from pytest_klineage.surfaces.python import PythonBackend, lay_out, parse, publish
from pytest_klineage.surfaces.resources import resources

HIDDEN = ".build"
"""Folder of an artifact with what was compiled; no source file can have such a name."""
DESCRIPTION = "build.json"
CACHE = "cache"
"""Where an artifact keeps the entries of the language's cache; below its folder in a home, it has the same name."""
NOTHING_DECLARED = "COMPILE declares nothing for {platform}: everything is compiled when the kernel first runs"


class JitBackend(PythonBackend):
    """A language of Python files: COMPILE is built here, the entry is called as on the python surface.

    What a run asks for and COMPILE does not declare is compiled by the language itself, when it is first called.
    """

    platforms: ClassVar[tuple[str, ...]] = tuple(GPU_PLATFORMS)
    allow_processes: ClassVar[bool] = True
    package: ClassVar[str]
    """What is imported and installed."""
    title: ClassVar[str]
    """What people call it."""
    cache_variables: ClassVar[tuple[str, ...]]
    """Environment variables that name the folders of its just-in-time compiler, that of its cache first."""
    kept: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the files of a cache's entry that it needs to take a kernel from there."""

    @abstractmethod
    def arch(self, platform: str) -> int | str:
        """What the language calls a platform."""

    @abstractmethod
    def toolchain(self) -> str:
        """Names and versions of everything that has a say in the result. Raises MissingDependency."""

    def environment(self) -> dict[str, str]:
        """Variables that the compiling process needs beyond those of every build."""
        return {}

    def programs(self) -> tuple[str, ...]:
        """Paths of the compilers that the compiling process starts, beside those in the language's own package."""
        return ()

    def keep(self, directory: Path, hidden: Path) -> None:
        """Put the language's cache, which the build in `directory` has filled, into the artifact. Raises OSError."""
        copy_entries(directory / f".{self.package}" / CACHE, hidden / CACHE, self.kept)

    def unpack(self, hidden: Path) -> None:
        """Hand what was kept to the language's just-in-time compiler, in a worker."""
        copy_entries(hidden / CACHE, Path(os.environ[self.cache_variables[0]]), self.kept)

    def build(self, source: KernelSource, cache: Path, *, platform: str, timeout_s: float) -> Built:
        check_source(source)
        toolchain = f"{self.title} {installed_version(self.package, self.title)}, {self.toolchain()}"
        digest = digest_of(source.digest, platform, toolchain, sys.version, AHEAD.read_bytes())
        artifact = cache / self.surface.value / digest
        if (hit := cached_build(artifact)) is not None:
            return hit
        with scratch(cache) as directory:
            started = time.monotonic()
            target = CompileTarget(
                platform=platform, arch=self.arch(platform), environment=self.environment(), programs=self.programs()
            )  # fmt: skip
            compiled = compile_ahead(source, directory, target, timeout_s=timeout_s)
            kernels = resources(compiled.answer.units, compiled.out, platform)
            build = Build(
                digest=digest, platform=platform, command=f"{self.package}: COMPILE for {self.arch(platform)}",
                toolchain=toolchain, seconds=time.monotonic() - started, log=report(compiled, platform),
                kernels=kernels,
            )  # fmt: skip
            staging = stage(source, compiled, directory / "artifact", build)
            self.keep(directory, staging / HIDDEN)
            publish(staging, artifact)
        return Built(artifact=artifact, build=build)

    def load(self, artifact: Path, entry: str, module: str) -> LoadedKernel:
        for name in self.cache_variables:
            os.environ[name] = str(Path.home() / name.lower())
        self.unpack(artifact / HIDDEN)
        return super().load(artifact, entry, module)


def installed_version(package: str, what: str) -> str:
    """Version of an installed package, without importing it. Raises MissingDependency."""
    if importlib.util.find_spec(package) is None:
        raise MissingDependency(what, f"pip install 'pytest-klineage[{package}]'")
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def check_source(source: KernelSource) -> None:
    """Raise SurfaceFailure for a source without a file, with flags, or that is not Python."""
    if source.main is None:
        raise SurfaceFailure(Code.SOURCE_MISSING, f"a {source.surface.value} kernel needs a source file")
    if source.flags:
        raise SurfaceFailure(
            Code.FLAG_REFUSED, f"a {source.surface.value} kernel takes no flags; options belong into its COMPILE"
        )
    parse(source.main.name, source.main.text)


def cached_build(artifact: Path) -> Built | None:
    """What an earlier build has published; None when there is nothing, or something damaged, which is removed."""
    try:
        build = msgspec.json.decode((artifact / HIDDEN / DESCRIPTION).read_bytes(), type=Build)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError):
        shutil.rmtree(artifact, ignore_errors=True)
        return None
    return Built(artifact=artifact, build=msgspec.structs.replace(build, cached=True, seconds=0.0))


def stage(source: KernelSource, compiled: Compiled, staging: Path, build: Build) -> Path:
    """Lay out an artifact: the source's files, as they were given, and what was compiled. Raises OSError."""
    # Not the folder that was compiled: the candidate's code has run there.
    lay_out(source, staging)
    hidden = staging / HIDDEN
    hidden.mkdir()
    for unit in compiled.answer.units:
        (hidden / unit.file).write_bytes((compiled.out / unit.file).read_bytes())
    (hidden / DESCRIPTION).write_bytes(msgspec.json.encode(build))
    return staging


def report(compiled: Compiled, platform: str) -> str:
    """The log of a build: shared memory of each kernel, and what the compiler printed."""
    units = compiled.answer.units
    lines = [f"{item.name:.200}: {item.shared_bytes} bytes of shared memory" for item in units if item.shared_bytes]
    if not units:
        lines.append(NOTHING_DECLARED.format(platform=platform))
    return bounded("\n".join([*lines, compiled.log]).strip())


def copy_entries(source: Path, target: Path, suffixes: tuple[str, ...]) -> None:
    """Copy the entries of a just-in-time compiler's cache: a folder each, with files of these suffixes.

    They come from a process that the candidate shared: only plain files are taken, and no folder below an entry. Raises
    OSError.
    """
    for entry in sorted(source.glob("*")):
        if not entry.is_dir() or entry.is_symlink():
            continue
        for path in sorted(entry.iterdir()):
            if path.suffix in suffixes and is_plain(path):
                (target / entry.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / entry.name / path.name)
