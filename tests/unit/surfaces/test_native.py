"""The native ABI: the same layout in Python and in C, and what a kernel of it receives and reports."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_klineage.records import DTYPES, Code, KernelSource, Slot, SourceFile, Surface
from pytest_klineage.records.signature import dense, permuted
from pytest_klineage.surfaces import SurfaceFailure
from pytest_klineage.surfaces.base import LoadedKernel, Memory
from pytest_klineage.surfaces.cpp import CppBackend, find_compiler
from pytest_klineage.surfaces.native import (
    ABI_VERSION,
    DTYPE_CODES,
    INCLUDE_DIR,
    MAX_DIMS,
    CCall,
    CScalar,
    CTensor,
    NativeKernel,
    c_tensor,
)

Arguments = Callable[..., tuple[Memory, Slot]]
STRUCTS = {"klineage_tensor": CTensor, "klineage_scalar": CScalar, "klineage_call": CCall}
C_NAMES = {
    "fp64": "FLOAT64", "fp32": "FLOAT32", "fp16": "FLOAT16", "bf16": "BFLOAT16", "int64": "INT64", "int32": "INT32",
    "uint8": "UINT8", "fp8_e4m3": "FLOAT8_E4M3", "fp8_e5m2": "FLOAT8_E5M2", "int16": "INT16", "int8": "INT8",
    "bool": "BOOL",
}  # fmt: skip

KERNELS = r"""
#include "klineage.h"
#define OUT ((double *)call->outputs[0].data)
extern "C" int scalars(const klineage_call *call) {
    OUT[0] = klineage_scalar_value(call, "scale", -1);
    OUT[1] = klineage_scalar_value(call, "missing", -2);
    OUT[2] = call->num_scalars;
    OUT[3] = klineage_scalar_value(call, "window", -3);
    return 0;
}
extern "C" int description(const klineage_call *call) {
    const klineage_tensor &x = call->inputs[1];
    double values[] = {(double)call->abi_version, (double)call->num_inputs, (double)call->num_outputs, (double)x.dtype,
                       (double)x.num_dims, (double)x.shape[0], (double)x.shape[1], (double)x.shape[2],
                       (double)x.stride[0], (double)x.stride[1], (double)x.stride[2],
                       (double)((char *)x.data - (char *)call->inputs[0].data), (double)(call->stream == nullptr)};
    for (int i = 0; i < 13; ++i) OUT[i] = values[i];
    return 0;
}
extern "C" int words(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 3, "only three inputs");
    return 0;
}
extern "C" int silent(const klineage_call *call) { return -5; }
extern "C" int endless(const klineage_call *call) {
    char text[4000];
    for (char &c : text) c = 'x';
    text[3999] = 0;
    return klineage_fail(call, text);
}
extern "C" int in_turns(const klineage_call *call) {
    static int count = 0;
    return ++count % 2 ? klineage_fail(call, "odd") : 0;
}
int hidden_by_cpp_name(const klineage_call *call) { return 0; }
"""


def layout_in_c(compiler: str, language: str, directory: Path) -> dict[str, int]:
    """Sizes, offsets and constants as a compiler sees them."""
    lines = []
    for name, kind in STRUCTS.items():
        lines.append(f'    printf("{name} %zu\\n", sizeof({name}));')
        for field, _type in kind._fields_:  # type: ignore[misc]  # two or three items; ours have two
            lines.append(f'    printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    for name in C_NAMES.values():
        lines.append(f'    printf("{name} %d\\n", (int)KLINEAGE_{name});')
    lines.append('    printf("version %d\\nmax_dims %d\\n", KLINEAGE_ABI_VERSION, KLINEAGE_MAX_DIMS);')
    source = directory / f"layout.{language}"
    body = "\n".join(lines)
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include <klineage.h>\nint main(void) {{\n{body}\n}}\n"
    )
    program = directory / "layout"
    command = [compiler, "-Wall", "-Werror", "-pedantic", f"-I{INCLUDE_DIR}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    out = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in out.splitlines())}


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_the_layout_is_the_same_in_python_and_in_c(language: str, tmp_path: Path) -> None:
    compiler = find_compiler() if language == "cpp" else shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    seen = layout_in_c(compiler, language, tmp_path)
    for name, kind in STRUCTS.items():
        assert seen[name] == ctypes.sizeof(kind)
        for field, _type in kind._fields_:  # type: ignore[misc]  # two or three items; ours have two
            assert seen[f"{name}.{field}"] == getattr(kind, field).offset
    assert {dtype: seen[name] for dtype, name in C_NAMES.items()} == DTYPE_CODES
    assert (seen["version"], seen["max_dims"]) == (ABI_VERSION, MAX_DIMS)


def test_every_dtype_of_the_records_has_a_code() -> None:
    assert set(DTYPES) <= set(DTYPE_CODES)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = (SourceFile("kernel.cpp", KERNELS),)
    source = KernelSource(surface=Surface.CPP, files=files, entry="scalars", flags=("-O0",))
    return CppBackend().build(source, tmp_path_factory.mktemp("cache"), platform="cpu", timeout_s=60).artifact


def kernel(library: Path, entry: str) -> LoadedKernel:
    return CppBackend().load(library, entry, "")


def doubles(memory: Memory, slot: Slot) -> list[float]:
    start = slot.outputs[0].offset
    return list(struct.unpack("16d", memory.buffer[start : start + 128]))


OUTPUTS = (dense("out", "fp64", 16),)


def test_scalars_reach_the_kernel_by_name(library: Path, arguments: Arguments) -> None:
    memory, slot = arguments((), OUTPUTS)
    kernel(library, "scalars").bind(memory, slot, {"window": 128.0, "scale": 0.125})()
    assert doubles(memory, slot)[:4] == [0.125, -2.0, 2.0, 128.0]


def test_a_kernel_without_scalars_gets_no_argument(library: Path, arguments: Arguments) -> None:
    memory, slot = arguments((), OUTPUTS)
    kernel(library, "scalars").bind(memory, slot, {})()
    assert doubles(memory, slot)[:4] == [-1.0, -2.0, 0.0, -3.0]


def test_tensors_are_described_as_they_lie(library: Path, arguments: Arguments) -> None:
    inputs = (dense("a", "fp32", 2), permuted("x", "bf16", (2, 3, 5), (2, 0, 1)))
    memory, slot = arguments(inputs, OUTPUTS)
    kernel(library, "description").bind(memory, slot, {})()
    expected = [ABI_VERSION, 2, 1, DTYPE_CODES["bf16"], 3, 2, 3, 5, 3, 1, 6, 256, 1]
    assert doubles(memory, slot)[:13] == expected


def test_unused_dimensions_are_zero(arguments: Arguments) -> None:
    memory, slot = arguments((dense("a", "fp32", 2, 3),), ())
    tensor = c_tensor(memory, slot.inputs[0])
    assert list(tensor.shape) == [2, 3, 0, 0, 0, 0, 0, 0]
    assert list(tensor.stride) == [3, 1, 0, 0, 0, 0, 0, 0]
    assert tensor.data == memory.address + slot.inputs[0].offset


@pytest.mark.parametrize(
    ("entry", "says"),
    [("words", "returned 1: only three inputs"), ("silent", "returned -5: no message; see KLINEAGE_REQUIRE")],
)
def test_a_kernel_that_returns_an_error_is_quoted(entry: str, says: str, library: Path, arguments: Arguments) -> None:
    invoke = kernel(library, entry).bind(*arguments((), OUTPUTS), {})
    with pytest.raises(SurfaceFailure, match=says) as caught:
        invoke()
    assert caught.value.code is Code.RETURNED_ERROR


def test_a_message_longer_than_its_place_is_cut(library: Path, arguments: Arguments) -> None:
    invoke = kernel(library, "endless").bind(*arguments((), OUTPUTS), {})
    with pytest.raises(SurfaceFailure) as caught:
        invoke()
    assert caught.value.message.count("x") == 511


def test_a_kernel_can_be_called_again_after_an_error(library: Path, arguments: Arguments) -> None:
    invoke = kernel(library, "in_turns").bind(*arguments((), OUTPUTS), {})
    for _ in range(3):
        with pytest.raises(SurfaceFailure, match="odd"):
            invoke()
        assert invoke() is None


@pytest.mark.parametrize("entry", ["sgemm", "hidden_by_cpp_name", ""])
def test_a_missing_entry_is_named_with_its_declaration(entry: str, library: Path) -> None:
    with pytest.raises(SurfaceFailure) as caught:
        kernel(library, entry)
    assert caught.value.code is Code.ENTRY_MISSING
    assert f'extern "C" int {entry}(' in caught.value.message


def test_a_file_that_is_no_library_is_reported(tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_text("not a library")
    with pytest.raises(SurfaceFailure, match="cannot be loaded"):
        NativeKernel(tmp_path / "kernel.so", "run")
