"""The python surface: how a function is found, what it is called with, and what a broken file says."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pytest_klineage.records import Code, KernelSource, Slot, SourceFile, Surface
from pytest_klineage.records.signature import dense, permuted
from pytest_klineage.surfaces import SurfaceFailure
from pytest_klineage.surfaces.base import Memory
from pytest_klineage.surfaces.python import MODULE_NAME, PythonBackend, parameter_names, tensor_view

Arguments = Callable[..., tuple[Memory, Slot]]
INPUTS = (dense("a", "fp32", 2, 3), dense("b", "fp32", 2, 3))
OUTPUTS = (dense("c", "fp32", 2, 3),)


@pytest.fixture(autouse=True)
def fresh_imports() -> Iterator[None]:
    """Loading a kernel changes sys.path and sys.modules, as it may in a worker."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in (MODULE_NAME, "tile_helper"):
        sys.modules.pop(name, None)


def source(*files: SourceFile | str, entry: str = "run", **fields: str) -> KernelSource:
    texts = tuple(SourceFile("mine.py", item) if isinstance(item, str) else item for item in files)
    return KernelSource(surface=Surface.PYTHON, files=texts, entry=entry, **fields)


def call(
    given: KernelSource,
    cache: Path,
    arguments: Arguments,
    *,
    outputs: tuple[object, ...] = OUTPUTS,
    scalars: dict[str, float] | None = None,
) -> tuple[object, list[torch.Tensor]]:
    """Build, load and call once on a = 1 … 6 and b = 10. Returns what came back and what the outputs hold."""
    backend = PythonBackend()
    built = backend.build(given, cache, platform="cpu", timeout_s=60)
    loaded = backend.load(built.artifact, given.entry, given.module)
    memory, slot = arguments(INPUTS, outputs)
    tensor_view(memory, slot.inputs[0]).copy_(torch.arange(1.0, 7.0).view(2, 3))
    tensor_view(memory, slot.inputs[1]).fill_(10.0)
    result = loaded.bind(memory, slot, scalars or {})()
    return result, [tensor_view(memory, item).clone() for item in slot.outputs]


def test_a_function_that_returns_its_output(tmp_path: Path, arguments: Arguments) -> None:
    result, _ = call(source("def run(a, b):\n    return a + b\n"), tmp_path, arguments)
    assert isinstance(result, torch.Tensor)
    assert result.tolist() == [[11.0, 12.0, 13.0], [14.0, 15.0, 16.0]]


def test_a_function_with_a_parameter_out_fills_it(tmp_path: Path, arguments: Arguments) -> None:
    text = "import torch\ndef run(a, b, out):\n    torch.add(a, b, out=out)\n    return 'ignored'\n"
    result, outputs = call(source(text), tmp_path, arguments)
    assert result is None
    assert outputs[0].tolist() == [[11.0, 12.0, 13.0], [14.0, 15.0, 16.0]]


def test_several_outputs_come_as_a_tuple(tmp_path: Path, arguments: Arguments) -> None:
    text = "def run(a, b, *, out):\n    first, second = out\n    first.copy_(a)\n    second.copy_(b)\n"
    _, outputs = call(source(text), tmp_path, arguments, outputs=(*OUTPUTS, dense("d", "fp32", 2, 3)))
    assert [float(output[0, 0]) for output in outputs] == [1.0, 10.0]


def test_scalars_are_passed_by_matching_parameter_name(tmp_path: Path, arguments: Arguments) -> None:
    text = "def run(a, b, scale, stride=7):\n    return scale, type(scale), stride, type(stride)\n"
    result, _ = call(source(text), tmp_path, arguments, scalars={"scale": 0.5, "stride": 2.0, "padding": 1.0})
    assert result == (0.5, float, 2, int)


def test_a_function_may_leave_scalars_out(tmp_path: Path, arguments: Arguments) -> None:
    result, _ = call(source("def run(a, b):\n    return 'fine'\n"), tmp_path, arguments, scalars={"scale": 0.5})
    assert result == "fine"


def test_an_entry_may_be_an_attribute_of_an_object(tmp_path: Path, arguments: Arguments) -> None:
    text = "class Tiles:\n    @staticmethod\n    def run(a, b):\n        return 'tiles'\n"
    assert call(source(text, entry="Tiles.run"), tmp_path, arguments)[0] == "tiles"


def test_further_files_can_be_imported_by_name(tmp_path: Path, arguments: Arguments) -> None:
    helper = SourceFile("tile_helper.py", "ANSWER = 42\n")
    text = "import tile_helper\ndef run(a, b):\n    return tile_helper.ANSWER\n"
    assert call(source(text, helper), tmp_path, arguments)[0] == 42


def test_a_function_of_an_installed_module(tmp_path: Path, arguments: Arguments) -> None:
    result, _ = call(source(entry="add", module="torch"), tmp_path, arguments)
    assert torch.equal(result, torch.arange(11.0, 17.0).view(2, 3))  # type: ignore[arg-type]  # a tensor


@pytest.mark.parametrize("entry", ["walk", "run.walk", "NUMBER", "__nothing__"])
def test_a_missing_function_is_named(entry: str, tmp_path: Path, arguments: Arguments) -> None:
    with pytest.raises(SurfaceFailure, match=f"no function '{entry}'") as caught:
        call(source("NUMBER = 3\ndef run(a, b): pass\n", entry=entry), tmp_path, arguments)
    assert caught.value.code is Code.ENTRY_MISSING


