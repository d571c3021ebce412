"""What the plugin's tests share: kernels to judge, a cache of their own, and a gate that only pretends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_klineage import gate

GEMM = """
#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const float *ap = (const float *)a.data, *bp = (const float *)b.data;
    for (int64_t i = 0; i < c.shape[0]; ++i)
        for (int64_t j = 0; j < c.shape[1]; ++j) {
            double sum = OFFSET;
            for (int64_t k = 0; k < a.shape[1]; ++k)
                sum += (double)ap[i * a.stride[0] + k * a.stride[1]] * bp[k * b.stride[0] + j * b.stride[1]];
            ((float *)c.data)[i * c.stride[0] + j * c.stride[1]] = (float)sum;
        }
    return 0;
}
"""
"""A matrix product that is right when OFFSET is 0.0."""

HEADER = '#include "klineage.h"\nextern "C" int'
KERNELS = {
    "good.cpp": GEMM.replace("OFFSET", "0.0"),
    "wrong.cpp": GEMM.replace("OFFSET", "1.0"),
    "broken.cpp": f"{HEADER} run(const klineage_call *call) {{ return undeclared_name; }}\n",
    "noentry.cpp": f"{HEADER} walk(const klineage_call *call) {{ return 0; }}\n",
    "crash.cpp": f"{HEADER} run(const klineage_call *call) {{ return *(volatile int *)8; }}\n",
}

QUICK = (
    "--klineage-time-limit=0.3",
    "--klineage-precision=0.5",
    "--klineage-seeds=1",
    "--klineage-busy-limit=1",
    "--klineage-spread-limit=1e6",
    "--klineage-flush=1M",
)
"""Tests of the plugin need verdicts, not precise ones."""

FAKE_GATE = '''
"""A gate that pretends: a kernel's first line is "// <reason code> <speedup>"."""

import pytest

import pytest_klineage.gate as gate
from pytest_klineage.records import Code, Interval, Machine, Reason, Timing, Verdict


class FakeGate:
    open_gates = 0

    def __init__(self, platform, settings=None, progress=None):
        self.platform = platform
        FakeGate.open_gates += 1

    def judge(self, case, source, *, reference_source=None, platforms=(), precision=None):
        _, code, *speedup = source.files[0].text.partition("\\n")[0].split()
        timing = None
        if speedup:
            samples = (0.25, 0.5, 0.75)
            timing = Timing(
                policy="paired", reference_ms=0.5 * float(speedup[0]), candidate_ms=0.5,
                speedup=Interval(float(speedup[0]), float(speedup[0]) * 0.9, float(speedup[0]) * 1.1),
                reference_samples_ms=tuple(sample * float(speedup[0]) for sample in samples),
                candidate_samples_ms=samples, warmup=1, flush_bytes=0, statistic="pretended",
            )
        return Verdict(
            case=case, status=Code(code).status, label=source.label, timing=timing,
            reasons=(Reason(code=Code(code), message="pretended", evidence={"size": 3}),),
            machine=Machine(platform=self.platform, device="Pretended CPU", cores=2),
        )

    def close(self):
        FakeGate.open_gates -= 1


PATCH = pytest.MonkeyPatch()


def pytest_configure(config):
    PATCH.setattr(gate, "Gate", FakeGate)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    PATCH.undo()
    assert FakeGate.open_gates == 0
'''


@pytest.fixture(autouse=True)
def own_environment(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A cache that only these tests share, and none of the outer run's variables or slow plugins.

    A run in this process that pretends to have a gate must have put the real one back.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    # After pytester, which removes the variable.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    real = gate.Gate
    yield
    left, gate.Gate = gate.Gate, real
    assert left is real


@pytest.fixture
def kernels(pytester: pytest.Pytester) -> Path:
    """The folder of the inner tests, with KERNELS in it."""
    for name, text in KERNELS.items():
        (pytester.path / name).write_text(text)
    return pytester.path


@pytest.fixture
def fake_gate(pytester: pytest.Pytester) -> Path:
    """The folder of the inner tests, where a gate pretends: "<code>[-<speedup>].cpp" files say what it shall find."""
    pytester.makeconftest(FAKE_GATE)
    for name, line in {
        "fast": "accepted.faster 2.0",
        "faster": "accepted.faster 8.0",
        "slow": "slower.than_required 0.5",
        "unclear": "inconclusive.interval 1.0",
        "wrong": "wrong_value.mismatch",
        "cheat": "cheat.replay 99.0",
        "skipped": "skipped.missing_dependency",
    }.items():
        (pytester.path / f"{name}.cpp").write_text(f"// {line}\n")
    return pytester.path


@pytest.fixture
def quick() -> tuple[str, ...]:
    """Options that make a real judgement short."""
    return QUICK


@pytest.fixture(
    params=[pytest.param((), id="one-process"), pytest.param(("-n2",), id="xdist", marks=pytest.mark.nightly)]
)
def processes(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The same test in one process and with two xdist workers."""
    chosen: tuple[str, ...] = request.param
    return chosen
