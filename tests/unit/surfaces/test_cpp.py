"""Building C++: which flags are allowed, what a failure says, what the cache keeps apart, and what the limit ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import Code, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import SurfaceFailure, cpp
from pytest_klineage.surfaces.compiling import LOG_LIMIT, bounded, digest_of
from pytest_klineage.surfaces.cpp import DEFAULT_FLAGS, CppBackend, check_flags, find_compiler
from pytest_klineage.surfaces.reads import ASSEMBLED, INCLUDED

EMPTY = '#include "klineage.h"\nextern "C" int run(const klineage_call *) { return 0; }\n'
FLAG_TEXT = st.text(alphabet="abWfmOlDLI-=,.:/@+_0 \t\n3", max_size=12)
Compiler = Callable[[str], Path]


def source(
    text: str = EMPTY, *files: SourceFile, flags: tuple[str, ...] = ("-O0",), entry: str = "run"
) -> KernelSource:
    return KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", text), *files), entry=entry, flags=flags)


def build(source: KernelSource, cache: Path, timeout_s: float = 60) -> cpp.Built:
    return CppBackend().build(source, cache, platform="cpu", timeout_s=timeout_s)


def wait_for_the_end_of(pid: int) -> None:
    """Return when a process is gone or a zombie; fail when it still runs after half a minute."""
    deadline = time.monotonic() + 30
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Make a shell script the compiler. It sees the output's path as $OUT; --version and the lists of what was read are
    taken care of."""

    def make(script: str, version: str = "script 1.0") -> Path:
        path = tmp_path / f"compiler-{len(list(tmp_path.iterdir()))}"
        head = f'#!/bin/bash\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\nOUT="${{@: -1}}"\n'
        lists = f"echo kernel.so: kernel.cpp | tee {INCLUDED} > {ASSEMBLED}\n"
        path.write_text(head + lists + script)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


