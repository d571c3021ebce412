"""Compiling ahead of a run, without a GPU language: the process, what it may do, what it answers, what is kept."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import GPU_PLATFORMS, Code, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import SurfaceFailure, ahead, declared, jit
from pytest_klineage.surfaces.base import Built
from pytest_klineage.surfaces.jit import JitBackend, copy_entries
from pytest_klineage.worker.sandbox.containment import landlock_abi

PLAIN = "def run(a, b, out):\n    out.copy_(a)\n"


class Plain(JitBackend):
    """The triton surface, but nothing is ever compiled: what is tested here is the same for every language."""

    surface: ClassVar[Surface] = Surface.TRITON
    package: ClassVar[str] = "msgspec"
    title: ClassVar[str] = "Plain"
    cache_variables: ClassVar[tuple[str, ...]] = ("PLAIN_CACHE_DIR",)
    version = "1"

    def arch(self, platform: str) -> int:
        return 90

    def toolchain(self) -> str:
        return f"nothing {self.version}"


def source(text: str = PLAIN, *more: SourceFile, **fields: Any) -> KernelSource:
    given = {"entry": "run", "surface": Surface.TRITON, "files": (SourceFile("mine.py", text), *more)} | fields
    return KernelSource(**given)


def build(given: KernelSource, cache: Path, *, timeout_s: float = 60, platform: str = "sm90") -> Built:
    return Plain().build(given, cache, platform=platform, timeout_s=timeout_s)


def failure(given: KernelSource, cache: Path, **arguments: Any) -> SurfaceFailure:
    with pytest.raises(SurfaceFailure) as caught:
        build(given, cache, **arguments)
    return caught.value


class TestBuild:
    def test_a_file_that_declares_nothing_is_laid_out_and_says_so(self, tmp_path: Path) -> None:
        built = build(source(PLAIN, SourceFile("tiles.py", "SIZE = 4\n")), tmp_path)
        assert (built.artifact / "kernel.py").read_text() == PLAIN
        assert (built.artifact / "tiles.py").read_text() == "SIZE = 4\n"
        assert built.build.kernels == ()
        assert "declares nothing for sm90" in built.build.log
        assert built.build.platform == "sm90"
        assert built.build.toolchain.endswith("nothing 1")

    def test_a_second_build_is_a_hit_and_keeps_what_was_found(self, tmp_path: Path) -> None:
        first, second = build(source(), tmp_path), build(source(), tmp_path)
        assert (first.build.cached, second.build.cached) == (False, True)
        assert first.artifact == second.artifact
        assert second.build.log == first.build.log
        assert (first.build.seconds > 0, second.build.seconds) == (True, 0.0)

    @pytest.mark.parametrize("other", ["platform", "source", "toolchain"])
    def test_what_has_a_say_in_the_result_is_in_the_digest(
        self, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = build(source(), tmp_path)
        if other == "toolchain":
            monkeypatch.setattr(Plain, "version", "2")
        again = build(
            source(PLAIN + "\n" if other == "source" else PLAIN),
            tmp_path,
            platform="sm120" if other == "platform" else "sm90",
        )
        assert again.build.digest != first.build.digest
        assert not again.build.cached

    def test_a_damaged_entry_of_the_cache_is_built_again(self, tmp_path: Path) -> None:
        first = build(source(), tmp_path)
        (first.artifact / jit.HIDDEN / jit.DESCRIPTION).write_text("{")
        second = build(source(), tmp_path)
        assert not second.build.cached
        assert second.artifact == first.artifact
        assert build(source(), tmp_path).build.cached

    def test_the_file_can_import_neighbours_and_packages(self, tmp_path: Path) -> None:
        text = "import msgspec\nfrom tiles import SIZE\nassert SIZE == 4\n" + PLAIN
        assert build(source(text, SourceFile("tiles.py", "SIZE = 4\n")), tmp_path).artifact.is_dir()

    def test_the_original_source_is_published(self, tmp_path: Path) -> None:
        text = "from pathlib import Path\nPath(__file__).write_text('changed')\n" + PLAIN
        built = build(source(text), tmp_path)
        assert (built.artifact / "kernel.py").read_text() == text

    def test_the_worker_gets_its_own_compile_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PLAIN_CACHE_DIR", "elsewhere")
        monkeypatch.setattr(sys, "path", list(sys.path))
        built = build(source(), tmp_path)
        try:
            Plain().load(built.artifact, "run", "")
        finally:
            sys.modules.pop("kernel", None)
        assert os.environ["PLAIN_CACHE_DIR"] == str(tmp_path / "home" / "plain_cache_dir")

    def test_a_worker_of_these_surfaces_may_start_processes(self) -> None:
        assert JitBackend.allow_processes
        assert JitBackend.platforms == tuple(GPU_PLATFORMS)


class TestFailures:
    def test_what_the_file_raises_is_reported_with_its_line(self, tmp_path: Path) -> None:
        found = failure(source("def size():\n    raise ValueError('no such tile')\n\nsize()\n"), tmp_path)
        assert found.code is Code.COMPILE
        assert "ValueError: no such tile" in found.log
        assert "kernel.py, line 2, in size" in found.log
        assert str(tmp_path) not in found.log

    def test_invalid_python_is_reported_before_anything_starts(self, tmp_path: Path) -> None:
        found = failure(source("def run(:\n"), tmp_path)
        assert found.code is Code.COMPILE
        assert "mine.py is not valid Python" in found.message

    def test_a_missing_entry_is_named(self, tmp_path: Path) -> None:
        found = failure(source(entry="launch"), tmp_path)
        assert (found.code, "'launch'" in found.message) == (Code.ENTRY_MISSING, True)

    def test_a_source_without_files_and_one_with_flags_are_refused(self, tmp_path: Path) -> None:
        assert failure(source(files=()), tmp_path).code is Code.SOURCE_MISSING
        assert failure(source(flags=("-O3",)), tmp_path).code is Code.FLAG_REFUSED

    @pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit(0)"])
    def test_a_file_that_ends_the_process_is_a_failure(self, end: str, tmp_path: Path) -> None:
        assert failure(source(f"import os, sys\n{end}\n" + PLAIN), tmp_path).code is Code.COMPILE

    def test_a_file_that_never_ends_is_ended(self, tmp_path: Path) -> None:
        started = time.monotonic()
        found = failure(source("import time\ntime.sleep(600)\n"), tmp_path, timeout_s=3)
        assert found.code is Code.TIMEOUT_BUILD
        assert time.monotonic() - started < 30

    def test_nothing_of_a_failed_build_is_left(self, tmp_path: Path) -> None:
        failure(source("raise ValueError\n"), tmp_path / "cache")
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []

    @pytest.mark.skipif(landlock_abi() < 1, reason="this kernel has no Landlock")
    def test_the_file_cannot_write_outside_of_its_directory(self, tmp_path: Path) -> None:
        target = tmp_path / "stolen"
        found = failure(source(f"open({str(target)!r}, 'w').write('x')\n"), tmp_path / "cache")
        assert "PermissionError" in found.log
        assert not target.exists()

    @pytest.mark.skipif(landlock_abi() < 1, reason="this kernel has no Landlock")
    def test_the_file_cannot_read_what_is_not_the_systems(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        found = failure(source(f"open({str(tmp_path / 'secret')!r}).read()\n"), tmp_path / "cache")
        assert "PermissionError" in found.log

    def test_the_file_may_start_processes_as_compilers_do(self, tmp_path: Path) -> None:
        text = "import subprocess\nfor _ in range(3):\n    subprocess.run(['true'], check=True)\n" + PLAIN
        assert build(source(text), tmp_path).artifact.is_dir()

    def test_the_callers_environment_is_not_the_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KEY_OF_THE_CALLER", "secret")
        build(source("import os\nassert 'KEY_OF_THE_CALLER' not in os.environ\n" + PLAIN), tmp_path)

    def test_the_user_has_a_name_where_none_is_listed(self, tmp_path: Path) -> None:
        unlisted = "import pwd\npwd.getpwuid = {}.__getitem__\n"
        assert build(
            source(unlisted + "import getpass\nassert getpass.getuser()\n" + PLAIN), tmp_path
        ).artifact.is_dir()


class TestAnswer:
    def write(self, out: Path, **units: Any) -> Path:
        unit = {"name": "tile", "file": "00.cubin", "log": "", "shared_bytes": 0} | units
        (out / "00.cubin").write_bytes(b"x")
        (out / ahead.RESULT).write_text(json.dumps({"entry": True, "units": [unit]}))
        return out

    def test_an_answer_is_read(self, tmp_path: Path) -> None:
        answer = declared.read_answer(self.write(tmp_path), "")
        assert (answer.entry, answer.units[0].name) == (True, "tile")

    @pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "01.cubin", "00.so", "00.cu", "", "x\n00.cubin"])
    def test_a_foreign_file_is_refused(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure, match="no file of its own"):
            declared.read_answer(self.write(tmp_path, file=name), "")

    def test_a_link_is_refused(self, tmp_path: Path) -> None:
        out = self.write(tmp_path)
        (out / "00.cubin").unlink()
        (out / "00.cubin").symlink_to("/etc/passwd")
        with pytest.raises(SurfaceFailure, match="no file of its own"):
            declared.read_answer(out, "")

    @pytest.mark.parametrize("text", ["{", "[]", '{"entry": true}', '{"entry": 1, "units": []}', "\xff"])
    def test_a_strange_answer_is_refused(self, text: str, tmp_path: Path) -> None:
        (tmp_path / ahead.RESULT).write_bytes(text.encode("latin-1"))
        with pytest.raises(SurfaceFailure, match="strange answer"):
            declared.read_answer(tmp_path, "")

    def test_no_answer_and_one_without_end_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure, match="without an answer"):
            declared.read_answer(tmp_path, "")
        (tmp_path / ahead.RESULT).write_bytes(b" " * (declared.RESULT_LIMIT + 1))
        with pytest.raises(SurfaceFailure, match="without an answer"):
            declared.read_answer(tmp_path, "")


class TestKeptEntries:
    def test_files_that_are_asked_for_are_copied(self, tmp_path: Path) -> None:
        entry = tmp_path / "old" / "ENTRY"
        entry.mkdir(parents=True)
        for name in ("tile.json", "tile.cubin", "tile.llir"):
            (entry / name).write_text(name)
        copy_entries(tmp_path / "old", tmp_path / "new", (".json", ".cubin"))
        assert {path.name: path.read_text() for path in (tmp_path / "new" / "ENTRY").iterdir()} == {
            "tile.json": "tile.json", "tile.cubin": "tile.cubin",
        }  # fmt: skip

    def test_links_and_folders_are_left(self, tmp_path: Path) -> None:
        entry = tmp_path / "old" / "ENTRY"
        (entry / "deep.json").mkdir(parents=True)
        (entry / "link.json").symlink_to("/etc/passwd")
        (tmp_path / "old" / "LINK").symlink_to("/etc")
        (tmp_path / "old" / "lone.json").write_text("")
        copy_entries(tmp_path / "old", tmp_path / "new", (".json", ".conf"))
        assert not (tmp_path / "new").exists()


class TestInstalled:
    def test_a_language_that_is_not_installed_has_its_command(self) -> None:
        with pytest.raises(MissingDependency, match=r"Nowhere is missing.*pytest-klineage\[nowhere_to_be_found\]"):
            jit.installed_version("nowhere_to_be_found", "Nowhere")

    def test_an_installed_package_has_a_version(self) -> None:
        assert jit.installed_version("msgspec", "msgspec") == msgspec.__version__


class TestDeclarations:
    """COMPILE itself, as the compiling process reads it."""

    def test_a_platform_that_is_not_named_declares_nothing(self) -> None:
        module = type("Module", (), {"COMPILE": {"sm90": [{"kernel": print}]}})
        assert ahead.declared(module, "sm120") == []
        assert ahead.declared(object(), "sm90") == []
        assert ahead.declared(module, "sm90") == [{"kernel": print}]

    @pytest.mark.parametrize("table", [[], {"sm90": {}}, {"sm90": [1]}, {"sm90": [{"signature": {}}]}, "sm90"])
    def test_a_table_of_another_form_says_which_is_right(self, table: object) -> None:
        with pytest.raises(ahead.Misdeclared, match="kernel"):
            ahead.declared(type("Module", (), {"COMPILE": table}), "sm90")

    def test_an_unknown_field_is_named(self) -> None:
        with pytest.raises(ahead.Misdeclared, match="it does not have grid"):
            ahead.check_fields({"kernel": print, "grid": 1}, ahead.TRITON_FIELDS)

    def test_a_function_below_an_attribute_is_an_entry(self) -> None:
        assert ahead.has_entry(json, "decoder.JSONDecoder.decode")
        assert not ahead.has_entry(json, "decoder.nothing.decode")
        assert not ahead.has_entry(json, "__name__")


@pytest.mark.parametrize(
    ("program", "folder"),
    [
        ("/opt/gcc/bin/g++", "/opt/gcc"), ("/opt/g++", "/opt"), ("/usr/bin/none", "/usr"), ("/none", "/none"),
        ("{home}/gcc/bin/g++", "{home}/gcc"), ("{home}/bin/g++", "{home}/bin"), ("{home}/g++", "{home}/g++"),
        ("{link}/bin/g++", "{home}/bin"), ("{other}/bin/g++", "{other}/bin"), ("{other}/gcc/bin/g++", "{other}/gcc"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("named", ["home", "link"])
def test_beside_a_compiler_its_own_folder_may_be_read(
    named: str, program: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = {
        "home": tmp_path / "home",
        "other": tmp_path / "other",
        "link": tmp_path.parent / f"{tmp_path.name}-link",
    }
    positions["home"].mkdir()
    positions["link"].symlink_to(positions["home"])
    monkeypatch.setenv("HOME", str(positions[named]))
    assert declared.installation_of(program.format(**positions)) == folder.format(**positions)


def test_a_home_below_the_root_leaves_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    assert declared.installation_of("/opt/g++") == "/opt"
