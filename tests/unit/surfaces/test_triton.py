"""The triton surface: how a declaration becomes a specialisation; and, where Triton is installed, real cubins."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.lab.library.experts import read_expert
from pytest_klineage.records import GPU_PLATFORMS, Code, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import SurfaceFailure, jit
from pytest_klineage.surfaces.ahead import Misdeclared, specialise
from pytest_klineage.surfaces.base import Built
from pytest_klineage.surfaces.toolkit import find_disassembler
from pytest_klineage.surfaces.triton import TritonBackend, relocate

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
EXPERT = Path(__file__).parents[3] / "experts" / "gemm" / "sm90-triton" / "expert.toml"
SCALE = """
import triton
import triton.language as tl


@triton.jit
def scale(x, y, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr = 128):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < count) * FACTOR, mask=at < count)


def run(x, out):
    scale[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), 2.0)


SPEC = {
    "kernel": scale,
    "signature": {"x": "*fp32:16", "y": "*fp32:16", "count": "i32"},
    "constexprs": {"FACTOR": 2.0},
    "options": {"num_warps": 2},
}
COMPILE = {"*": [SPEC]}
"""

LAUNCH = """
import os, sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pytest_klineage.surfaces.triton import TritonBackend

TritonBackend().load(Path(sys.argv[1]), "run", "")
cache = Path(os.environ["TRITON_CACHE_DIR"])
print(len(list(cache.iterdir())))


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


triton.runtime.driver.set_active(Driver())
launch = JITFunction.run
JITFunction.run = lambda self, *a, grid, warmup, **named: launch(self, *a, grid=grid, warmup=True, **named)
import kernel

for m, n, k in ((256, 512, 128), (17, 40, 8), (256, 511, 127), (1, 1, 1)):
    kernel.run(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n))))
print(len(list(cache.iterdir())))
"""
"""The launcher with a driver that says sm90 and launches nothing; prints how many kernels Triton's cache has."""


def source(text: str = SCALE) -> KernelSource:
    return KernelSource(surface=Surface.TRITON, files=(SourceFile("scale.py", text),), entry="run")


def build(given: KernelSource, cache: Path, platform: str = "sm90") -> Built:
    return TritonBackend().build(given, cache, platform=platform, timeout_s=120)


class TestSpecialise:
    NAMES = ("x", "count", "BLOCK")

    def call(self, types: dict[str, str], values: dict[str, Any]) -> Any:
        return specialise(list(self.NAMES), {"BLOCK"}, types, values)

    def test_types_and_constants_come_in_the_order_of_the_arguments(self) -> None:
        signature, constants, attributes = self.call({"count": "i32", "x": "*bf16"}, {"BLOCK": 64})
        assert list(signature.items()) == [("x", "*bf16"), ("count", "i32"), ("BLOCK", "constexpr")]
        assert (constants, attributes) == ({(2,): 64}, {(0,): [], (1,): []})

    def test_only_what_triton_specialises_on_has_attributes(self) -> None:
        _signature, _constants, attributes = self.call({"x": "fp32", "count": "i1"}, {"BLOCK": 64})
        assert attributes == {}

    def test_a_hint_of_sixteen_is_divisibility(self) -> None:
        signature, _constants, attributes = self.call({"x": "*bf16:16", "count": "i32:16"}, {"BLOCK": 64})
        assert signature["x"] == "*bf16"
        assert attributes == {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}

    def test_a_hint_of_one_is_a_constant(self) -> None:
        signature, constants, _attributes = self.call({"x": "*bf16", "count": "i32:1"}, {"BLOCK": 64})
        assert signature["count"] == "constexpr"
        assert constants == {(1,): 1, (2,): 64}

    def test_an_argument_of_run_time_may_be_declared_constant(self) -> None:
        signature, constants, _attributes = self.call({"x": "*bf16"}, {"count": None, "BLOCK": 64})
        assert signature["count"] == "constexpr"
        assert constants == {(1,): None, (2,): 64}

    @pytest.mark.parametrize(
        ("types", "values", "message"),
        [
            ({"x": "*bf16"}, {"BLOCK": 64}, "argument count .*signature"),
            ({"x": "*bf16", "count": "i32"}, {}, "argument BLOCK .*constexprs"),
            ({"x": "*bf16", "count": "i32", "BLOCK": "i32"}, {}, "argument BLOCK .*constexprs"),
            ({"x": "*bf16:8", "count": "i32"}, {"BLOCK": 64}, "argument x .*signature"),
            ({"x": "*bf16", "count": "i32"}, {"count": 3, "BLOCK": 64}, "count.*twice"),
            ({"x": "*bf16", "count": "i32"}, {"BLOCK": 64, "TILE": 3}, "no argument TILE; it has x, count, BLOCK"),
        ],
    )
    def test_what_does_not_fit_the_kernel_is_reported(
        self, types: dict[str, str], values: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(Misdeclared, match=message):
            self.call(types, values)


def test_without_triton_the_user_learns_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingDependency, match=r"Triton is missing.*pytest-klineage\[triton\]"):
        build(source(), tmp_path)


