"""The tilelang surface: without TileLang, what to install; and, where TileLang and nvcc are installed, real cubins."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.lab.library.experts import read_expert
from pytest_klineage.records import Code, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import SurfaceFailure, jit
from pytest_klineage.surfaces.base import Built
from pytest_klineage.surfaces.cpp import find_compiler
from pytest_klineage.surfaces.tilelang import TilelangBackend
from pytest_klineage.surfaces.toolkit import find_nvcc

EXPERT = Path(__file__).parents[3] / "experts" / "gemm" / "sm90-tilelang" / "expert.toml"
SCALE = """
import tilelang
import tilelang.language as T


def scale(count, factor=2.0, block=128):
    @T.prim_func
    def scale_tile(x: T.Tensor((count,), "float32"), y: T.Tensor((count,), "float32")):
        with T.Kernel(T.ceildiv(count, block), threads=block) as column:
            for i in T.Parallel(block):
                y[column * block + i] = x[column * block + i] * factor

    return scale_tile


def run(x, out):
    tilelang.compile(scale(x.numel()))(x, out)


SPEC = {"kernel": scale, "arguments": {"count": 1024}}
COMPILE = {"sm90": [SPEC], "sm120": [SPEC]}
"""

LAUNCH = """
import os, sys
from pathlib import Path

from pytest_klineage.surfaces.tilelang import TilelangBackend

TilelangBackend().load(Path(sys.argv[1]), "run", "")
import kernel
from tilelang import tvm
from tilelang.contrib import nvcc


def refuse(*arguments, **named):
    raise RuntimeError("compiled again")


nvcc.compile_cuda = refuse
with tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}):
    kernel.scale(count=1024)
print(len([path for path in Path(os.environ["TILELANG_CACHE_DIR"]).iterdir() if path.name != "tmp"]))
"""
"""Asks TileLang for the declared kernel with a target that says sm90; prints how many its cache has."""


def installed() -> bool:
    """Whether TileLang and nvcc are here."""
    try:
        return importlib.util.find_spec("tilelang") is not None and shutil.which(find_nvcc()) is not None
    except MissingDependency:
        return False


needs_tilelang = pytest.mark.skipif(not installed(), reason="TileLang or nvcc is not installed")


def source(text: str = SCALE) -> KernelSource:
    return KernelSource(surface=Surface.TILELANG, files=(SourceFile("scale.py", text),), entry="run")


def build(given: KernelSource, cache: Path, platform: str = "sm90") -> Built:
    return TilelangBackend().build(given, cache, platform=platform, timeout_s=300)


def test_without_tilelang_the_user_learns_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingDependency, match=r"TileLang is missing.*pytest-klineage\[tilelang\]"):
        build(source(), tmp_path)


@needs_tilelang
class TestRealBuilds:
    def test_a_declared_kernel_is_compiled_without_a_gpu(self, tmp_path: Path) -> None:
        built = build(source(), tmp_path, "sm120")
        (kernel,) = built.build.kernels
        assert "scale_tile" in kernel.name
        assert 0 < kernel.registers < 64
        assert kernel.spill_bytes == 0
        assert (built.artifact / jit.HIDDEN / "00.cubin").read_bytes()[:4] == b"\x7fELF"
        assert built.build.toolchain.startswith("TileLang ")

    def test_a_compiler_that_is_installed_elsewhere_may_be_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As /opt/gcc/bin/g++, which no system folder holds; what it calls lies beside it."""
        compiler, helper = (tmp_path / "gcc" / folder / "g++" for folder in ("bin", "libexec"))
        for script, called in ((compiler, helper), (helper, Path(find_compiler()))):
            script.parent.mkdir(parents=True)
            script.write_text(f'#!/bin/sh\nexec {called} "$@"\n')
            script.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert len(build(source(), tmp_path / "cache", "sm120").build.kernels) == 1

    def test_tilelang_refusals_are_quoted(self, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure) as caught:
            build(source(SCALE.replace("* factor", "* undeclared_factor")), tmp_path)
        assert caught.value.code is Code.COMPILE
        assert "undeclared_factor" in caught.value.log

    def test_a_declaration_without_a_program_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure) as caught:
            build(source(SCALE.replace("    return scale_tile\n", "")), tmp_path)
        assert "returned no TileLang program" in caught.value.log

    def test_options_of_the_decorator_are_not_given_twice(self, tmp_path: Path) -> None:
        text = SCALE.replace("def scale(", "@tilelang.jit\ndef scale(").replace(
            '"arguments"', '"options": {"out_idx": 1}, "arguments"'
        )
        with pytest.raises(SurfaceFailure) as caught:
            build(source(text), tmp_path)
        assert "options belong to @tilelang.jit" in caught.value.log

    def test_a_launch_takes_what_was_built_ahead(self, tmp_path: Path) -> None:
        text = SCALE.replace("def scale(", "@tilelang.jit(out_idx=[1])\ndef scale(")
        artifact = build(
            source(text.replace("tilelang.compile(scale(x.numel()))", "scale(x.numel())")), tmp_path
        ).artifact
        home = tmp_path / "home"
        home.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", LAUNCH, str(artifact)], env={"HOME": str(home), "PATH": os.defpath},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["1"]

    def test_the_gemm_is_what_its_techniques_say(self, tmp_path: Path) -> None:
        built = build(read_expert(EXPERT).source("expert"), tmp_path)
        (kernel,) = built.build.kernels
        assert kernel.spill_bytes == 0
        assert "gemm_ring: 212992 bytes of shared memory" in built.build.log
        if kernel.instructions is not None:
            assert {"wgmma", "tma_load", "mbarrier"} <= set(kernel.instructions)
