"""What a compiler gave each GPU kernel: registers, spills, shared memory, instructions. Parses text; runs cuobjdump.

`nvcc -Xptxas -v` and `cuobjdump -res-usage` print resources, `cuobjdump -sass` the machine code. The parsers are pure
functions. What is held against them (`max_spills`, `requires` of a case) is the gate's business.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pytest_klineage.records import Code, KernelResources, gpu_platform
from pytest_klineage.surfaces.base import SurfaceFailure
from pytest_klineage.surfaces.compiling import bounded
from pytest_klineage.surfaces.toolkit import Disassembler, find_disassembler

OPCODES = (
    (r"[HIQB]GMMA", "wgmma"),
    (r"UTC[A-Z]*MMA", "tcgen05"),
    (r"[HIDQBO]MMA", "mma"),
    (r"UTMALDG", "tma_load"),
    (r"UTMASTG", "tma_store"),
    (r"UTMAREDG", "tma_reduce"),
    (r"UTMAPF", "tma_prefetch"),
    (r"UBLKCP|UBLKRED|UBLKPF", "bulk_copy"),
    (r"LDGSTS", "cp_async"),
    (r"LDSM", "ldmatrix"),
    (r"STSM", "stmatrix"),
    (r"SYNCS", "mbarrier"),
    (r"USETMAXREG", "setmaxnreg"),
    (r"UCGABAR_(ARV|WAIT)", "cluster"),
)
"""Opcodes of the machine code (sm_80 to sm_120) and what records.case.INSTRUCTIONS calls them."""
MULTICAST = "MULTICAST"
"""Modifier of a bulk copy that goes to several blocks of a cluster."""

ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '([^']+)' for '[^']+'")
PROPERTIES = re.compile(r"ptxas info\s*: Function properties for (\S+)")
FRAME = re.compile(r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"ptxas info\s*: Used (\d+) registers(?:.*?, (\d+) bytes smem)?")
IDLE = re.compile(r"ptxas info\s*: (\d+ bytes gmem|Compile time = )")
USAGE_FUNCTION = re.compile(r"\s*Function\s+(\S+?):?\s*$")
USAGE = re.compile(r"\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)")
SASS_FUNCTION = re.compile(r"\s*Function : (\S+)")
SASS_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)")
DISASSEMBLY_LIMIT_S = 120.0
RESERVED_SHARED_BYTES = 1024
"""Of each block's shared memory, since sm_80."""


def parse_ptxas(log: str) -> tuple[tuple[KernelResources, ...], str]:
    """Resources from the output of `-Xptxas -v`, by name, and the lines that were something else.

    A function that kernels call, rather than have inlined, is listed when it spills, with no registers of its own:
    these spills cost as much as a kernel's.
    """
    found: dict[str, KernelResources] = {}
    rest: list[str] = []
    entry = owner = ""

    def note(name: str, **fields: int) -> None:
        known = found.get(name, KernelResources(name=name, registers=0))
        found[name] = msgspec.structs.replace(known, **fields)

    for line in log.splitlines():
        if match := ENTRY.match(line):
            entry = match[1]
        elif match := PROPERTIES.match(line):
            owner = match[1]
        elif (match := FRAME.match(line)) and owner:
            stack, stores, loads = map(int, match.groups())
            note(owner, stack_bytes=stack, spill_store_bytes=stores, spill_load_bytes=loads)
        elif (match := USED.match(line)) and entry:
            note(entry, registers=int(match[1]), static_shared_bytes=int(match[2] or 0))
        elif not IDLE.match(line):
            rest.append(line)
    kernels = (found[name] for name in sorted(found))
    return tuple(kernel for kernel in kernels if kernel.registers or kernel.spill_bytes), "\n".join(rest)


def parse_usage(text: str) -> tuple[KernelResources, ...]:
    """Resources from `cuobjdump -res-usage`, by name. It does not separate spills from other local memory.

    Where a kernel has shared memory, the figure includes what the system keeps for itself, and is given here without.
    """
    found, name = [], ""
    for line in text.splitlines():
        if match := USAGE.match(line):
            registers, stack, shared = map(int, match.groups())
            own = max(0, shared - RESERVED_SHARED_BYTES)
            found.append(KernelResources(name=name, registers=registers, stack_bytes=stack, static_shared_bytes=own))
        elif match := USAGE_FUNCTION.match(line):
            name = match[1]
    return tuple(sorted(found, key=lambda kernel: kernel.name))


def parse_sass(lines: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The instructions that matter in each function, from the output of `cuobjdump -sass`."""
    found: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in lines:
        if match := SASS_FUNCTION.match(line):
            current = found.setdefault(match[1], set())
        elif match := SASS_LINE.match(line):
            current.update(words(match[1], match[2]))
    return {name: tuple(sorted(instructions)) for name, instructions in found.items()}


def words(opcode: str, modifiers: str = "") -> Iterator[str]:
    """What an opcode is called here, if it is one that matters."""
    for pattern, word in OPCODES:
        if re.fullmatch(pattern, opcode):
            yield word
            if MULTICAST in modifiers.split("."):
                yield "multicast"
            return


def with_instructions(
    kernels: tuple[KernelResources, ...], artifact: Path, disassembler: Disassembler | None
) -> tuple[KernelResources, ...]:
    """The same kernels with the instructions in their machine code; as they are where there is no disassembler.

    artifact: a shared library or a cubin. Raises SurfaceFailure when it cannot be disassembled.
    """
    if disassembler is None:
        return kernels
    found = parse_sass(_dump(disassembler, "-sass", artifact).splitlines())
    return tuple(msgspec.structs.replace(kernel, instructions=found.get(kernel.name, ())) for kernel in kernels)


def resource_usage(artifact: Path, disassembler: Disassembler) -> tuple[KernelResources, ...]:
    """Registers, stack and shared memory of the kernels in a shared library or a cubin. Raises SurfaceFailure."""
    return parse_usage(_dump(disassembler, "-res-usage", artifact))


def _dump(disassembler: Disassembler, what: str, artifact: Path) -> str:
    environment = {"PATH": disassembler.path, "LC_ALL": "C"}
    command = [disassembler.cuobjdump, what, str(artifact)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=DISASSEMBLY_LIMIT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        message = f"cuobjdump {what} ran longer than {DISASSEMBLY_LIMIT_S:g} s; simplify the source"
        raise SurfaceFailure(Code.TIMEOUT_BUILD, message) from None
    if done.returncode:
        message = f"cuobjdump {what} ended with status {done.returncode} on the built kernel"
        raise SurfaceFailure(Code.COMPILE, message, log=done.stderr[:2000])
    return done.stdout


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
    if shared_bytes > (limit := gpu_platform(platform).shared_bytes):
        raise SurfaceFailure(
            Code.COMPILE,
            f"{name} needs {shared_bytes} bytes of shared memory, a block on {platform} has {limit}; "
            "make the tiles or the number of stages smaller",
        )
