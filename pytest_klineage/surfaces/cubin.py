"""What ptxas and a disassembler say of the cubins that were compiled ahead of a run. Nothing is compiled here."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_klineage.records import Code, KernelResources
from pytest_klineage.surfaces.base import SurfaceFailure
from pytest_klineage.surfaces.compiling import bounded
from pytest_klineage.surfaces.resources import parse_ptxas, resource_usage, with_instructions
from pytest_klineage.surfaces.toolkit import Disassembler, find_disassembler

SHARED_LIMIT = {"sm90": 232_448, "sm120": 101_376}
"""Shared memory that one block can have, in bytes: 227 kB and 99 kB (CUDA programming guide, compute capabilities)."""


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled declaration, as the compiling process reports it."""

    name: str
    """The kernel's name in the cubin."""
    file: str
    """Its cubin."""
    log: str
    """What ptxas said."""
    shared_bytes: int
    """Dynamic shared memory of a block; 0 when unknown."""


def resources(units: tuple[Unit, ...], folder: Path, platform: str) -> tuple[KernelResources, ...]:
    """Registers, spills and instructions of compiled kernels, whose cubins lie in a folder. Raises SurfaceFailure."""
    disassembler = find_disassembler()
    found: list[KernelResources] = []
    for unit in units:
        check_shared(unit.name, unit.shared_bytes, platform)
        cubin = folder / unit.file
        found += with_instructions(registers(unit, cubin, disassembler), cubin, disassembler)
    return tuple(found)


def registers(unit: Unit, cubin: Path, disassembler: Disassembler | None) -> tuple[KernelResources, ...]:
    """What ptxas said of a kernel; what stands in its cubin where it said nothing. Raises SurfaceFailure."""
    # The ptxas for sm120 in Triton's wheel goes by another name.
    kernels, _rest = parse_ptxas(unit.log.replace("ptxas-blackwell info", "ptxas info"))
    if not kernels and disassembler is not None:
        kernels = resource_usage(cubin, disassembler)
    if not kernels:
        message = f"ptxas said nothing of {unit.name:.200}; install cuobjdump and nvdisasm, or leave sys.stdout alone"
        raise SurfaceFailure(Code.COMPILE, message, log=bounded(unit.log))
    return kernels


def check_shared(name: str, shared_bytes: int, platform: str) -> None:
    """Raise SurfaceFailure for a kernel that the platform could not launch."""
    if shared_bytes > SHARED_LIMIT[platform]:
        raise SurfaceFailure(
            Code.COMPILE,
            f"{name} needs {shared_bytes} bytes of shared memory, a block on {platform} has {SHARED_LIMIT[platform]}; "
            "make the tiles or the number of stages smaller",
        )
