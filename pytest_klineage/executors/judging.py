"""A judge of a folder: takes open requests one by one until none is left or its time is up. One for each device."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, takewhile
from pathlib import Path
from types import FrameType

import msgspec

from pytest_klineage.executors.batch import ARTIFACTS, BatchFolder
from pytest_klineage.executors.carried import DefinitionMissing, supply_operator
from pytest_klineage.executors.local import LocalExecutor
from pytest_klineage.gate.judge import Gate
from pytest_klineage.gate.settings import GateSettings, default_cache_dir
from pytest_klineage.records import Code, KernelSource, Verdict
from pytest_klineage.records.judging import JudgeReply, JudgeRequest

FIRST_GUESS_S = 8.0
"""What a judgement is taken to last before one has been made."""
GRACE_S = 3.0
"""Time kept for ending processes; a judgement that is still under way then is given up and left open."""
Tell = Callable[[str], None]
Wanted = tuple[JudgeRequest, KernelSource]
_BUILDERS: list[Gate] = []
"""Of a process that builds: its gate."""


class TimeUp(BaseException):
    """The time limit; not an Exception, so that no handler takes it for a fault."""


class JudgeSummary(msgspec.Struct, frozen=True):
    """What one judge has done."""

    judged: int
    faults: int
    in_time: bool
    """False when time was up before the requests were."""


def judge_folder(
    folder: BatchFolder, platform: str, *, seconds: float | None = None, cache_dir: Path | None = None,
    name: str = "", tell: Tell | None = None, goes_on: Callable[[], bool] = lambda: True, shared: bool = False,
) -> JudgeSummary:  # fmt: skip
    """Judge every open request of a platform on this process's device.

    seconds: time limit; no judgement is begun that is not expected to end before, and one that does not is left open.
    shared: whether other judges use the device too; where it has no memory left, or a kernel returns an error, which
    may be for want of memory, a request stays open.
    goes_on: asked before each request; False ends the judge. Raises KlineageError when the machine cannot judge at
    all; KeyboardInterrupt leaves the request that was under way open.
    """
    # Absolute: the processes that load kernels have other working directories.
    artifacts = folder.artifacts.absolute() if folder.artifacts is not None else None
    local = GateSettings(cache_dir=(cache_dir or default_cache_dir()).absolute(), artifacts=artifacts)
    judge = _FolderJudge(folder, LocalExecutor(platform, local), platform, seconds, name or platform, tell, shared)
    try:
        folder.note_machine(judge.executor.machine())
        with _alarm(seconds):
            judge.run(goes_on)
    except TimeUp:
        judge.in_time = False
    finally:
        judge.executor.close()
    return JudgeSummary(judge.judged, judge.faults, judge.in_time)


class BuiltAhead(msgspec.Struct, frozen=True):
    """What one call has built, in kernels."""

    built: int
    failed: int


def build_folder(
    folder: BatchFolder, platform: str, *, cache_dir: Path | None = None, jobs: int = 1, tell: Tell | None = None
) -> BuiltAhead:
    """Build the kernels of all open requests of a platform into the folder's artifacts. That needs no device.

    Nothing is answered: a kernel that does not build has its verdict from the judge. Kernels that stand in for a
    reference are built as well. jobs: processes that build, each kernel in one of them. Raises KlineageError when a
    compiler is missing.
    """
    artifacts, cache = folder.root.absolute() / ARTIFACTS, (cache_dir or default_cache_dir()).absolute()
    settings = GateSettings(stage="compile", artifacts=artifacts, cache_dir=cache)
    wanted = _to_build(folder.open_requests(platform))
    said = [f"{platform}: {request.case.id} {source.label or 'kernel'}" for request, source in wanted]
    built, failed = 0, 0
    for name, (ok, what) in zip(said, _built(wanted, platform, settings, min(jobs, len(wanted))), strict=True):
        built, failed = built + ok, failed + (not ok)
        if tell is not None:
            tell(f"{name}: {what}")
    return BuiltAhead(built, failed)


def _to_build(requests: Iterable[JudgeRequest]) -> list[Wanted]:
    """Each kernel of each case once."""
    found: dict[tuple[str, str], Wanted] = {}
    for request in requests:
        for source in filter(None, (request.source, request.reference_source)):
            found.setdefault((request.case.id, source.digest), (request, source))
    return list(found.values())


def _built(wanted: list[Wanted], platform: str, settings: GateSettings, jobs: int) -> Iterator[tuple[bool, str]]:
    """Whether each was built, and what is said of it, in the order of what is wanted."""
    if jobs <= 1:
        with Gate(platform, settings) as gate:
            yield from (_build_with(gate, *one) for one in wanted)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _begin_building, (platform, settings)) as pool:
        yield from pool.map(_build_one, wanted)


def _begin_building(platform: str, settings: GateSettings) -> None:
    """What a building process begins with: its own gate. An interruption is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gate = Gate(platform, settings)
    atexit.register(gate.close)
    _BUILDERS.append(gate)


def _build_one(wanted: Wanted) -> tuple[bool, str]:
    return _build_with(_BUILDERS[-1], *wanted)


