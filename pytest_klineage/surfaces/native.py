"""The native ABI of include/klineage.h: the headers that come with it, its structs in ctypes, a bound call.

Headers that come with the package (klineage/sm90/v1/*.cuh) are frozen: a change gets a new version folder, so that a
source's digest goes on naming one kernel. What a build used is part of its recipe and stands in its record as well.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from pathlib import Path

import msgspec

from pytest_klineage.records import Code, KernelSource, Placement, Slot
from pytest_klineage.surfaces.base import Invoke, LoadedKernel, MappedMemory, SurfaceFailure, data_address

ABI_VERSION = 1
MAX_DIMS = 8
ERROR_BYTES = 512
DTYPE_CODES = {
    "fp64": 1,
    "fp32": 2,
    "fp16": 3,
    "bf16": 4,
    "int64": 5,
    "int32": 6,
    "uint8": 7,
    "fp8_e4m3": 8,
    "fp8_e5m2": 9,
    "int16": 10,
    "int8": 11,
    "bool": 12,
}
INCLUDE_DIR = Path(__file__).parent / "include"
HEADER = INCLUDE_DIR / "klineage.h"


class CTensor(ctypes.Structure):
    """klineage_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("stride", ctypes.c_int64 * MAX_DIMS),
    )


class CScalar(ctypes.Structure):
    """klineage_scalar."""

    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_double))


class CCall(ctypes.Structure):
    """klineage_call."""

    _fields_ = (
        ("abi_version", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("num_scalars", ctypes.c_int32),
        ("inputs", ctypes.POINTER(CTensor)),
        ("outputs", ctypes.POINTER(CTensor)),
        ("scalars", ctypes.POINTER(CScalar)),
        ("stream", ctypes.c_void_p),
        ("error", ctypes.c_char_p),
        ("error_capacity", ctypes.c_int32),
    )


def c_tensor(memory: MappedMemory, placement: Placement) -> CTensor:
    """Describe one tensor of an arena to native code."""
    spec = placement.spec
    return CTensor(
        data_address(memory, placement),
        DTYPE_CODES[spec.dtype],
        len(spec.shape),
        (ctypes.c_int64 * MAX_DIMS)(*spec.shape),
        (ctypes.c_int64 * MAX_DIMS)(*spec.strides),
    )


def no_entry(entry: str) -> SurfaceFailure:
    """The failure of a library without its entry."""
    said = f'the library exports no symbol {entry!r}; declare it extern "C" int {entry}(const klineage_call *)'
    return SurfaceFailure(Code.ENTRY_MISSING, said)


MENTION = re.compile(r"\bklineage/\w+/v\d+/\w+\.cuh\b")
"""A header's name, anywhere in a text: an include may be computed from a macro."""


class SharedHeader(msgspec.Struct, frozen=True):
    """One header of the package: the name that it is included by, and its text."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def shared_headers(source: KernelSource) -> tuple[SharedHeader, ...]:
    """Every header of the package that a source names, and those that these name, by name.

    A name that the package does not have is left to the compiler, which says so.
    """
    found: dict[str, SharedHeader] = {}
    texts = [file.text for file in source.files]
    while texts:
        for name in MENTION.findall(texts.pop()):
            if name not in found and (INCLUDE_DIR / name).is_file():
                found[name] = SharedHeader(name, (INCLUDE_DIR / name).read_text(encoding="utf-8"))
                texts.append(found[name].text)
    return tuple(found[name] for name in sorted(found))


class NativeKernel(LoadedKernel):
    """A symbol of a shared library that follows the native ABI."""

    def __init__(self, artifact: Path, entry: str) -> None:
        try:
            self._library = ctypes.CDLL(str(artifact))
        except OSError as error:
            raise SurfaceFailure(Code.EXCEPTION, f"the shared library cannot be loaded: {error}") from error
        try:
            self._function = self._library[entry]
        except AttributeError as error:
            raise no_entry(entry) from error
        self._function.restype = ctypes.c_int
        self._function.argtypes = (ctypes.POINTER(CCall),)

    def bind(self, memory: MappedMemory, slot: Slot, scalars: dict[str, float]) -> Invoke:
        inputs = (CTensor * len(slot.inputs))(*(c_tensor(memory, item) for item in slot.inputs))
        outputs = (CTensor * len(slot.separate))(*(c_tensor(memory, item) for item in slot.separate))
        values = (CScalar * max(1, len(scalars)))(*(CScalar(name.encode(), value) for name, value in scalars.items()))
        error = ctypes.create_string_buffer(ERROR_BYTES)
        call = CCall(
            ABI_VERSION, len(inputs), len(outputs), len(scalars), inputs, outputs, values, memory.stream or None,
            ctypes.cast(error, ctypes.c_char_p), ERROR_BYTES,
        )  # fmt: skip
        function, pointer = self._function, ctypes.byref(call)

        def invoke() -> None:
            status = function(pointer)
            if status:
                message = error.value.decode(errors="replace") or "no message; see KLINEAGE_REQUIRE in klineage.h"
                raise SurfaceFailure(Code.RETURNED_ERROR, f"the kernel returned {status}: {message}")

        # ctypes keeps no reference to what a pointer points to.
        invoke.keep = (call, inputs, outputs, values, error)  # type: ignore[attr-defined]  # on a function
        return invoke
