"""A call of `pytest-klineage judge` that is killed at a random second: nothing is judged twice, nothing is lost.

pytest suites/gate_quality/test_cut.py --platform sm90        some 90 s on an H200, of which 20 to 45 lie before the cut

The kernels are one library kernel (on a CPU an expert) under different names, so nothing is compiled on a GPU.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from on_gpu import sources, with_library

from pytest_klineage import KlineageSession
from pytest_klineage.executors.base import plain_settings
from pytest_klineage.executors.batch import BatchFolder
from pytest_klineage.operators import make_case, paper_case
from pytest_klineage.records import KernelSource, Surface
from pytest_klineage.records.judging import JudgeRequest

REQUESTS = 30
ON_CPU_S, ON_GPU_S = (5.0, 12.0), (20.0, 45.0)
"""Between which seconds the cut lies."""
SCREEN_AGAINST = 100.0
"""Nothing is that fast: a screening ends as soon as it may."""
END_S = 30.0
"""How long what a killed judge leaves may take to be gone."""
LIMIT_S = 600.0


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What a cut call and the call after it did."""

    requests: int
    cut_after_s: float
    """Seconds from the start of the first call to its end by SIGKILL."""
    before: tuple[str, ...]
    """Digests with a reply when the first call had ended."""
    under_way: int
    """Requests whose judge was killed: noted as faults, and judged again."""
    changed: int
    """Of the replies from before the cut, those that are not byte for byte the same at the end."""
    judged_then: int
    """Judgements that the second call reports."""
    done: int
    """Requests with a reply at the end."""
    attempts: tuple[int, ...]
    """Of every reply at the end."""
    seconds: float
    """Of both calls."""
    machine: str
    ended_at: str


def requests(platform: str, settings: dict[str, object]) -> list[JudgeRequest]:
    """Screenings of one right kernel, each under a name and with a text of its own."""
    on_cpu = platform == "cpu"
    chosen = make_case("gemm", (64, 64, 64), "fp32", "torch") if on_cpu else paper_case("gemm", "gpu")
    kernel, case = next(sources("gemm", platform)), with_library(chosen)
    return [
        JudgeRequest(
            case=case, source=renamed(kernel, number), platform=platform, settings=settings,
            screen_against=SCREEN_AGAINST,
        )
        for number in range(REQUESTS)
    ]  # fmt: skip


def renamed(source: KernelSource, number: int) -> KernelSource:
    """The kernel with another digest."""
    first, *others = source.files
    mark = "//" if source.surface is Surface.CPP else "#"
    text = f"{first.text}\n{mark} {number}\n"
    return msgspec.structs.replace(
        source, files=(msgspec.structs.replace(first, text=text), *others), label=f"kernel-{number:02d}"
    )


def call(folder: BatchFolder, platform: str) -> subprocess.Popen[str]:
    """A judge in a session of its own, as a batch system starts it."""
    command = [sys.executable, "-m", "pytest_klineage", "judge", str(folder.root), "--platform", platform]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def replies(folder: BatchFolder) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (folder.root / "reply").glob("*.json")}


def cut_and_go_on(folder: BatchFolder, platform: str, asked: list[JudgeRequest], cut_s: float) -> Cut:
    """Judge, kill after so many seconds, judge again; the counts of it."""
    began = time.monotonic()
    first = call(folder, platform)
    try:
        first.wait(cut_s)
    except subprocess.TimeoutExpired:
        os.killpg(first.pid, signal.SIGKILL)
    cut_after_s = time.monotonic() - began
    first.communicate(timeout=LIMIT_S)
    deadline = time.monotonic() + END_S
    while folder.counts().claimed and time.monotonic() < deadline:
        time.sleep(0.05)
    before = replies(folder)
    output, _ = call(folder, platform).communicate(timeout=LIMIT_S)
    after, counts = replies(folder), folder.counts()
    found = [reply for request in asked if (reply := folder.lookup(request)) is not None]
    machine = folder.machine(platform)
    return Cut(
        requests=len(asked), cut_after_s=cut_after_s, before=tuple(sorted(before)), under_way=counts.faults,
        changed=sum(after.get(name) != data for name, data in before.items()),
        judged_then=sum(f": {asked[0].case.id} kernel-" in line for line in output.splitlines()),
        done=counts.done, attempts=tuple(reply.attempt for reply in found), seconds=time.monotonic() - began,
        machine=machine.device, ended_at=max(reply.verdict.judged_at for reply in found if reply.verdict is not None),
    )  # fmt: skip


def report_of(cut: Cut, platform: str) -> str:
    """The page with its table."""
    least, most = ON_CPU_S if platform == "cpu" else ON_GPU_S
    return "\n".join([
        f"# A call that is cut, on {platform}\n",
        f"{cut.machine}, {cut.ended_at}. `pytest-klineage judge` was killed with all its processes at a random second "
        f"between {least:g} and {most:g}, and started again; {cut.requests} screenings of one kernel under as many "
        f"names, {cut.seconds:.0f} s in all.\n",
        "| cut after | replies by then | under way | judged by the second call | replies then | changed | lost |",
        "|---|---|---|---|---|---|---|",
        f"| {cut.cut_after_s:.1f} s | {len(cut.before)} | {cut.under_way} | {cut.judged_then} | {cut.done} "
        f"| {cut.changed} | {cut.requests - cut.done} |",
        "",
        f"Raw figures: `cut-{platform}.jsonl`.",
    ])  # fmt: skip


def test_cut(klineage_session: KlineageSession, publish: Callable[[str, str, list[Cut]], None], tmp_path: Path) -> None:
    """The second call judges exactly what the first has not answered, and what it had answered stays."""
    platform, folder = klineage_session.platform, BatchFolder(tmp_path / "round")
    asked = requests(platform, plain_settings(klineage_session.gate_settings))
    for request in asked:
        folder.submit(request)
    cut_s = random.SystemRandom().uniform(*(ON_CPU_S if platform == "cpu" else ON_GPU_S))
    cut = cut_and_go_on(folder, platform, asked, cut_s)
    publish(f"cut-{platform}", report_of(cut, platform), [cut])
    assert 0 < len(cut.before) < cut.requests, "the call had ended before it was cut, or had judged nothing"
    assert cut.changed == 0
    assert cut.done == cut.requests
    assert cut.judged_then == cut.requests - len(cut.before)
    assert cut.under_way == sum(attempt - 1 for attempt in cut.attempts) <= 1
