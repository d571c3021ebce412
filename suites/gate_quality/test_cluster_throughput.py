"""What a cluster's machinery itself can carry: 10,000 requests whose judges answer at once, on one machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.executors.base import plain_settings
from pytest_klineage.executors.canary import EVERY
from pytest_klineage.executors.cluster import CPU_RESOURCE, ClusterLimits
from pytest_klineage.executors.ray import RayExecutor, find_desk
from pytest_klineage.executors.ray_judge import Introduction, Judge, Order
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.records import (
    Code,
    Interval,
    KernelSource,
    Machine,
    Reason,
    SourceFile,
    Surface,
    Timing,
    Verdict,
    from_json,
    to_json,
)
from pytest_klineage.records.judging import JudgeReply, JudgeRequest

REQUESTS, JUDGES = 10_000, 4
LEAST_PER_S, MOST_MB = 500.0, 300.0
SAMPLES = 200
"""Of each side: a reply is then about as long as one of the suite `stages`."""
STORE_BYTES = 80 << 20


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Raw figures of one run."""

    replies: int
    reply_bytes: int
    connected_mb: float
    """Largest resident set of the driver when it had joined the cluster."""
    peak_mb: float
    submit_s: float
    """From the first request to the last one sent."""
    seconds: float
    """From the first request to the last reply on disk."""
    replies_at_s: tuple[float, ...]
    """When each thousandth reply was on disk."""


class Idle(Judge):
    """Answers at once, with a made-up verdict; all else, seals and files included, is a real judge's."""

    def start(self) -> bytes:
        machine = Machine(platform="cpu", device="idle")
        return to_json(Introduction(machine=machine, host="", device=self.node, answers=str(self._answers.path)))

    def _reply(self, asked: Order, artifact: bytes) -> JudgeReply:
        request = from_json(bytes(asked.request), JudgeRequest)
        times = tuple(1.0 + index / 997 for index in range(SAMPLES))
        timing = Timing(
            policy="paired", reference_ms=2.0, candidate_ms=1.0, speedup=Interval(2.0, 2.0, 2.0),
            reference_samples_ms=times, candidate_samples_ms=times, warmup=0, flush_bytes=0, statistic="made up",
        )  # fmt: skip
        code = Code.ACCEPTED_FASTER
        reasons = (Reason(code=code, message="made up"),)
        verdict = Verdict(
            case=request.case, status=code.status, reasons=reasons, timing=timing, source_digest=request.source.digest
        )
        return JudgeReply(request=asked.digest, verdict=verdict)


def requests() -> list[JudgeRequest]:
    case = make_case("gemm", (8, 8, 8), "fp32", "torch", at_least=1e-6)
    source = KernelSource(surface=Surface.PYTHON, files=(SourceFile("kernel.py", "pass\n" * 400),), entry="run")
    settings = plain_settings(GateSettings())
    return [
        JudgeRequest(case=case, source=source, platform="cpu", settings=settings, repeat=number)
        for number in range(REQUESTS)
    ]


def peak_mb() -> float:
    """Largest resident set of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def drive(folder: Path) -> None:
    """The driver's process."""
    import ray

    ray.init(address="auto", namespace="klineage", log_to_driver=False, logging_level="ERROR")
    find_desk(ClusterLimits(), Idle)
    executor = RayExecutor("ray", "cpu", folder / "run.jsonl")
    executor._call("warm", "cpu")
    while sum(judge.state == "ready" for judge in executor.state().judges) < JUDGES:
        time.sleep(0.2)
    asked, connected, marks = requests(), peak_mb(), []
    started = time.monotonic()
    for request in asked:
        executor.submit(request)
    submitted = time.monotonic() - started
    while executor.num_open:
        executor.collect(1.0)
        done = REQUESTS - executor.num_open
        marks += [time.monotonic() - started] * (done // 1000 - len(marks))
    seconds = time.monotonic() - started
    assert executor.refused == 0
    assert len(executor.answers) == REQUESTS
    found = Throughput(
        replies=REQUESTS, reply_bytes=executor.answers.path.stat().st_size // REQUESTS, connected_mb=connected,
        peak_mb=peak_mb(), submit_s=submitted, seconds=seconds, replies_at_s=tuple(marks),
    )  # fmt: skip
    (folder / "measured.json").write_bytes(to_json(found))
    executor.close()


def test_cluster_throughput(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    publish: Callable[[str, str, list[Throughput]], None],
    measured_here: str,
) -> None:
    """More than 500 replies a second, with the driver below 300 MB."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra ray")
    folder = tmp_path_factory.mktemp("cluster")
    for name, variable in (("secret", "KLINEAGE_JUDGE_SECRET_FILE"), ("token", "RAY_AUTH_TOKEN_PATH")):
        (folder / name).write_text(os.urandom(32).hex())
        (folder / name).chmod(0o600)
        monkeypatch.setenv(variable, str(folder / name))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    from ray.cluster_utils import Cluster  # Ray reads its mode of authentication when it is imported

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(JUDGES):
            cluster.add_node(wait=False, num_cpus=1, resources={CPU_RESOURCE: 1}, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes(120)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        subprocess.run([sys.executable, __file__, str(folder)], check=True, timeout=300)
    finally:
        cluster.shutdown()
    found = msgspec.json.decode((folder / "measured.json").read_bytes(), type=Throughput)
    rate = found.replies / found.seconds
    lines = [
        "# What the machinery of a cluster carries\n",
        f"{measured_here}. Head, {JUDGES} nodes and the driver are processes of one machine. Judges answer at once, "
        f"with a made-up verdict; queue, seals, files and canaries (one in {EVERY} verdicts) are as always. "
        f"At least {LEAST_PER_S:.0f} replies a second and at most {MOST_MB:.0f} MB in the driver are wanted.\n",
        "| replies | bytes of a reply | replies/s | seconds to submit | seconds | driver when joined | driver, peak |",
        "|---|---|---|---|---|---|---|",
        f"| {found.replies} | {found.reply_bytes} | {rate:.0f} | {found.submit_s:.1f} | {found.seconds:.1f} "
        f"| {found.connected_mb:.0f} MB | {found.peak_mb:.0f} MB |",
    ]
    publish("cluster_throughput", "\n".join(lines) + "\n\nRaw figures: `cluster_throughput.jsonl`.", [found])
    assert rate >= LEAST_PER_S
    assert found.peak_mb <= MOST_MB


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
