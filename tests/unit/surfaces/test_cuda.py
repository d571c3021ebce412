"""Building CUDA: which flags are allowed, what the recipe covers, what reaches the compiler; real builds where nvcc is.

No device is used. Where nvcc is not there, a shell script takes its place, and the real builds are skipped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.errors import MissingDependency
from pytest_klineage.records import GPU_PLATFORMS, Build, Code, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import SurfaceFailure, cuda, toolkit
from pytest_klineage.surfaces.cuda import CudaBackend, check_flags, shown_command
from pytest_klineage.surfaces.toolkit import HeaderLibrary, find_toolkit, package_folders

EMPTY = '#include "klineage.h"\nextern "C" int run(const klineage_call *) { return 0; }\n'
FLAG_TEXT = st.text(alphabet="abXWfmOlDLIt-=,.:/@+_0 \t\n3", max_size=12)
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4gemmv' for 'sm_90a'
ptxas info    : Function properties for _Z4gemmv
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem
kernel.cu(3): warning #177-D: variable "x" was declared but never referenced"""
Nvcc = Callable[[str], Path]


def source(text: str = EMPTY, *files: SourceFile, flags: tuple[str, ...] = (), entry: str = "run") -> KernelSource:
    return KernelSource(surface=Surface.CUDA, files=(SourceFile("kernel.cu", text), *files), entry=entry, flags=flags)


def build(source: KernelSource, cache: Path, platform: str = "sm90", timeout_s: float = 120) -> cuda.Built:
    return CudaBackend().build(source, cache, platform=platform, timeout_s=timeout_s)


def nvcc_is_missing() -> str:
    """Why there is no nvcc, or nothing."""
    try:
        find_toolkit()
    except MissingDependency as error:
        return str(error)
    return ""


PROBES = {
    "wgmma": ("wgmma.fence", '"wgmma.fence.sync.aligned;" ::: "memory"'),
    "tcgen05": ("tcgen05.wait", '"tcgen05.wait::ld.sync.aligned;" ::: "memory"'),
    "cluster": ("barrier.cluster", '"barrier.cluster.arrive.aligned;" ::: "memory"'),
    "bulk_copy": ("cp.async.bulk", '"cp.async.bulk.commit_group;" ::: "memory"'),
    "setmaxnreg": ("setmaxnreg", '"setmaxnreg.dec.sync.aligned.u32 24;"'),
    "stmatrix": ("stmatrix", '"stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%0};" :: "r"(at)'),
    "mbarrier": (
        "mbarrier.try_wait", '"{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; }" :: "r"(at)',
    ),
    "cp_async": ("cp.async", '"cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(there)'),
}  # fmt: skip
"""By word of INSTRUCTIONS: the compiler's name for one that needs it, and a statement."""
LATER = {("sm120", word) for word in ("cluster", "bulk_copy", "setmaxnreg")}
"""What a platform has, and is not granted."""


def probes(words: Iterable[str]) -> str:
    """A kernel for each of some words."""
    body = "".join(
        f"__global__ void probe_{word}(unsigned at, long there) {{ asm volatile({PROBES[word][1]}); }}\n"
        for word in sorted(words)
        if word in PROBES
    )
    return EMPTY + body


