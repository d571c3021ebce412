"""compute-sanitizer over a kernel that passed its checks: starting the tools, reading what they say.

The tools watch a process of worker/sanitized.py that calls the built kernel twice, at a small shape where the kernel
takes it. They are a help for authors and no defence: the kernel shares a process with the tool's own code.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pytest_klineage.errors import MissingDependency
from pytest_klineage.gate.findings import clean
from pytest_klineage.gate.supervise import worker_environment
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.base import named_shape
from pytest_klineage.records import Code, KernelCase, Reason
from pytest_klineage.records.messages import Job, KernelLoaded, LoadFailed
from pytest_klineage.surfaces.compiling import run_bounded
from pytest_klineage.surfaces.toolkit import find_nvcc, find_tool

PROGRAM = "compute-sanitizer"
REMEDY = "a CUDA toolkit, of which compute-sanitizer is a part   (or put its folder on PATH, or set CUDA_HOME)"
TOOL_LIMIT_S = 120.0
"""Longest run of one tool; at the small shapes most take a few seconds."""
FOUND_STATUS = 86
PADDING_BYTES = 512
"""Between allocations: without it, what lies after a tensor is the next one, and no access to that is amiss."""
OPTIONS = (
    # A toolkit newer than the driver asks for functions that are not there, which is no error of a kernel.
    "--report-api-errors", "no",
    "--padding", str(PADDING_BYTES),
    "--error-exitcode", str(FOUND_STATUS),
)  # fmt: skip
WATCHED_SURFACES = frozenset({"cuda"})
"""Surfaces whose built kernel a bare process can load and call."""
CLEAN = "clean"
SAID_LIMIT = 400
"""Characters of a tool's words that a record keeps."""
LOG_BYTES = 4 << 20

PREFIX = "========="
SUMMARY = re.compile(r"^(?:ERROR|RACECHECK) SUMMARY: ([\d,]+) (?:error|hazard)", re.M)
BANNER = re.compile(r"COMPUTE-SANITIZER$|\w+ SUMMARY: ")
TOOL_ERROR = re.compile(
    r"Internal |Target application|Tracking kernels|(?:Error|Warning): (?!Race reported|Potential )"
)
"""How a tool begins when it speaks of itself or of the process, and not of the kernel."""
MALFUNCTION = re.compile(r"Internal |Error: (?!process didn't|couldn't find exit)")
"""Trouble after which a summary without errors means nothing."""
BACKTRACE = re.compile(r"Saved host backtrace|Host Frame|Device Frame|Launch of|\.\.\.")
FOLDER = re.compile(r"(?<= in )\S*/(?=[^/\s]+:\d)")
"""The folder of a source file: that of a build, which no longer exists."""


class SanitizerRun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one tool at one shape; at most one of the texts is there, and none when it found nothing."""

    finding: str = ""
    """The first finding, in the tool's words."""
    count: int = 0
    """How many findings or hazards the tool counted."""
    refused: str = ""
    """What the kernel said when it returned an error."""
    unfinished: str = ""
    """Why the tool came to no end."""

    @property
    def said(self) -> str:
        """The result in one line, for the record."""
        if self.refused:
            return f"not run: {self.refused}"
        return self.finding or (f"not finished: {self.unfinished}" if self.unfinished else CLEAN)


class Sanitized(msgspec.Struct, frozen=True, kw_only=True):
    """What all tools came to."""

    by_tool: dict[str, str] = {}
    """By tool: "clean", the first finding, or why there is no result."""
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()


def sanitize(
    job: Job, tools: tuple[str, ...], *, environment: dict[str, str], report: Callable[[str, int], None]
) -> Sanitized:
    """Run the tools one after another over the kernel of a job; `report` hears each tool's name and number.

    A tool that comes to no result is a note, never a reason. Raises MissingDependency without compute-sanitizer.
    """
    if job.case is None or job.surface not in WATCHED_SURFACES or job.platform == "cpu":
        note = f"compute-sanitizer was not run: it watches cuda kernels, this is a {job.surface} kernel"
        return Sanitized(notes=(f"{note} on {job.platform}",))
    program = find_sanitizer()
    cases = cases_to_try(job.case)
    by_tool: dict[str, str] = {}
    reasons: list[Reason] = []
    notes: list[str] = []
    for number, tool in enumerate(tools):
        report(tool, number)
        run = run_tool(program, tool, msgspec.structs.replace(job, case=cases[0]), environment)
        if run.refused and len(cases) > 1:
            notes.append(f"compute-sanitizer ran at the case's own shape: at {cases[0].id} {run.refused}")
            cases = cases[1:]
            run = run_tool(program, tool, msgspec.structs.replace(job, case=cases[0]), environment)
        by_tool[tool] = run.said
        if run.finding:
            reasons.append(reason_for(tool, run, cases[0]))
        elif run.said != CLEAN:
            notes.append(f"{tool} {run.said}")
    return Sanitized(by_tool=by_tool, reasons=tuple(reasons), notes=tuple(notes))


def reason_for(tool: str, run: SanitizerRun, case: KernelCase) -> Reason:
    """The reason of a finding."""
    more = f" ({run.count} in all)" if run.count > 1 else ""
    return Reason(
        code=Code.SANITIZER,
        message=f"{tool} at {case.id}: {run.finding}{more}",
        evidence={"tool": tool, "findings": run.count, "case": case.id},
    )


