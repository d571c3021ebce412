"""`pytest-klineage judge`, `judges` and `results`: judge what waits in a folder here; say how it stands; collect."""

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

from pytest_klineage.cli.console import FAILED, INTERRUPTED, OK, Commands, say
from pytest_klineage.errors import UsageError
from pytest_klineage.report.text import counted

if TYPE_CHECKING:
    from pytest_klineage.executors.batch import BatchFolder

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
ENDING_S = 20.0
"""How long judges may take to end after an interruption, until they are killed."""
STDIN = 0
MOST_NAMED, LINE_LENGTH = 10, 400
"""Requests without a verdict that are named at the end, and characters of the line on each."""


def add_judge(commands: Commands) -> None:
    """Add the commands `judge` and `judges`."""
    judge = commands.add_parser(
        "judge", help="judge the open requests of a folder on this machine, one process a GPU",
        description="Judges what a run with the executor batch:DIR asked for. What is left when time is up stays open.",
    )  # fmt: skip
    judge.add_argument("folder", metavar="DIR", type=Path)
    judge.add_argument("--platform", metavar="NAME", default="auto", help="auto, cpu, or such as sm90 (default: auto)")
    judge.add_argument("--for", metavar="TIME", dest="limit", help="stop before this time is over, such as 8m or 90s")
    judge.add_argument(
        "-n", metavar="N", dest="judges", type=int,
        help="GPUs to use (default: all that are visible); with --build-only, processes (default: one a CPU)",
    )  # fmt: skip
    judge.add_argument(
        "--share", metavar="N", type=int, default=1,
        help="judges for each GPU, which time in turns and do the rest beside each other (default: 1)",
    )  # fmt: skip
    judge.add_argument("--cache-dir", metavar="DIR", type=Path, help="where kernels, and definitions, are kept")
    judge.add_argument(
        "--build-only", action="store_true", help="build the kernels of all open requests into DIR/artifacts, no more"
    )
    judge.add_argument("--retry", action="store_true", help="first forget faults, so that nothing stays given up")
    judge.add_argument("--name", default="", help=argparse.SUPPRESS)
    judge.set_defaults(command=run_judge)
    judges = commands.add_parser("judges", help="say how a folder of requests, or a Ray cluster, stands")
    judges.add_argument("where", metavar="DIR|ray[://HOST:PORT]")
    judges.add_argument(
        "--pools", metavar="FILE", type=Path, help="of a cluster: take canaries by pool from a TOML file"
    )
    judges.add_argument("--retry", action="store_true", help="of a cluster: let judges in quarantine begin again")
    judges.add_argument("--end", action="store_true", help="of a cluster: end its judges and forget its queue")
    judges.set_defaults(command=run_judges)


def add_results(commands: Commands) -> None:
    """Add the command `results`."""
    results = commands.add_parser("results", help="collect what the judges of a cluster have written on their disks")
    actions = results.add_subparsers(metavar="ACTION", required=True)
    merge = actions.add_parser("merge", help="one file from several: of each request the first verdict stays")
    merge.add_argument("files", metavar="FILE", type=Path, nargs="+", help="a .jsonl of a judge, or of results/judged")
    merge.add_argument("--output", metavar="FILE", type=Path, required=True, help="the file to write, or to add to")
    merge.set_defaults(command=run_merge)


def run_merge(arguments: argparse.Namespace) -> int:
    """`results merge`."""
    from pytest_klineage.executors.answers import merge
    from pytest_klineage.executors.sealing import read_secret

    verdicts, doubts, refused = merge(arguments.files, arguments.output, read_secret())
    line = f"{arguments.output}: {verdicts} verdicts"
    line += f", {doubts} of them in doubt" if doubts else ""
    say(line + (f"; {refused} lines refused, which no judge of this secret wrote" if refused else ""))
    return OK


def run_judge(arguments: argparse.Namespace) -> int:
    """`judge`."""
    from pytest_klineage.gate.host.platforms import resolve_platform

    folder = _folder(arguments.folder)
    if arguments.build_only:
        return _build_here(folder, arguments)
    platform = resolve_platform(arguments.platform)
    seconds = read_seconds(arguments.limit) if arguments.limit else None
    if arguments.name:
        return _judge_here(folder, platform, seconds, arguments)
    if arguments.retry and (retried := folder.retry()):
        say(f"faults of {retried} requests forgotten")
    status = _start_judges(arguments, platform, seconds)
    say(status_line(folder))
    return FAILED if say_unjudged(folder, platform) and status == OK else status


