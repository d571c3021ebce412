"""The tilelang surface: a Python file with functions that make TileLang kernels, and a launcher on tensors.

COMPILE = {"sm90": [{"kernel": ..., "arguments": {...}}]} names kernels to build ahead: TileLang and nvcc compile them
without a GPU, and TileLang finds them when the launcher asks for the same. What else it asks for is compiled then.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pytest_klineage.records import Surface, gpu_platform
from pytest_klineage.surfaces.jit import JitBackend
from pytest_klineage.surfaces.toolkit import find_toolkit


class TilelangBackend(JitBackend):
    """TileLang's own compiler with nvcc, in a process of its own."""

    surface: ClassVar[Surface] = Surface.TILELANG
    package: ClassVar[str] = "tilelang"
    title: ClassVar[str] = "TileLang"
    cache_variables: ClassVar[tuple[str, ...]] = ("TILELANG_CACHE_DIR", "TILELANG_TMP_DIR")
    kept: ClassVar[tuple[str, ...]] = (".cu", ".so", ".pkl")
    """Sources, the library with the kernel in it, its parameters."""

    def arch(self, platform: str) -> str:
        return f"sm_{gpu_platform(platform).target}"

    def toolchain(self) -> str:
        return find_toolkit().description

    def environment(self) -> dict[str, str]:
        toolkit = find_toolkit()
        home = Path(toolkit.nvcc).parent.parent
        return {"CUDA_HOME": str(home), "NVCC_CCBIN": toolkit.host_compiler, "TILELANG_PRINT_ON_COMPILATION": "0"}

    def programs(self) -> tuple[str, ...]:
        toolkit = find_toolkit()
        return toolkit.nvcc, toolkit.host_compiler
