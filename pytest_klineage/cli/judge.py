"""`pytest-klineage judge` and `judges`: judge what waits in a folder on this machine's devices; say how it stands."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pytest_klineage.errors import UsageError

if TYPE_CHECKING:
    from pytest_klineage.executors.batch import BatchFolder

OK, FAILED, INTERRUPTED = 0, 1, 130
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
ENDING_S = 20.0
"""How long judges may take to end after an interruption, until they are killed."""
STDIN = 0


def add_judge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands `judge` and `judges`."""
    judge = commands.add_parser(
        "judge", help="judge the open requests of a folder on this machine, one process a GPU",
        description="Judges what a run with the executor batch:DIR asked for. What is left when time is up stays open.",
    )  # fmt: skip
    judge.add_argument("folder", metavar="DIR", type=Path)
    judge.add_argument("--platform", metavar="NAME", default="auto", help="auto, cpu, sm90 or sm120 (default: auto)")
    judge.add_argument("--for", metavar="TIME", dest="limit", help="stop before this time is over, such as 8m or 90s")
    judge.add_argument("-n", metavar="N", dest="judges", type=int, help="GPUs to use (default: all that are visible)")
    judge.add_argument("--cache-dir", metavar="DIR", type=Path, help="where built kernels are kept")
    judge.add_argument("--retry", action="store_true", help="first forget faults, so that nothing stays given up")
    judge.add_argument("--name", default="", help=argparse.SUPPRESS)
    judge.set_defaults(command=run_judge)
    judges = commands.add_parser("judges", help="say how a folder of requests stands: open, claimed, done, faults")
    judges.add_argument("folder", metavar="DIR", type=Path)
    judges.set_defaults(command=run_judges)


def run_judge(arguments: argparse.Namespace) -> int:
    """`judge`."""
    from pytest_klineage.gate.host.cpu import resolve_platform

    folder = _folder(arguments.folder)
    platform = resolve_platform(arguments.platform)
    seconds = read_seconds(arguments.limit) if arguments.limit else None
    if arguments.name:
        return _judge_here(folder, platform, seconds, arguments)
    if arguments.retry and (retried := folder.retry()):
        _say(f"faults of {retried} requests forgotten")
    status = _start_judges(arguments, platform, seconds)
    _say(status_line(folder))
    return status


def run_judges(arguments: argparse.Namespace) -> int:
    """`judges`."""
    _say(status_line(_folder(arguments.folder)))
    return OK


def read_seconds(text: str) -> float:
    """A time such as 90, 90s, 8m or 1.5h in seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None or not float(found[1]):
        raise UsageError(f"a time is written such as 90s, 8m or 1.5h, got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def status_line(folder: BatchFolder) -> str:
    """How the folder stands, in a line."""
    counts = folder.counts()
    line = f"{counts.open} open, {counts.claimed} claimed, {counts.done} done, {counts.failed} given up"
    line += f", {counts.faults} fault{'' if counts.faults == 1 else 's'}"
    line += f", {counts.refused} refused" if counts.refused else ""
    waiting = ", ".join(f"{count} for {name}" for name, count in counts.platforms)
    return f"{folder.root}: {line}" + (f"; left: {waiting}" if waiting else "")


def _folder(path: Path) -> BatchFolder:
    from pytest_klineage.executors.batch import BatchFolder

    if not path.is_dir():
        raise UsageError(f"{path} is no folder; a run with --klineage-executor=batch:{path} makes it")
    return BatchFolder(path)


def _judge_here(folder: BatchFolder, platform: str, seconds: float | None, arguments: argparse.Namespace) -> int:
    """One judge, in this process, until nothing is left, time is up, or the process that started it has ended."""
    from pytest_klineage.executors.judging import judge_folder, parent_is_there

    _catch_signals()
    try:
        judge_folder(
            folder, platform, seconds=seconds, cache_dir=arguments.cache_dir, name=arguments.name, tell=_say,
            goes_on=parent_is_there(STDIN),
        )  # fmt: skip
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


def _start_judges(arguments: argparse.Namespace, platform: str, seconds: float | None) -> int:
    """A judge for each device, each a process; ends when all have."""
    _catch_signals()
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest_klineage", "judge", str(arguments.folder), "--platform", platform]
    command += ["--cache-dir", str(arguments.cache_dir)] if arguments.cache_dir else []
    running = []
    try:
        for name, environment in _devices(platform, arguments.judges):
            left = [] if seconds is None else ["--for", f"{max(seconds - (time.monotonic() - started), 1):.1f}"]
            running.append(subprocess.Popen([*command, "--name", name, *left], env=environment, stdin=subprocess.PIPE))
        ended = [process.wait() for process in running]
    except KeyboardInterrupt:
        _end(running)
        return INTERRUPTED
    return FAILED if any(ended) else OK


def _devices(platform: str, asked: int | None) -> list[tuple[str, dict[str, str]]]:
    """Name and environment of each judge. Raises UsageError for more than there are."""
    from pytest_klineage.gate.host.gpus import gpus_for

    environment = dict(os.environ)
    if platform == "cpu":
        if asked not in (None, 1):
            raise UsageError("a CPU has one judge: kernels on it are timed one at a time")
        return [("cpu", environment)]
    found = gpus_for(platform)
    count = len(found) if asked is None else asked
    if not 1 <= count <= len(found):
        raise UsageError(f"-n lies between 1 and {len(found)}, the GPUs of {platform} here, got {count}")
    return [(f"gpu {gpu.index}", environment | {"CUDA_VISIBLE_DEVICES": gpu.uuid}) for gpu in found[:count]]


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the judges to end, as Ctrl-C has done already on a terminal; kill what does not."""
    for process in running:
        process.terminate()
    deadline = time.monotonic() + ENDING_S
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _catch_signals() -> None:
    """The end of a lease often comes as SIGTERM: it is taken like Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Once: a second signal must not break off the ending of processes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