def run_judges(arguments: argparse.Namespace) -> int:
    """`judges`."""
    from pytest_klineage.plugin.options import is_ray

    if is_ray(arguments.where):
        from pytest_klineage.cli.cluster import run_cluster

        return run_cluster(arguments)
    if arguments.pools or arguments.retry or arguments.end:
        raise UsageError("--pools, --retry and --end are for a cluster: ray, or ray://HOST:PORT")
    say(status_line(_folder(Path(arguments.where))))
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
    line += f", {counted(counts.faults, 'fault')}"
    line += f", {counts.refused} refused" if counts.refused else ""
    waiting = ", ".join(f"{count} for {name}" for name, count in counts.platforms)
    return f"{folder.root}: {line}" + (f"; left: {waiting}" if waiting else "")


def say_unjudged(folder: BatchFolder, platform: str) -> bool:
    """Name the requests that faults have left without a verdict, and the next step. Whether there are any."""
    found = folder.unjudged(platform)
    for request, fault, given_up in found[:MOST_NAMED]:
        state = "given up" if given_up else "not judged, the next call tries again"
        why = f"{fault.code.value}: {fault.message.splitlines()[0]}"
        say(f"{request.case.id} {request.source.label or 'kernel'}: {state}: {why}"[:LINE_LENGTH])
    if len(found) > MOST_NAMED:
        say(f"... and {len(found) - MOST_NAMED} more")
    if any(given_up and not fault.is_final for _, fault, given_up in found):
        say(f"once that is mended: pytest-klineage judge {folder.root} --platform {platform} --retry")
    return bool(found)


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
            folder, platform, seconds=seconds, cache_dir=arguments.cache_dir, name=arguments.name, tell=say,
            goes_on=parent_is_there(STDIN), shared=arguments.share > 1,
        )  # fmt: skip
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


def _build_here(folder: BatchFolder, arguments: argparse.Namespace) -> int:
    """Build ahead, by default for every platform that is asked for. A kernel that does not build fails nothing: its
    verdict will say so."""
    from pytest_klineage.executors.judging import build_folder
    from pytest_klineage.gate.host.cpu import usable_cores
    from pytest_klineage.records import platform_name

    asked = [name for name, _ in folder.counts().platforms]
    platforms = asked if arguments.platform == "auto" else [platform_name(arguments.platform)]
    _catch_signals()
    try:
        jobs = arguments.judges or usable_cores()
        ended = [build_folder(folder, name, cache_dir=arguments.cache_dir, jobs=jobs, tell=say) for name in platforms]
    except KeyboardInterrupt:
        return INTERRUPTED
    say(f"{folder.root}: {sum(one.built for one in ended)} built, {sum(one.failed for one in ended)} not")
    return OK


def _start_judges(arguments: argparse.Namespace, platform: str, seconds: float | None) -> int:
    """A judge for each device, each a process; ends when all have."""
    _catch_signals()
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest_klineage", "judge", str(arguments.folder), "--platform", platform]
    command += ["--share", str(arguments.share)]
    command += ["--cache-dir", str(arguments.cache_dir)] if arguments.cache_dir else []
    running = []
    try:
        for name, environment in devices_of(platform, arguments.judges, arguments.share):
            left = [] if seconds is None else ["--for", f"{max(seconds - (time.monotonic() - started), 1):.1f}"]
            running.append(subprocess.Popen([*command, "--name", name, *left], env=environment, stdin=subprocess.PIPE))
        ended = [process.wait() for process in running]
    except KeyboardInterrupt:
        _end(running)
        return INTERRUPTED
    return FAILED if any(ended) else OK


def devices_of(platform: str, asked: int | None, share: int) -> list[tuple[str, dict[str, str]]]:
    """Name and environment of each judge. Raises UsageError for more than there are, or can be."""
    from pytest_klineage.gate.host.gpus import gpus_for

    environment = dict(os.environ)
    if platform == "cpu":
        if asked not in (None, 1) or share != 1:
            raise UsageError("a CPU has one judge: kernels on it are timed one at a time")
        return [("cpu", environment)]
    found = gpus_for(platform)
    count = len(found) if asked is None else asked
    if not 1 <= count <= len(found):
        raise UsageError(f"-n lies between 1 and {len(found)}, the GPUs of {platform} here, got {count}")
    if share < 1:
        raise UsageError(f"--share is 1 at least, got {share}")
    return [
        (f"gpu {gpu.index}{f'.{place}' if share > 1 else ''}", environment | {"CUDA_VISIBLE_DEVICES": gpu.uuid})
        for place in range(share) for gpu in found[:count]
    ]  # fmt: skip


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