needs_nvcc = pytest.mark.skipif(bool(nvcc_is_missing()), reason=nvcc_is_missing() or "nvcc is there")


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvcc:
    """Make a shell script the CUDA compiler. It sees the output's path as $OUT and keeps its arguments in a file."""
    monkeypatch.setattr(toolkit, "find_disassembler", lambda: None)

    def make(script: str, version: str = "13.0.88") -> Path:
        path = tmp_path / f"nvcc-{len(list(tmp_path.iterdir()))}"
        path.write_text(
            f'#!/bin/bash\nif [ "$1" = --version ]; then echo "release, V{version}"; exit; fi\nOUT="${{@: -1}}"\n'
            f'printf "%s\\n" "$@" > {tmp_path}/arguments\n{script}'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CUDACXX", str(path))
        return path

    return make


class TestFlags:
    @pytest.mark.parametrize(
        "flag",
        [
            "-O0", "-O3", "-std=c++20", "-DTILE", "-DTILE=64", "--use_fast_math", "-use_fast_math", "-maxrregcount=128",
            "--maxrregcount=64", "--expt-relaxed-constexpr", "--extended-lambda", "--expt-extended-lambda",
            "--fmad=false", "--ftz=true", "--prec-div=false", "--prec-sqrt=true", "--diag-suppress=177,550",
            "-Xptxas=-O3", "-Xptxas=-dlcm=ca", "-Xptxas=-O3,--warn-on-spills", "-lcuda", "--include=cutlass",
            "-Xptxas=--allow-expensive-optimizations=true", "-Xptxas=--def-load-cache=ca",
        ],
    )  # fmt: skip
    def test_what_an_expert_needs_is_allowed(self, flag: str) -> None:
        check_flags((flag,))

    @pytest.mark.parametrize(
        "flag",
        [
            "", "-", "-I.", "-I/usr", "-include=x", "--pre-include=x", "-isystem=/x", "-L/usr/lib", "-lcublas",
            "-lcudnn", "-l", "-lcuda2", "-Xcompiler=-fplugin=x.so", "-Xcompiler=-O3", "-Xlinker=-rpath",
            "-Xptxas=-v,-o,x",
            "-Xptxas=--input-as-string", "-Xptxas=", "-Xptxas=-O3,", "-ccbin=/tmp/x", "--compiler-bindir=/tmp",
            "-rdc=true", "-dc", "-gencode=arch=compute_80,code=sm_80", "-arch=sm_80", "--gpu-architecture=native",
            "-arch=native",
            "-o", "--output-file=x", "-optf=x", "--options-file=x", "@file", "-keep", "--keep-dir=/tmp", "-run",
            "--cudart=shared", "-G", "-x=cu", "-t0", "--ldir=/x", "--include=", "--include=../x", "--include=cuda",
            "-O3\n", "-O3 -lcublas", "-DX=/etc/passwd", "-DX=a b", "kernel2.cu", "-prebuild", "--fmad=maybe",
        ],
    )  # fmt: skip
    def test_flags_with_files_libraries_or_architectures_are_refused(self, flag: str) -> None:
        with pytest.raises(SurfaceFailure) as caught:
            check_flags((flag,))
        assert caught.value.code is Code.FLAG_REFUSED
        assert repr(flag) in caught.value.message

    @given(
        st.sampled_from(["-f", "-X", "-Xptxas=", "-D", "--", "-O", "-std=", "-l", "-I", "--include=", ""]), FLAG_TEXT
    )
    def test_no_flag_smuggles_a_path(self, head: str, tail: str) -> None:
        try:
            check_flags((head + tail,))
        except SurfaceFailure:
            return
        assert not set("/@ \t\n:") & set(head + tail)

    def test_a_flag_of_ours_gives_way_and_others_come_on_top(self) -> None:
        command = shown_command(source(flags=("-std=c++20", "--use_fast_math")), "sm90")
        assert "-std=c++17" not in command
        assert [part for part in command if part in ("-O3", "-std=c++20", "--use_fast_math", "-lineinfo")] == [
            "-lineinfo", "-O3", "-std=c++20", "--use_fast_math",
        ]  # fmt: skip
        assert "-O3" not in shown_command(source(flags=("-O1",)), "sm90")


class TestRecipe:
    def test_it_says_nothing_about_this_machine(self, nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
        nvcc("exit 0", version="13.0.88")
        first = CudaBackend().recipe(source(), platform="sm90")
        nvcc("exit 0", version="13.1.1")
        assert CudaBackend().recipe(source(), platform="sm90") == first
        monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
        assert CudaBackend().recipe(source(flags=("--include=cutlass",)), platform="sm90")

    def test_it_tells_apart_what_is_asked_for(self) -> None:
        backend = CudaBackend()
        asked = [
            backend.recipe(source(), platform="sm90"),
            backend.recipe(source(), platform="sm120"),
            backend.recipe(source(flags=("-O1",)), platform="sm90"),
            backend.recipe(source(EMPTY + "//"), platform="sm90"),
            backend.recipe(source(EMPTY, SourceFile("tile.h", "")), platform="sm90"),
            backend.recipe(source(entry="main"), platform="sm90"),
        ]
        assert len(set(asked)) == len(asked)

    def test_an_unbuildable_source_has_no_command(self) -> None:
        with pytest.raises(SurfaceFailure, match="not allowed"):
            CudaBackend().recipe(source(flags=("-lcublas",)), platform="sm90")
        nothing = KernelSource(surface=Surface.CUDA, files=(), entry="run")
        with pytest.raises(SurfaceFailure, match="source file") as caught:
            CudaBackend().recipe(nothing, platform="sm90")
        assert caught.value.code is Code.SOURCE_MISSING


class TestBuild:
    def test_the_record_says_how_and_has_no_path_of_this_machine(self, nvcc: Nvcc, tmp_path: Path) -> None:
        nvcc(f"cat <<'END'\n{PTXAS}\nEND\necho code > $OUT")
        built = build(source(), tmp_path / "cache")
        assert built.artifact.read_text() == "code\n"
        assert built.build.command == shlex.join(shown_command(source(), "sm90"))
        assert str(tmp_path) not in built.build.command
        assert built.build.toolchain.startswith("nvcc 13.0.88, ")
        assert built.build.platform == "sm90"
        assert built.build.log == 'kernel.cu(3): warning #177-D: variable "x" was declared but never referenced'
        (kernel,) = built.build.kernels
        assert (kernel.function, kernel.registers, kernel.spill_bytes, kernel.instructions) == ("gemm", 40, 8, None)
        assert json.loads((built.artifact.parent / "build.json").read_text())["recipe"] == built.build.recipe

    def test_the_compiler_gets_architecture_and_host_compiler(self, nvcc: Nvcc, tmp_path: Path) -> None:
        nvcc("echo code > $OUT")
        build(source(), tmp_path / "cache", "sm120")
        arguments = (tmp_path / "arguments").read_text().splitlines()
        assert "-gencode=arch=compute_120a,code=sm_120a" in arguments
        assert f"-ccbin={toolkit.find_compiler()}" in arguments
        assert "-Xlinker=-z,defs" in arguments

    def test_the_second_time_it_comes_from_the_cache(self, nvcc: Nvcc, tmp_path: Path) -> None:
        nvcc("echo code > $OUT")
        first = build(source(), tmp_path / "cache")
        nvcc("exit 1")
        second = build(source(), tmp_path / "cache")
        assert second.build == msgspec.structs.replace(first.build, cached=True, seconds=0.0)
        with pytest.raises(SurfaceFailure):
            build(source(), tmp_path / "cache", "sm120")
        nvcc("exit 1", version="13.0.99")
        with pytest.raises(SurfaceFailure):
            build(source(), tmp_path / "cache")

    def test_a_failure_has_the_compilers_words(self, nvcc: Nvcc, tmp_path: Path) -> None:
        nvcc("echo 'kernel.cu(1): error: no' >&2; exit 2")
        with pytest.raises(SurfaceFailure, match="status 2") as caught:
            build(source(), tmp_path / "cache")
        assert caught.value.code is Code.COMPILE
        assert caught.value.log == "kernel.cu(1): error: no\n"

    @pytest.mark.parametrize("script", ["kill -9 $$", "exit 137"])
    def test_a_killed_compiler_is_reported(self, nvcc: Nvcc, tmp_path: Path, script: str) -> None:
        nvcc(script)
        with pytest.raises(SurfaceFailure, match="for want of memory") as caught:
            build(source(), tmp_path / "cache")
        assert caught.value.code is Code.COMPILE

    def test_it_ends_in_time(self, nvcc: Nvcc, tmp_path: Path) -> None:
        nvcc("sleep 60")
        with pytest.raises(SurfaceFailure, match=r"0\.3 s") as caught:
            build(source(), tmp_path / "cache", timeout_s=0.3)
        assert caught.value.code is Code.TIMEOUT_BUILD

    def test_header_libraries_are_found_by_name_and_recorded(
        self, nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvcc("echo code > $OUT")

        def headers(version: str) -> Callable[[str], HeaderLibrary]:
            return lambda name: HeaderLibrary(name=name, folders=("/x/include", "/x/util"), version=version)

        monkeypatch.setattr(cuda, "find_headers", headers("4.2.0 (nvidia-cutlass 4.2.0.0)"))
        wanted = source(flags=("--include=cutlass",))
        first = build(wanted, tmp_path / "cache").build
        arguments = (tmp_path / "arguments").read_text().splitlines()
        assert [part for part in arguments if part.startswith("-I/x")] == ["-I/x/include", "-I/x/util"]
        assert "--include=cutlass" not in arguments
        assert first.includes == {"cutlass": "4.2.0 (nvidia-cutlass 4.2.0.0)"}
        monkeypatch.setattr(cuda, "find_headers", headers("4.3.0 (nvidia-cutlass 4.3.0.0)"))
        second: Build = build(wanted, tmp_path / "cache").build
        assert (second.recipe, second.cached) == (first.recipe, False)
        assert second.digest != first.digest


@needs_nvcc
class TestNvcc:
    """Real builds. Each takes one to two seconds."""

    def test_what_is_written_in_the_source_is_in_the_record(self, tmp_path: Path) -> None:
        text = EMPTY + (
            "__global__ void stage(float *out) { __shared__ float tile[256]; tile[threadIdx.x] = out[threadIdx.x];\n"
            "  __syncthreads(); out[threadIdx.x] = tile[255 - threadIdx.x]; }\n"
        )
        built = build(source(text), tmp_path)
        (kernel,) = built.build.kernels
        assert (kernel.function, kernel.static_shared_bytes, kernel.spill_bytes) == ("stage", 1024, 0)
        assert built.build.log == ""
        CudaBackend().load(built.artifact, "run", "")

    def test_spills_are_found(self, tmp_path: Path) -> None:
        sums = " ".join(f"float s{i} = in[{i} * n];" for i in range(64))
        total = "".join(f" out[n * {i}] = s{i} * s{(i * 7) % 64};" for i in range(64))
        text = f"{EMPTY}__global__ void wide(const float *in, float *out, int n) {{ {sums} __syncthreads();{total} }}\n"
        (kernel,) = build(source(text, flags=("--maxrregcount=24",)), tmp_path).build.kernels
        assert kernel.registers == 24
        assert kernel.spill_bytes > 0

    def test_a_name_that_is_defined_nowhere_is_an_error_of_the_build(self, tmp_path: Path) -> None:
        text = EMPTY.replace("return 0", "extern int nowhere(); return nowhere()")
        with pytest.raises(SurfaceFailure) as caught:
            build(source(text), tmp_path)
        assert caught.value.code is Code.COMPILE
        assert "nowhere" in caught.value.log

    def test_a_missing_entry_is_an_error_of_the_build(self, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure, match="no symbol 'walk'") as caught:
            build(source(entry="walk"), tmp_path)
        assert caught.value.code is Code.ENTRY_MISSING

    @pytest.mark.parametrize("first", ["", "-Xlinker=--as-needed"])
    def test_the_driver_may_be_linked_without_a_driver(
        self, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ubuntu's compilers put the second in front of what they are given."""
        monkeypatch.setenv("NVCC_PREPEND_FLAGS", first)
        text = "#include <cuda.h>\n" + EMPTY.replace("return 0", "return cuInit(0)")
        built = build(source(text, flags=("-lcuda",)), tmp_path)
        assert b"libcuda.so.1" in built.artifact.read_bytes()
        with pytest.raises(SurfaceFailure):
            build(source(text), tmp_path)

    @pytest.mark.parametrize("platform", GPU_PLATFORMS)
    def test_a_platform_builds_what_its_table_has(self, platform: str, tmp_path: Path) -> None:
        """The compiler itself confirms the instructions of records/architectures.py."""
        granted = GPU_PLATFORMS[platform].instructions
        build(source(probes(granted)), tmp_path, platform)
        lacking = {word for word in PROBES if word not in granted and (platform, word) not in LATER}
        with pytest.raises(SurfaceFailure) as caught:
            build(source(probes(lacking)), tmp_path, platform)
        refused = [line for line in caught.value.log.splitlines() if ".target" in line]
        for word in lacking:
            assert any(PROBES[word][0] in line for line in refused), word

    @pytest.mark.skipif(not package_folders("cutlass_library"), reason="nvidia-cutlass is not installed")
    def test_cute_is_there_by_name(self, tmp_path: Path) -> None:
        text = (
            "#include <cute/tensor.hpp>\n"
            + EMPTY
            + (
                "__global__ void fill(float *out) { auto t = cute::make_tensor(cute::make_gmem_ptr(out),\n"
                "  cute::make_layout(cute::Int<32>{})); t(threadIdx.x) = 1.0f; }\n"
            )
        )
        flags = ("--include=cutlass", "--expt-relaxed-constexpr", "-DNDEBUG")
        built = build(source(text, flags=flags), tmp_path)
        assert "nvidia-cutlass" in built.build.includes["cutlass"]
        assert [kernel.function for kernel in built.build.kernels] == ["fill"]
        with pytest.raises(SurfaceFailure, match="status"):
            build(source(text, flags=flags[1:]), tmp_path)