def _build_with(gate: Gate, request: JudgeRequest, source: KernelSource) -> tuple[bool, str]:
    try:
        supply_operator(request, gate.settings.cache_dir)
        verdict = gate.judge(request.case, source, platforms=request.platforms)
    except DefinitionMissing as error:
        return False, str(error)
    why = "" if verdict.ok else f": {verdict.reasons[0].message.splitlines()[0]}"
    return verdict.ok, f"{verdict.code.value}{why}"


def after_others(left: deque[JudgeRequest], taken: JudgeRequest) -> deque[JudgeRequest]:
    """What is left when another judge has taken a request: other cases of its priority come before the rest of its own.

    A judge makes a case's problems itself, so judges that keep to different cases have less to do.
    """
    alike = list(takewhile(lambda one: one.priority == taken.priority, left))
    return deque([*sorted(alike, key=lambda one: one.case == taken.case), *islice(left, len(alike), None)])


class _FolderJudge:
    """The state of one judge."""

    def __init__(
        self, folder: BatchFolder, executor: LocalExecutor, platform: str, seconds: float | None, name: str,
        tell: Tell | None, shared: bool,
    ) -> None:  # fmt: skip
        self.folder, self.executor, self.platform, self.name, self.shared = folder, executor, platform, name, shared
        self.judged, self.faults, self.in_time = 0, 0, True
        self._end = None if seconds is None else time.monotonic() + seconds - GRACE_S
        self._longest_s = 0.0
        self._failed: set[str] = set()
        """What failed here: it is left to another judge, or to another call."""
        self._tell = tell or (lambda _: None)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Judge until a look at the folder finds nothing to take."""
        taken = True
        while taken and self.in_time:
            taken = False
            left = deque(self.folder.open_requests(self.platform))
            while left:
                if not goes_on():
                    return
                if not self._has_time():
                    self.in_time = False
                    return
                request = left.popleft()
                if request.digest in self._failed:
                    continue
                if self._take(request):
                    taken = True
                else:
                    left = after_others(left, request)

    def _has_time(self) -> bool:
        return self._end is None or time.monotonic() + (self._longest_s or FIRST_GUESS_S) <= self._end

    def _take(self, request: JudgeRequest) -> bool:
        """Judge a request and write the answer down. False when another judge has it."""
        claim = self.folder.claim(request)
        if claim is None:
            return False
        try:
            started = time.monotonic()
            reply = self.executor.judge(request)
            if self.shared and (why := missing_memory(reply)):
                self._leave(request, why)
                return True
            self.folder.answer(reply)
        finally:
            claim.release()
        spent_s = time.monotonic() - started
        self._longest_s = max(self._longest_s, spent_s)
        self._count(request, reply, spent_s)
        return True

    def _leave(self, request: JudgeRequest, why: str) -> None:
        """Leave a request open that other judges of this GPU may have made fail."""
        self.faults += 1
        self._failed.add(request.digest)
        self.executor.close()
        name = f"{self.name}: {request.case.id} {request.source.label or 'kernel'}"
        self._tell(f"{name}: left open, it failed beside other judges (--share 1 judges it): {why.splitlines()[0]}")

    def _count(self, request: JudgeRequest, reply: JudgeReply, spent_s: float) -> None:
        waits = ""
        if reply.verdict is not None:
            self.judged += 1
            text, waits = verdict_text(reply.verdict), waits_text(reply.verdict)
        else:
            self.faults += 1
            self._failed.add(request.digest)
            self.executor.close()
            text = f"no verdict: {reply.fault.message.splitlines()[0]}" if reply.fault is not None else "no verdict"
        name = f"{self.name}: {request.case.id} {request.source.label or 'kernel'}"
        self._tell(f"{name}: {text} ({spent_s:.1f} s{waits})")


def missing_memory(reply: JudgeReply) -> str:
    """What a verdict says that the GPU's missing memory may explain; "" for every other, also where the system killed
    the process. A kernel's own error is among them: it often stands behind an allocation that failed."""
    for reason in reply.verdict.reasons if reply.verdict is not None else ():
        of_the_gpu = "out of memory" in reason.message or "GPU's memory" in reason.message
        refused = reason.code is Code.OUT_OF_MEMORY and of_the_gpu
        if refused or reason.code in (Code.SKIPPED_MEMORY, Code.RETURNED_ERROR):
            return reason.message
    return ""


def verdict_text(verdict: Verdict) -> str:
    """A verdict in a few words: its code, and the speedup of a kernel that was timed."""
    timing = verdict.timing if verdict.ranked else None
    speed = f" {timing.speedup.estimate:.3f}x" if timing is not None else ""
    return verdict.code.value + speed + (" (screened)" if verdict.screened is not None else "")


def waits_text(verdict: Verdict) -> str:
    """What a judgement waited for a second or longer, the longest first, in seconds."""
    longest = sorted(verdict.waits_s.items(), key=lambda item: -item[1])
    said = ", ".join(f"{what} {seconds:.1f}" for what, seconds in longest if seconds >= 1)
    return f": {said}" if said else ""


@contextlib.contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Raises TimeUp in the main thread when time is up."""
    if seconds is None:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds - GRACE_S, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parent_is_there(descriptor: int) -> Callable[[], bool]:
    """Tells whether the process at the other end of a pipe lives: it writes nothing, and its end closes the pipe."""
    os.set_blocking(descriptor, False)

    def there() -> bool:
        try:
            return os.read(descriptor, 1) != b""
        except BlockingIOError:
            return True

    return there
