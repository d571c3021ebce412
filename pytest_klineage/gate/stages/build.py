"""Building a kernel, or taking it from a folder of artifacts, and what a case demands of its resources."""

from __future__ import annotations

import re

import msgspec

from pytest_klineage.errors import MissingDependency
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.gate.stages.attribute import Owner, owner_of
from pytest_klineage.records import Build, Code, KernelCase, KernelResources, KernelSource, Reason, Surface
from pytest_klineage.surfaces import Built, SurfaceFailure, artifacts, surface_backend
from pytest_klineage.surfaces.toolkit import INSTALL

AHEAD = frozenset({Surface.CUDA})
"""Surfaces whose GPU kernels all exist once they are built. Others build them when they run, or have none."""
OWN_NAME = "candidate_kernel_"
"""With a number: what a kernel is called whose own name looks like a vendor's. No vendor's kernel has such a name."""
SHOWN_KERNELS = 4
"""Kernels that a message names; the record has all."""


def build_kernel(source: KernelSource, platform: str, settings: GateSettings) -> Built:
    """Build for a platform, by way of the artifacts when there is a folder of them.

    In a whole judgement a matching artifact takes the place of the build, also where there is no compiler; in the
    compile stage everything is built, and written there. Raises SurfaceFailure, or MissingDependency.
    """
    backend = surface_backend(source.surface.value)
    recipe = backend.recipe(source, platform=platform) if settings.artifacts else ""
    if settings.artifacts and recipe and settings.stage == "all":
        taken = artifacts.take(settings.artifacts, recipe, source, settings.cache_dir)
        if taken is not None:
            return taken
    built = backend.build(source, settings.cache_dir, platform=platform, timeout_s=settings.build_timeout_s)
    if source.surface in AHEAD and (renames := own_names(built.build)):
        built = _renamed(built, source, renames, settings)
    if settings.artifacts and recipe and settings.stage == "compile":
        artifacts.store(settings.artifacts, built, source)
    return built


def own_names(build: Build) -> tuple[str, ...]:
    """Macros that rename the kernels of a build whose names look like a vendor's or the framework's.

    Whose kernel was executed is read from its name. Kernels that the source defines get unique names; a
    library's kernel keeps its name, so a kernel of the same name beside it (a decoy) makes nothing the candidate's own.
    """
    names = sorted({kernel.function for kernel in build.kernels})
    foreign = [name for name in names if owner_of(f"{name}<") is not Owner.OWN]
    return tuple(f"-D{name}={OWN_NAME}{number}" for number, name in enumerate(foreign, 1))


def _renamed(built: Built, source: KernelSource, renames: tuple[str, ...], settings: GateSettings) -> Built:
    """The same source with other names, under the same recipe; as it was built, where that cannot be compiled."""
    other = msgspec.structs.replace(source, flags=(*source.flags, *renames))
    backend, platform = surface_backend(source.surface.value), built.build.platform
    try:
        again = backend.build(other, settings.cache_dir, platform=platform, timeout_s=settings.build_timeout_s)
    except SurfaceFailure:
        return built
    return Built(artifact=again.artifact, build=msgspec.structs.replace(again.build, recipe=built.build.recipe))


def renamed_notes(build: Build) -> tuple[str, ...]:
    """A note for every kernel that was built under another name."""
    found = re.findall(rf"-D(\w+)=({OWN_NAME}\d+)", build.command)
    return tuple(f"the kernel {old} is built as {new}: its own name looks like a library's" for old, new in found)


def resource_reasons(case: KernelCase, build: Build, surface: Surface) -> tuple[Reason, ...]:
    """What the case demands of registers and instructions and the kernels have not.

    Raises MissingDependency when instructions are demanded and cannot be read.
    """
    if not build.kernels and surface not in AHEAD:
        return ()
    reasons = []
    if case.max_spills is not None:
        over = [kernel for kernel in build.kernels if kernel.spill_bytes > case.max_spills]
        reasons += [_spills(kernel, case.max_spills) for kernel in over]
    if case.requires and any(kernel.instructions is None for kernel in build.kernels):
        raise MissingDependency("cuobjdump with nvdisasm, to find the instructions that the case requires,", INSTALL)
    found = {word for kernel in build.kernels for word in kernel.instructions or ()}
    reasons += [_missing(word, build.kernels) for word in case.requires if word not in found]
    return tuple(reasons)


def build_notes(case: KernelCase, build: Build, surface: Surface) -> tuple[str, ...]:
    """What a reader of the verdict should know of the build."""
    return unchecked_notes(case, build, surface) + renamed_notes(build)


def unchecked_notes(case: KernelCase, build: Build, surface: Surface) -> tuple[str, ...]:
    """A note when the case demands something that only GPU kernels that were built ahead of the run could show."""
    if build.kernels or surface in AHEAD or (case.max_spills is None and not case.requires):
        return ()
    return ("max_spills and requires of the case were not checked: no GPU kernel was built ahead of the run",)


def built_reason(build: Build) -> Reason:
    """The reason of a kernel that the compile stage accepts."""
    if not build.kernels:
        return Reason(code=Code.ACCEPTED_BUILT, message="ready to load; no GPU kernel is built ahead of a run")
    count = len(build.kernels)
    registers = max(kernel.registers for kernel in build.kernels)
    spills = max(kernel.spill_bytes for kernel in build.kernels)
    return Reason(
        code=Code.ACCEPTED_BUILT,
        message=f"built for {build.platform}: {count} {'kernel' if count == 1 else 'kernels'}, at most {registers}"
        f" registers, {spills} bytes spilled",
        evidence={"kernels": count, "registers": registers, "spill_bytes": spills},
    )


def _spills(kernel: KernelResources, allowed: int) -> Reason:
    name = kernel.function
    return Reason(
        code=Code.SPILLS,
        message=f"{name} spills {kernel.spill_bytes} bytes per thread at {kernel.registers} registers,"
        f" {allowed} allowed",
        evidence={
            "kernel": name, "registers": kernel.registers, "spill_store_bytes": kernel.spill_store_bytes,
            "spill_load_bytes": kernel.spill_load_bytes, "max_spills": allowed,
        },
    )  # fmt: skip


def _missing(word: str, kernels: tuple[KernelResources, ...]) -> Reason:
    shown = [f"{kernel.function}: {', '.join(kernel.instructions or ()) or 'none'}" for kernel in kernels]
    more = f"; and {len(shown) - SHOWN_KERNELS} more" if len(shown) > SHOWN_KERNELS else ""
    found = f"found {'; '.join(shown[:SHOWN_KERNELS])}{more}" if shown else "there is no GPU kernel in it"
    return Reason(
        code=Code.MISSING_INSTRUCTION,
        message=f"no kernel has {word}: {found}",
        evidence={"required": word, "kernels": len(kernels)},
    )
