"""One quick gate on the GPU for all tests here; everything is skipped, with the reason, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from device import MARKER, gpu_platform, quick_settings

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.records import KernelCase, KernelSource, SourceFile, Surface, Verdict, from_json, to_json

HELPERS = Path(__file__).parents[1] / "exploits" / "gpu" / "shared"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.fixture(scope="session")
def platform(request: pytest.FixtureRequest) -> str:
    """The GPU platform; skips without one."""
    return gpu_platform(request.config)


@pytest.fixture(scope="session")
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GateSettings:
    """Quick and coarse settings, with the caller's folders of built kernels."""
    return quick_settings(request.config, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def gate(platform: str, settings: GateSettings) -> Iterator[Gate]:
    """The gate that all tests share."""
    with Gate(platform, settings) as opened:
        yield opened


@pytest.fixture
def judge(gate: Gate, settings: GateSettings) -> Callable[..., Verdict]:
    """Judge a source on a case, with some settings changed. Every verdict must survive JSON."""

    def judge_one(
        case: KernelCase, source: KernelSource, *, against: KernelSource | None = None, **changed: Any
    ) -> Verdict:
        gate._context.settings = msgspec.structs.replace(settings, **changed)
        verdict = gate.judge(case, source, reference_source=against)
        assert from_json(to_json(verdict), Verdict) == verdict
        assert verdict.status is verdict.code.status
        return verdict

    return judge_one


@pytest.fixture
def cuda() -> Callable[[str], KernelSource]:
    """A CUDA kernel from the body of its entry, with the honest helpers of the exploit corpus."""

    def build(body: str) -> KernelSource:
        text = f'#include "device.cuh"\nextern "C" int run(const klineage_call *call) {{\n{body}\n}}\n'
        helper = SourceFile(name="device.cuh", text=(HELPERS / "device.cuh").read_text())
        files = (SourceFile(name="kernel.cu", text=text), helper)
        return KernelSource(surface=Surface.CUDA, files=files, entry="run", label="unit")

    return build


@pytest.fixture
def python() -> Callable[[str], KernelSource]:
    """A kernel of the python surface from its text, with the honest helpers of the exploit corpus."""

    def build(text: str) -> KernelSource:
        helper = SourceFile(name="honest_gpu.py", text=(HELPERS / "honest_gpu.py").read_text())
        files = (SourceFile(name="kernel.py", text=text), helper)
        return KernelSource(surface=Surface.PYTHON, files=files, entry="run", label="unit")

    return build