def test_a_missing_function_of_a_module_names_the_module(tmp_path: Path, arguments: Arguments) -> None:
    with pytest.raises(SurfaceFailure, match="torch has no function 'walk'"):
        call(source(entry="walk", module="torch"), tmp_path, arguments)


@pytest.mark.parametrize("module", ["tile_language_of_tomorrow", "tile_language_of_tomorrow.ops"])
def test_a_missing_module_says_where_it_was_looked_for(module: str, tmp_path: Path, arguments: Arguments) -> None:
    with pytest.raises(SurfaceFailure, match=r"^No module named 'tile_language_of_tomorrow': .*PYTHONPATH") as caught:
        call(source(module=module), tmp_path, arguments)
    assert caught.value.code is Code.EXCEPTION


def test_what_a_module_fails_to_import_is_its_own_error(
    tmp_path: Path, arguments: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_another.py").write_text("import tile_language_of_tomorrow\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="tile_language_of_tomorrow"):
        call(source(module="needs_another"), tmp_path / "cache", arguments)


@pytest.mark.parametrize("text", ["def run(:\n", "x = \x00", "  x = 1\n y = 2", "(" * 500, "-" * 100_000 + "1"])
def test_a_file_that_is_no_python_fails_to_build(text: str, tmp_path: Path) -> None:
    with pytest.raises(SurfaceFailure, match=r"mine\.py") as caught:
        PythonBackend().build(source(text), tmp_path, platform="cpu", timeout_s=60)
    assert caught.value.code is Code.COMPILE


def test_a_syntax_error_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SurfaceFailure, match="line 2"):
        PythonBackend().build(source("x = 1\ny = = 2\n"), tmp_path, platform="cpu", timeout_s=60)


def test_warnings_as_errors_do_not_fail_a_build(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PythonBackend().build(source("pattern = '\\d'\n"), tmp_path, platform="cpu", timeout_s=60)


def test_the_same_source_is_laid_out_once(tmp_path: Path) -> None:
    first, second = (PythonBackend().build(source("x = 1\n"), tmp_path, platform="cpu", timeout_s=60) for _ in range(2))
    other = PythonBackend().build(source("x = 2\n"), tmp_path, platform="cpu", timeout_s=60)
    assert first.artifact == second.artifact != other.artifact
    assert first.build.digest != other.build.digest
    assert [path.name for path in first.artifact.iterdir()] == [f"{MODULE_NAME}.py"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_layout_is_kept_whatever_ends_its_lines(end: str, tmp_path: Path) -> None:
    def inode() -> int:
        built = PythonBackend().build(source(f"x = 1{end}"), tmp_path, platform="cpu", timeout_s=60)
        return built.artifact.stat().st_ino

    first = inode()
    assert inode() == first


def test_a_layout_that_was_altered_is_laid_out_again(tmp_path: Path) -> None:
    def build() -> Path:
        return PythonBackend().build(source("x = 1\n"), tmp_path, platform="cpu", timeout_s=60).artifact

    artifact = build()
    (artifact / f"{MODULE_NAME}.py").write_text("x = 2\n")
    (artifact / "math.py").write_text("raise SystemExit\n")
    assert build() == artifact
    assert {path.name: path.read_text() for path in artifact.iterdir()} == {f"{MODULE_NAME}.py": "x = 1\n"}
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


def test_nothing_but_the_layout_stays_in_the_cache(tmp_path: Path) -> None:
    PythonBackend().build(source("x = 1\n"), tmp_path, platform="cpu", timeout_s=60)
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


def test_a_cache_that_cannot_be_written_says_which_option_helps(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SurfaceFailure, match="--klineage-cache-dir") as caught:
        PythonBackend().build(source("x = 1\n"), tmp_path / "file", platform="cpu", timeout_s=60)
    assert caught.value.code is Code.BUILD_IO


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda a, b, scale=1, *, out=None: None, {"a", "b", "scale", "out"}),
        (lambda *args, **kwargs: None, set()),
        (lambda a, /, b: None, {"b"}),
        (print, None),
        (dict.fromkeys, None),
    ],
)
def test_the_names_a_function_accepts(function: Callable[..., object], names: set[str] | None) -> None:
    found = parameter_names(function)
    assert names is None or found == names


def test_a_builtin_without_a_signature_has_no_names() -> None:
    assert parameter_names(torch.mm) == frozenset()


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16", "int64", "int32"])
def test_a_view_has_the_type_shape_and_strides_of_its_spec(dtype: str, arguments: Arguments) -> None:
    spec = permuted("x", dtype, (2, 3, 4), (1, 2, 0))
    memory, slot = arguments((spec,), ())
    view = tensor_view(memory, slot.inputs[0])
    assert (tuple(view.shape), view.stride()) == (spec.shape, spec.strides)
    assert view.data_ptr() == memory.address + slot.inputs[0].offset
    assert str(view.dtype).replace("torch.", "").replace("bfloat", "bf").replace("float", "fp") == dtype


def test_a_view_writes_into_the_memory(arguments: Arguments) -> None:
    memory, slot = arguments((dense("x", "int32", 2),), ())
    tensor_view(memory, slot.inputs[0]).fill_(0x01020304)
    assert bytes(memory.buffer[256:264]) == b"\x04\x03\x02\x01" * 2
