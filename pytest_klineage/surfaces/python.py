"""The python surface: a function on tensors, from files of its own or from an installed module (`module:function`).

The function is called as `function(*inputs)`; scalars of the operator are passed by name where the function has a
parameter of that name. With a parameter `out` it receives the output tensor (or a tuple of them) and fills it;
otherwise it returns its outputs.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pytest_klineage.records import PLATFORMS, Build, Code, KernelSource, Placement, Slot, Surface
from pytest_klineage.surfaces.base import Built, Invoke, LoadedKernel, MappedMemory, SurfaceBackend, SurfaceFailure
from pytest_klineage.surfaces.compiling import digest_of, scratch

MODULE_NAME = "kernel"


class PythonBackend(SurfaceBackend):
    """Lays the files out in the cache; nothing is compiled."""

    surface: ClassVar[Surface] = Surface.PYTHON
    platforms: ClassVar[tuple[str, ...]] = PLATFORMS
    needs_torch: ClassVar[bool] = True

    def build(self, source: KernelSource, cache: Path, *, platform: str, timeout_s: float) -> Built:
        digest = digest_of(source.digest, sys.version)
        directory = cache / "python" / digest
        if source.main is not None:
            parse(source.main.name, source.main.text)
        if not holds(directory, source):
            with scratch(cache) as staging:
                if directory.exists():
                    os.replace(directory, staging / "altered")
                publish(lay_out(source, staging / "files"), directory)
        return Built(artifact=directory, build=Build(digest=digest, toolchain=f"Python {sys.version.split()[0]}"))

    def load(self, artifact: Path, entry: str, module: str) -> LoadedKernel:
        if module:
            loaded = import_named(module)
        else:
            sys.path.insert(0, str(artifact))
            # The folder holds the source and nothing else, also where files could be written there.
            sys.dont_write_bytecode = True
            loaded = importlib.import_module(MODULE_NAME)
        function: Any = loaded
        for part in entry.split("."):
            function = getattr(function, part, None)
        if not callable(function):
            raise SurfaceFailure(Code.ENTRY_MISSING, f"{module or 'the kernel file'} has no function {entry!r}")
        return PythonKernel(function)


def lay_out(source: KernelSource, directory: Path) -> Path:
    """Write the source's files into a new folder, the first as the module that is imported."""
    directory.mkdir()
    for name, text in named_files(source).items():
        (directory / name).write_bytes(text.encode())
    return directory


def named_files(source: KernelSource) -> dict[str, str]:
    """Texts by file name, the first as the module that is imported."""
    return {f"{MODULE_NAME}.py" if index == 0 else file.name: file.text for index, file in enumerate(source.files)}


def holds(directory: Path, source: KernelSource) -> bool:
    """Whether a folder of the cache has exactly the source's files: who can write there may have changed them."""
    files = named_files(source)
    try:
        return set(os.listdir(directory)) == set(files) and all(
            (directory / name).read_bytes() == text.encode() for name, text in files.items()
        )
    except OSError:
        return False


def publish(staging: Path, artifact: Path) -> None:
    """Move an artifact into the cache. Raises OSError."""
    artifact.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(staging, artifact)
    except OSError:
        if not artifact.exists():  # somebody else may have published the same
            raise


def import_named(module: str) -> Any:
    """An installed module. Raises SurfaceFailure without one; what it raises itself goes through."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise  # the module is there, and imports another that is not
        where = "the worker imports installed packages and what is on PYTHONPATH, not what lies beside the test"
        raise SurfaceFailure(Code.EXCEPTION, f"No module named {error.name!r}: {where}") from error


class PythonKernel(LoadedKernel):
    """A Python callable on torch tensors that view the arena."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._names = parameter_names(function)

    def bind(self, memory: MappedMemory, slot: Slot, scalars: dict[str, float]) -> Invoke:
        function = self._function
        inputs = [tensor_view(memory, placement) for placement in slot.inputs]
        named: dict[str, Any] = {
            name: int(value) if value == int(value) else value for name, value in scalars.items() if name in self._names
        }
        if "out" in self._names and slot.separate:
            outputs = tuple(tensor_view(memory, placement) for placement in slot.separate)
            named["out"] = outputs if len(outputs) > 1 else outputs[0]

            def fill() -> None:
                function(*inputs, **named)

            return fill

        def call() -> Any:
            return function(*inputs, **named)

        return call


def parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names a callable accepts by keyword; empty when it does not say, as builtins do."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(item.name for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD))


def tensor_view(memory: MappedMemory, placement: Placement) -> Any:
    """A torch tensor over a piece of an arena, with the strides of its spec."""
    import torch

    names = {
        "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
    }  # fmt: skip
    spec = placement.spec
    dtype = getattr(torch, names.get(spec.dtype, spec.dtype))
    flat = memory.bytes[placement.offset : placement.offset + placement.num_bytes].view(dtype)
    return flat.as_strided(spec.shape, spec.strides)


def parse(name: str, text: str) -> None:
    """Raise SurfaceFailure for source that is not Python."""
    try:
        with warnings.catch_warnings():
            # The caller's -W error is about the caller's code, not about a kernel's escape sequences.
            warnings.simplefilter("ignore")
            ast.parse(text, name)
    except (SyntaxError, ValueError) as error:
        raise SurfaceFailure(Code.COMPILE, f"{name} is not valid Python: {error}", log=str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise SurfaceFailure(Code.COMPILE, f"{name} is nested too deeply for Python's parser") from error