def test_an_entry_lists_its_files_where_they_are(tmp_path: Path) -> None:
    entry = tmp_path / "ENTRY"
    entry.mkdir()
    for name in ("tile.json", "tile.cubin"):
        (entry / name).write_text(name)
    (entry / "__grp__tile.json").write_text('{"child_paths": {"tile.json": "/old/tile.json"}}')
    relocate(tmp_path)
    listed = json.loads((entry / "__grp__tile.json").read_text())["child_paths"]
    assert listed == {"tile.cubin": str(entry / "tile.cubin"), "tile.json": str(entry / "tile.json")}


@needs_triton
class TestRealBuilds:
    @pytest.mark.parametrize(
        "platform",
        [
            pytest.param(name, marks=(pytest.mark.nightly,) * (name not in ("sm80", "sm90", "sm120")))
            for name in GPU_PLATFORMS
        ],
    )
    def test_a_declared_kernel_is_compiled_without_a_gpu(self, platform: str, tmp_path: Path) -> None:
        built = build(source(), tmp_path, platform)
        (kernel,) = built.build.kernels
        assert kernel.name == "scale"
        assert 0 < kernel.registers < 64
        assert kernel.spill_bytes == 0
        assert (built.artifact / jit.HIDDEN / "00.cubin").read_bytes()[:4] == b"\x7fELF"
        assert "Triton" in built.build.toolchain
        assert build(source(), tmp_path, platform).build.kernels == built.build.kernels

    def test_a_compile_error_quotes_triton(self, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure) as caught:
            build(source(SCALE.replace("* FACTOR", "* undeclared_factor")), tmp_path)
        assert caught.value.code is Code.COMPILE
        assert "undeclared_factor is not defined" in caught.value.log
        assert str(tmp_path) not in caught.value.log

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('"num_warps": 2', '"num_wraps": 2', "Triton has no option num_wraps"),
            ('"kernel": scale', '"kernel": run', "no function under @triton.jit"),
            ('"count": "i32"', '"length": "i32"', "no argument length; it has x, y, count, FACTOR, BLOCK"),
        ],
    )
    def test_a_wrong_declaration_is_reported(self, old: str, new: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure) as caught:
            build(source(SCALE.replace(old, new)), tmp_path)
        assert message in caught.value.log

    def test_the_gemm_is_what_its_techniques_say(self, tmp_path: Path) -> None:
        expert = read_expert(EXPERT)
        built = build(expert.source("expert"), tmp_path)
        kernels = {kernel.name: kernel for kernel in built.build.kernels}
        assert set(kernels) == {"gemm_tma", "gemm_masked"}
        assert all(kernel.spill_bytes == 0 for kernel in kernels.values())
        if find_disassembler() is not None:
            assert {"wgmma", "tma_load", "tma_store"} <= set(kernels["gemm_tma"].instructions or ())
            assert "wgmma" in (kernels["gemm_masked"].instructions or ())

    def test_a_launch_takes_what_was_built_ahead(self, tmp_path: Path) -> None:
        given = read_expert(EXPERT).source("expert")
        artifact = build(given, tmp_path / "cache").artifact
        home = tmp_path / "home"
        home.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", LAUNCH, str(artifact)], env={"HOME": str(home), "PATH": os.defpath},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["2", "2"]

    def test_the_naive_gemm_compiles(self, tmp_path: Path) -> None:
        (kernel,) = build(read_expert(EXPERT).source("naive"), tmp_path).build.kernels
        assert kernel.name == "gemm_naive"