class TestFlags:
    @pytest.mark.parametrize(
        "flag",
        [
            "-O", "-O0", "-O2", "-O3", "-Os", "-Og", "-Ofast", "-g", "-std=c++17", "-std=gnu++20", "-fopenmp",
            "-fopenmp-simd", "-march=x86-64-v3", "-mavx2", "-mfma", "-mprefer-vector-width=512",
            "-mno-avx512f", "-msse4.2", "-ffast-math", "-fno-math-errno", "-funroll-loops", "-flto", "-DTILE",
            "-DTILE=64", "-DSCALE=1.5e-3", "-Wall", "-Wno-unused", "--param=max-unroll-times=8",
        ],
    )  # fmt: skip
    def test_what_an_expert_needs_is_allowed(self, flag: str) -> None:
        check_flags((flag,))

    def test_the_default_flags_are_allowed(self) -> None:
        check_flags(DEFAULT_FLAGS)

    @pytest.mark.parametrize(
        "flag",
        [
            "", "-", "-fplugin=evil.so", "-fplugin=/tmp/evil.so", "-include", "-include/etc/passwd", "-imacros", "-I.",
            "-I/usr", "-isystem", "-iquote.", "-L/usr/lib", "-lblas", "-l:libblas.so", "-l", "-Wl,-rpath,/x",
            "-Wa,--x", "-Wp,-MD,x", "-Xlinker", "-Xpreprocessor", "-B/tmp", "-specs=/tmp/x", "-specs=x", "-wrapper",
            "-x", "-o", "-ofile", "-c", "-S", "-E", "-M", "-MD", "-MFx", "-save-temps", "-fuse-ld=gold",
            "-fprofile-use=/tmp/x", "-fprofile-dir=x", "-fdump-tree-all=x", "-fsanitize=address", "-T", "-u", "-z",
            "-DX=/etc/passwd", "-DX=a b", "-DX=`id`", "-D", "-U__x86_64__", "@file", "kernel2.cpp", "--sysroot=/",
            "--help", "-O3 -lblas", "-O3\n", "\n-O3", "-march=native",
            "-mtune=native", "-march=native;id", "-pthread", "-static", "-rdynamic",
        ],
    )  # fmt: skip
    def test_flags_with_files_libraries_or_programs_are_refused(self, flag: str) -> None:
        with pytest.raises(SurfaceFailure) as caught:
            check_flags((flag,))
        assert caught.value.code is Code.FLAG_REFUSED
        assert repr(flag) in caught.value.message

    @given(st.sampled_from(["-f", "-m", "-D", "-W", "-O", "-std=", "-l", "-I", "-L", ""]), FLAG_TEXT)
    def test_no_allowed_flag_can_name_a_file(self, start: str, rest: str) -> None:
        flag = start + rest
        try:
            check_flags((flag,))
        except SurfaceFailure:
            return
        assert not re.search(r"[/,@:\s]", flag)
        assert not re.match(r"-(l|L|I|B|X|x|o|include|specs|isystem|fplugin=|Wl,)", flag)

    @given(st.text(max_size=8), st.sampled_from("/,@ \t\n\r\0'\"`$;|&<>()\\"), st.text(max_size=8))
    def test_a_flag_with_a_character_of_paths_or_shells_is_refused(self, left: str, character: str, right: str) -> None:
        for start in ("-f", "-m", "-DX=", "-W"):
            with pytest.raises(SurfaceFailure):
                check_flags((start + left + character + right,))

    def test_one_bad_flag_among_good_ones_is_found(self) -> None:
        with pytest.raises(SurfaceFailure, match="-lblas"):
            check_flags(("-O3", "-lblas", "-g"))

    def test_a_refused_flag_stops_the_build_before_the_compiler(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler(f"touch {tmp_path}/called")
        with pytest.raises(SurfaceFailure):
            build(source(flags=("-lblas",)), tmp_path / "cache")
        assert not (tmp_path / "called").exists()


class TestFailures:
    def test_a_compile_error_quotes_the_compiler(self, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure) as caught:
            build(source("int run() { return undeclared_tile; }"), tmp_path)
        assert caught.value.code is Code.COMPILE
        assert "undeclared_tile" in caught.value.log
        assert "kernel.cpp:1" in caught.value.log
        assert str(tmp_path) not in caught.value.log

    def test_the_compilers_words_are_bounded(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler("head -c 1000000 /dev/zero | tr '\\0' x; exit 1")
        with pytest.raises(SurfaceFailure) as caught:
            build(source(), tmp_path / "cache")
        assert LOG_LIMIT <= len(caught.value.log) < LOG_LIMIT + 100
        assert "more characters" in caught.value.log

    def test_bytes_that_are_no_text_in_the_log_are_replaced(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler("printf 'bad \\377 byte'; exit 1")
        with pytest.raises(SurfaceFailure) as caught:
            build(source(), tmp_path / "cache")
        assert caught.value.log == "bad \N{REPLACEMENT CHARACTER} byte"

    def test_the_compilers_status_is_reported(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler("exit 4")
        with pytest.raises(SurfaceFailure, match="status 4"):
            build(source(), tmp_path / "cache")

    def test_a_compiler_that_writes_nothing_is_a_failure(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler("exit 0")
        with pytest.raises(SurfaceFailure) as caught:
            build(source(), tmp_path / "cache")
        assert caught.value.code is Code.BUILD_IO

    def test_the_time_limit_ends_the_compilers_children_too(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler(f"(trap '' TERM; echo $BASHPID > {tmp_path}/child; while :; do sleep 0.05; done) &\nwait")
        with pytest.raises(SurfaceFailure) as caught:
            build(source(), tmp_path / "cache", timeout_s=1.0)
        assert caught.value.code is Code.TIMEOUT_BUILD
        assert "1 s" in caught.value.message
        wait_for_the_end_of(int((tmp_path / "child").read_text()))

    def test_children_that_outlive_the_compiler_are_ended(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler(f"sleep 600 & echo $! > {tmp_path}/child; exit 1")
        with pytest.raises(SurfaceFailure):
            build(source(), tmp_path / "cache")
        wait_for_the_end_of(int((tmp_path / "child").read_text()))

    def test_a_cache_that_cannot_be_written_says_which_option_helps(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SurfaceFailure) as caught:
            build(source(), tmp_path / "file" / "cache")
        assert caught.value.code is Code.BUILD_IO
        assert "--klineage-cache-dir" in caught.value.message

    def test_a_source_without_files_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure) as caught:
            build(msgspec.structs.replace(source(), files=()), tmp_path)
        assert caught.value.code is Code.SOURCE_MISSING

    def test_without_a_compiler_the_user_learns_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(MissingDependency, match=r"C\+\+ compiler is missing.*g\+\+"):
            build(source(), tmp_path)

    @pytest.mark.parametrize("script", ["exit 1", "exit 0"])
    def test_a_failed_build_leaves_nothing_in_the_cache(self, script: str, compiler: Compiler, tmp_path: Path) -> None:
        compiler(script)
        with pytest.raises(SurfaceFailure):
            build(source(), tmp_path / "cache")
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


class TestCache:
    def test_a_second_build_is_a_hit(self, tmp_path: Path) -> None:
        first, second = build(source(), tmp_path), build(source(), tmp_path)
        assert (first.build.cached, second.build.cached) == (False, True)
        assert first.artifact == second.artifact
        assert first.build.digest == second.build.digest
        assert (first.build.seconds > 0, second.build.seconds) == (True, 0.0)

    def test_a_hit_does_not_call_the_compiler(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler(f'echo x > "$OUT"; echo called >> {tmp_path}/calls')
        build(source(), tmp_path / "cache")
        build(source(), tmp_path / "cache")
        assert (tmp_path / "calls").read_text() == "called\n"

    def test_the_label_does_not_matter_to_the_cache(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler('echo x > "$OUT"')
        build(source(), tmp_path / "cache")
        assert build(msgspec.structs.replace(source(), label="other"), tmp_path / "cache").build.cached

    @pytest.mark.parametrize(
        "other",
        [
            source(EMPTY + "// a comment"),
            source(EMPTY, SourceFile("tile.h", "")),
            source(flags=("-O1",)),
            source(flags=()),
            source(entry="other"),
        ],
    )
    def test_another_source_is_another_build(self, other: KernelSource, compiler: Compiler, tmp_path: Path) -> None:
        compiler('echo x > "$OUT"')
        first = build(source(), tmp_path / "cache").build
        second = build(other, tmp_path / "cache").build
        assert not second.cached
        assert second.digest != first.digest

    def test_a_changed_abi_header_is_another_build(
        self, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler('echo x > "$OUT"')
        first = build(source(), tmp_path / "cache").build
        changed = tmp_path / "klineage.h"
        changed.write_bytes(cpp.HEADER.read_bytes() + b"\n")
        monkeypatch.setattr(cpp, "HEADER", changed)
        second = build(source(), tmp_path / "cache").build
        assert not second.cached
        assert second.digest != first.digest

    def test_another_version_of_the_compiler_is_another_build(self, compiler: Compiler, tmp_path: Path) -> None:
        compiler('echo x > "$OUT"', version="script 1.0")
        first = build(source(), tmp_path / "cache").build
        compiler('echo x > "$OUT"', version="script 2.0")
        second = build(source(), tmp_path / "cache").build
        assert (first.toolchain, second.toolchain) == ("script 1.0", "script 2.0")
        assert not second.cached

    def test_the_recorded_command_names_no_local_directory(self, tmp_path: Path) -> None:
        command = build(source(), tmp_path).build.command
        assert command.startswith("g++ -std=c++17")
        assert "/" not in command

    def test_further_files_can_be_included_by_name(self, tmp_path: Path) -> None:
        text = '#include "tile.h"\n' + EMPTY + "static_assert(TILE == 4);\n"
        assert build(source(text, SourceFile("tile.h", "#define TILE 4")), tmp_path).artifact.exists()

    def test_variables_of_the_caller_do_not_reach_the_compiler(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "secret.h").write_text("")
        monkeypatch.setenv("CPATH", str(tmp_path))
        with pytest.raises(SurfaceFailure, match="status"):
            build(source('#include "secret.h"\n' + EMPTY), tmp_path / "cache")


class TestCompiler:
    def test_cxx_names_the_compiler(self, compiler: Compiler) -> None:
        path = compiler("exit 0")
        assert find_compiler() == str(path)

    @pytest.mark.parametrize("name", ["no-such-compiler", "ccache g++"])
    def test_a_cxx_that_does_not_exist_is_named(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", name)
        with pytest.raises(MissingDependency, match=re.escape(f"CXX names, '{name}', is missing")):
            find_compiler()

    @pytest.mark.parametrize("name", ["", " "])
    def test_an_empty_cxx_is_unset(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", name)
        assert find_compiler()


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_parts_of_a_digest_cannot_run_into_one_another(left: list[str], right: list[str]) -> None:
    assert (digest_of(*left) == digest_of(*right)) == (left == right)


@given(st.text(max_size=60), st.integers(0, 40))
def test_a_bounded_text_says_how_much_is_missing(text: str, limit: int) -> None:
    result = bounded(text, limit)
    assert result.startswith(text[:limit])
    assert (result == text) == (len(text) <= limit)
    if len(text) > limit:
        assert f"{len(text) - limit} more" in result
