"""compute-sanitizer on a GPU: the experts are clean under every tool, and each of four defects is found by its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_klineage.errors import MissingDependency
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.gate.settings import SANITIZERS
from pytest_klineage.gate.stages.build import build_kernel
from pytest_klineage.gate.stages.sanitize import CLEAN, Sanitized, find_sanitizer, sanitize
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.operators import make_case, paper_case
from pytest_klineage.records import Code, KernelCase, KernelSource, SourceFile, Surface, Verdict
from pytest_klineage.records.messages import Job

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
HELPER = HERE.parent / "exploits" / "gpu" / "shared" / "device.cuh"
EXPERTS = {item.operator: item for item in find_experts(HERE.parents[1] / "experts", "sm90") if item.surface == "cuda"}
GDN_PHASES = ("gdn_cumsum", "gdn_kkt_solve", "gdn_fused_fwd")
WATCHED = [
    *(paper_case(name, "gpu", "torch") for name in ("gemm", "conv2d", "fmha", "topk", "gdn", *GDN_PHASES)),
    make_case("conv2d", (8, 64, 56, 56, 128, 3, 1, 1), "fp16", "torch", layout="nhwc"),
    # Smaller than the small shape, so watched as they are: tiles across images, rectangles, and a wide image.
    make_case("conv2d", (4, 64, 7, 8, 128, 3, 1, 1), "fp16", "torch"),
    make_case("conv2d", (1, 64, 5, 9, 128, 3, 1, 1), "fp16", "torch"),
    make_case("conv2d", (2, 64, 10, 10, 128, 3, 1, 1), "fp16", "torch", layout="nhwc"),
    make_case("conv2d", (1, 64, 1, 250, 128, 3, 1, 1), "fp16", "torch", layout="nhwc"),
]
CASE = make_case("gemm", (768, 768, 768), "bf16", "torch", at_least=1e-4)
Sanitize = Callable[..., Sanitized]


@pytest.fixture(scope="session", autouse=True)
def need_sanitizer() -> None:
    """Skips where there is no compute-sanitizer."""
    try:
        find_sanitizer()
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture
def monitor(gate: Gate, platform: str, settings: GateSettings) -> Sanitize:
    """Run tools over a kernel, without the checks and the timing of a judgement."""

    def run(source: KernelSource, case: KernelCase, *tools: str) -> Sanitized:
        built = build_kernel(source, platform, settings)
        job = Job(
            surface=source.surface.value, artifact=str(built.artifact), entry=source.entry, case=case, platform=platform
        )
        return sanitize(job, tools, environment=gate._context.host.environment, report=lambda tool, number: None)

    return run


def defective(name: str) -> KernelSource:
    """A kernel of the folder sanitizer."""
    files = tuple(SourceFile(name=path.name, text=path.read_text()) for path in (HERE / "sanitizer" / name, HELPER))
    return KernelSource(surface=Surface.CUDA, files=files, entry="run", label=name)


@pytest.mark.parametrize("case", WATCHED, ids=lambda case: case.id)
def test_an_expert_is_clean(case: KernelCase, monitor: Sanitize) -> None:
    if case.operator not in EXPERTS or "expert" not in EXPERTS[case.operator].variants:
        pytest.skip(f"experts/{case.operator}/sm90-cuda has no expert")
    found = monitor(EXPERTS[case.operator].source("expert"), case, *SANITIZERS)
    assert found.by_tool == dict.fromkeys(SANITIZERS, CLEAN)
    assert found.notes == ()


@pytest.mark.parametrize(
    ("name", "tool", "words"),
    [
        ("out_of_bounds_read.cu", "memcheck", "Invalid __global__ read of size 2 bytes"),
        ("shared_race.cu", "racecheck", "Race reported"),
        ("uninitialised_read.cu", "initcheck", "Uninitialized __global__ memory read of size 2 bytes"),
        ("divergent_barrier.cu", "synccheck", "Divergent thread(s) in block"),
    ],
)
def test_a_defect_is_found(name: str, tool: str, words: str, monitor: Sanitize) -> None:
    found = monitor(defective(name), CASE, tool)
    (reason,) = found.reasons
    assert reason.code is Code.SANITIZER
    assert words in found.by_tool[tool]
    assert f"{name}:" in reason.message, "the line is missing"
    assert reason.evidence["case"] == "gemm-512x512x512-bf16"


def test_a_kernel_refusing_the_small_shape_uses_its_own(monitor: Sanitize) -> None:
    found = monitor(defective("own_shape_only.cu"), CASE, "memcheck")
    assert found.by_tool == {"memcheck": CLEAN}
    (note,) = found.notes
    assert "768 rows only" in note


def test_a_finding_ends_a_judgement(judge: Callable[..., Verdict]) -> None:
    verdict = judge(CASE, defective("out_of_bounds_read.cu"), sanitize=("memcheck",))
    assert verdict.code is Code.SANITIZER, [(reason.code.value, reason.message) for reason in verdict.reasons]
    assert verdict.timing is None
    assert judge(CASE, defective("out_of_bounds_read.cu")).scored, "the gate alone finds nothing here"
