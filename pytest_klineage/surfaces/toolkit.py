"""Finding the CUDA toolkit's programs and header libraries, installed or from wheels."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import gpu_platform
from pytest_klineage.surfaces.cpp import compiler_version, find_compiler

INSTALL = "pip install 'pytest-klineage[cuda-build]'"
LEAST_VERSION = (12, 8)
"""The first toolkit that knows sm_120a; a platform may ask for more."""
SYSTEM_TOOLKIT = Path("/usr/local/cuda")
WHEEL_FOLDERS = ("cu13", "cuda_nvcc", "cuda_cuobjdump", "cuda_nvdisasm")
"""Below the package `nvidia`: where wheels put a toolkit's programs, since CUDA 13 and before."""


class Toolkit(msgspec.Struct, frozen=True, kw_only=True):
    """The programs that a CUDA build uses."""

    nvcc: str
    version: str
    """Such as "13.0.88"."""
    host_compiler: str
    """Path of the C++ compiler that nvcc starts."""
    library_dirs: tuple[str, ...] = ()
    """Where the run-time library lies when nvcc does not look there by itself, as in wheels."""
    disassembler: Disassembler | None = None

    @property
    def description(self) -> str:
        """Names and versions of everything that has a say in the result."""
        parts = [f"nvcc {self.version}", compiler_version(self.host_compiler)]
        return ", ".join([*parts, *([self.disassembler.description] if self.disassembler else [])])


class Disassembler(msgspec.Struct, frozen=True, kw_only=True):
    """cuobjdump, and the nvdisasm that it starts."""

    cuobjdump: str
    nvdisasm: str

    @property
    def description(self) -> str:
        """Name and version."""
        return f"cuobjdump {tool_version(self.cuobjdump)}"

    @property
    def path(self) -> str:
        """$PATH under which cuobjdump finds nvdisasm."""
        return os.pathsep.join([str(Path(self.nvdisasm).parent), os.environ.get("PATH", os.defpath)])


class HeaderLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """A library of headers that a kernel may ask for by name."""

    name: str
    folders: tuple[str, ...]
    """Include folders on this machine."""
    version: str
    """Its own version and the package that brought it."""


def find_toolkit(platform: str = "") -> Toolkit:
    """The toolkit of this machine, new enough for a platform.

    Raises MissingDependency without nvcc or a C++ compiler, or for an old nvcc.
    """
    nvcc = find_nvcc()
    version = tool_version(nvcc)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    least = gpu_platform(platform).toolkit if platform else LEAST_VERSION
    if numbers < least:
        raise MissingDependency(f"nvcc {'.'.join(map(str, least))} or newer (found {version or nvcc})", INSTALL)
    return Toolkit(
        nvcc=nvcc,
        version=version,
        host_compiler=find_compiler(),
        library_dirs=tuple(str(path) for path in _wheel_libraries(Path(nvcc))),
        disassembler=find_disassembler(),
    )


def find_nvcc() -> str:
    """Path of nvcc: $CUDACXX, $CUDA_HOME, PATH, /usr/local/cuda, then the wheels. Raises MissingDependency."""
    chosen = os.environ.get("CUDACXX", "").strip()
    if chosen:
        if path := shutil.which(chosen):
            return path
        # Another compiler in its place would give other figures than the ones that were asked for.
        raise MissingDependency(f"the CUDA compiler that CUDACXX names, {chosen!r},", f"unset CUDACXX, or {INSTALL}")
    if path := find_tool("nvcc"):
        return path
    raise MissingDependency("the CUDA compiler nvcc", f"{INSTALL}   (or set CUDACXX or CUDA_HOME)")


def find_disassembler() -> Disassembler | None:
    """cuobjdump with nvdisasm, or None; Triton's wheel brings both as well."""
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    return Disassembler(cuobjdump=cuobjdump, nvdisasm=nvdisasm) if cuobjdump and nvdisasm else None


def find_tool(name: str) -> str | None:
    """Path of one of the toolkit's programs; None when it is nowhere."""
    home = os.environ.get("CUDA_HOME", "").strip()
    folders = [Path(home, "bin")] if home else []
    folders += [Path(part) for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part]
    folders += [SYSTEM_TOOLKIT / "bin", *(root / folder / "bin" for root in _wheels() for folder in WHEEL_FOLDERS)]
    folders += [root / "backends" / "nvidia" / "bin" for root in package_folders("triton")]
    return next((found for folder in folders if (found := shutil.which(str(folder / name)))), None)


@functools.lru_cache
def tool_version(tool: str) -> str:
    """The version that a program of the toolkit prints, such as "13.0.88"; empty when it prints none."""
    out = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    found = re.search(r"\bV(\d+(?:\.\d+)+)", out)
    return found.group(1) if found else ""


def package_folders(package: str) -> list[Path]:
    """Folders of an installed package, found without importing it; empty when it is absent."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _wheels() -> list[Path]:
    return package_folders("nvidia")


def _wheel_libraries(nvcc: Path) -> Iterator[Path]:
    """Library folders beside a wheel's nvcc: it looks in lib64, which wheels do not have."""
    root = nvcc.parent.parent
    if not (root / "lib64").exists() and any((root / "lib").glob("libcudart_static.a")):
        yield root / "lib"


# --- header libraries -------------------------------------------------------------------------------------------------

CUTLASS_SOURCES = (
    ("cutlass_library", "nvidia-cutlass", "source"),
    ("flashinfer", "flashinfer-python", "data/cutlass"),
    ("tilelang", "tilelang", "3rdparty/cutlass"),
)
"""Package, distribution and folder of every wheel that brings CUTLASS and CuTe, in the order of preference."""
HEADER_LIBRARIES = {"cutlass": (CUTLASS_SOURCES, "pip install nvidia-cutlass")}
"""By name: where its headers are looked for, and the command that installs them."""


def find_headers(name: str) -> HeaderLibrary:
    """A header library by its name in HEADER_LIBRARIES. Raises MissingDependency with the command that installs it."""
    sources, remedy = HEADER_LIBRARIES[name]
    for package, distribution, folder in sources:
        for root in package_folders(package):
            include = root / folder / "include"
            if (header := include / "cutlass" / "version.h").is_file():
                tools = root / folder / "tools" / "util" / "include"
                folders = (str(include), *([str(tools)] if tools.is_dir() else []))
                version = f"{_cutlass_version(header.read_text())} ({distribution} {_installed(distribution)})"
                return HeaderLibrary(name=name, folders=folders, version=version)
    raise MissingDependency(f"the header library {name!r}", remedy)


def _cutlass_version(text: str) -> str:
    """The version in cutlass/version.h, such as "4.2.0"."""
    numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    return ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
