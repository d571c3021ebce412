"""The triton surface: a Python file with kernels under @triton.jit and a launcher on tensors; COMPILE is built ahead.

COMPILE = {"sm90": [{"kernel": ..., "signature": {...}, "constexprs": {...}, "options": {...}}]} names specialisations
in Triton's own words, under "*" those for every other platform. They are compiled without a GPU, and Triton finds them
when the launcher asks for the same. What else it asks for is compiled then.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

from pytest_klineage.records import Surface, gpu_platform
from pytest_klineage.surfaces.jit import JitBackend
from pytest_klineage.surfaces.toolkit import find_disassembler

GROUP = "__grp__"
"""How Triton begins the name of the file that lists an entry's files, by their full paths."""


class TritonBackend(JitBackend):
    """Triton's own compiler, up to the cubin, in a process of its own."""

    surface: ClassVar[Surface] = Surface.TRITON
    package: ClassVar[str] = "triton"
    title: ClassVar[str] = "Triton"
    cache_variables: ClassVar[tuple[str, ...]] = ("TRITON_CACHE_DIR",)
    kept: ClassVar[tuple[str, ...]] = (".json", ".cubin", ".ptx")

    def arch(self, platform: str) -> int:
        return gpu_platform(platform).number

    def toolchain(self) -> str:
        disassembler = find_disassembler()
        return disassembler.description if disassembler else "no disassembler"

    def environment(self) -> dict[str, str]:
        return {"TRITON_DUMP_PTXAS_LOG": "1"}

    def unpack(self, hidden: Path) -> None:
        super().unpack(hidden)
        relocate(Path(os.environ[self.cache_variables[0]]))


def relocate(cache: Path) -> None:
    """Have the entries of a Triton cache list their files where they are now. Raises OSError."""
    for group in cache.glob(f"*/{GROUP}*.json"):
        files = [path for path in sorted(group.parent.iterdir()) if not path.name.startswith(GROUP)]
        group.write_text(json.dumps({"child_paths": {path.name: str(path) for path in files}}))