def cases_to_try(case: KernelCase) -> tuple[KernelCase, ...]:
    """The case at its operator's small shape, where that is smaller, and at its own for a kernel that refuses that."""
    own = case.at_shape(case.shape)
    chosen = operator_of(case)
    if "gpu" not in chosen.small:
        return (own,)
    shape, _dtype, _options = chosen.small["gpu"]
    small = case.at_shape(named_shape(chosen, shape))
    return (small, own) if chosen.flops(small) < chosen.flops(own) else (own,)


def find_sanitizer() -> str:
    """Path of compute-sanitizer: where the toolkit's programs are, or beside nvcc. Raises MissingDependency."""
    if path := find_tool(PROGRAM):
        return path
    with contextlib.suppress(MissingDependency):
        folder = Path(find_nvcc()).resolve().parent
        for candidate in (folder / PROGRAM, folder.parent / PROGRAM / PROGRAM):
            if os.access(candidate, os.X_OK) and candidate.is_file():
                return str(candidate)
    raise MissingDependency(f"{PROGRAM}, which --klineage-sanitize needs,", REMEDY)


def run_tool(
    program: str, tool: str, job: Job, environment: dict[str, str], *, limit_s: float = TOOL_LIMIT_S
) -> SanitizerRun:
    """Run one tool over a process that calls the kernel; it is ended after `limit_s` seconds."""
    with tempfile.TemporaryDirectory(prefix="klineage-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        log, said, job_file = work / "tool.log", work / "said.log", work / "job.json"
        job_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(job, workdir=folder)))
        watched = [sys.executable, "-P", "-s", "-m", "pytest_klineage.worker.sanitized", str(job_file)]
        command = [program, "--tool", tool, *OPTIONS, "--log-file", str(log), *watched]
        variables = worker_environment(job.threads) | environment | {"TMPDIR": folder, "HOME": folder}
        status = run_bounded(command, said, variables, limit_s)
        if status is None:
            return SanitizerRun(unfinished=f"ended after {limit_s:g} s")
        return read_run(beginning(log), answer_of(work / "answer.json"), status, beginning(said))


def beginning(path: Path) -> str:
    """The first LOG_BYTES of a file as text; empty without one."""
    try:
        with path.open("rb") as file:
            return file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def answer_of(path: Path) -> KernelLoaded | LoadFailed | None:
    """What the watched process answered; None when it did not, or nothing that can be read."""
    try:
        answer: KernelLoaded | LoadFailed = msgspec.json.decode(beginning(path), type=KernelLoaded | LoadFailed)
    except msgspec.MsgspecError:
        return None
    return answer


# --- reading a tool's words -------------------------------------------------------------------------------------------


def read_run(log: str, answer: KernelLoaded | LoadFailed | None, status: int, said: str) -> SanitizerRun:
    """What a run came to, by the tool's log, the process's answer, the exit status and what was printed beside."""
    lines = tool_lines(log)
    summary = SUMMARY.search("\n".join(lines))
    count = int(summary.group(1).replace(",", "")) if summary else 0
    errors = [line.strip() for line in lines if MALFUNCTION.match(line.strip())]
    if block := next(findings_in(lines), None):
        return SanitizerRun(finding=described(block), count=max(1, count))
    if isinstance(answer, LoadFailed) and answer.code is Code.RETURNED_ERROR:
        return SanitizerRun(refused=one_line(answer.message))
    if errors:
        return SanitizerRun(unfinished=one_line(errors[0]))
    if count:
        return SanitizerRun(finding=f"{count} errors, of a kind that is not known here", count=count)
    if isinstance(answer, LoadFailed):
        # Of a traceback the last line is the one that says what happened.
        return SanitizerRun(unfinished=one_line(answer.message.strip().rpartition("\n")[2]))
    if summary is None or answer is None or status:
        words = one_line(said.strip()[-SAID_LIMIT:]) or "it printed nothing"
        return SanitizerRun(unfinished=f"it ended with status {status}: {words}")
    return SanitizerRun()


def tool_lines(log: str) -> list[str]:
    """The lines that are the tool's own, without its mark but with their indentation."""
    marked = [line.removeprefix(PREFIX) for line in log.splitlines() if line.startswith(PREFIX)]
    return [line.removeprefix(" ").rstrip() for line in marked]


def findings_in(lines: list[str]) -> Iterator[list[str]]:
    """Findings about the kernel: each a headline, and the lines that are indented below it."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.startswith(" "):
            block.append(line.strip())
            continue
        if block and not BANNER.match(block[0]) and not TOOL_ERROR.match(block[0]):
            yield block
        block = [line] if line else []


def described(block: list[str]) -> str:
    """A finding in one line: what, where in the kernel, by which thread; without the host's backtrace."""
    kept = []
    for line in block:
        if BACKTRACE.match(line):
            break
        kept.append(FOLDER.sub("", line))
    return one_line(", ".join(kept))


def one_line(text: str) -> str:
    """A text as one line, harmless and at most SAID_LIMIT characters long."""
    words = clean(" ".join(text.split()), LOG_BYTES)
    return words if len(words) <= SAID_LIMIT else f"{words[:SAID_LIMIT]}..."
