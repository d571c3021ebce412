"""One kernel's way through the gate: audit, build, check, replay, time. Every stage may end it with its reasons."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import sys
from collections.abc import Callable

import msgspec

from pytest_klineage.errors import DeviceOutOfMemory, HarnessError, MissingDependency
from pytest_klineage.gate import findings
from pytest_klineage.gate.definitions import definition_file
from pytest_klineage.gate.host.cpu import usable_cores
from pytest_klineage.gate.host.hosts import place_for
from pytest_klineage.gate.host.locks import machine_lock
from pytest_klineage.gate.rejection import SEVERITY, Rejected
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.gate.stages.audit import Audit, audit
from pytest_klineage.gate.stages.build import build_kernel, built_reason, resource_reasons, unchecked_notes
from pytest_klineage.gate.stages.sanitize import sanitize
from pytest_klineage.gate.stages.time import CALL_SLACK_S, TimedStage
from pytest_klineage.gate.supervise import Processes, Worker
from pytest_klineage.operators import operator_of
from pytest_klineage.records import (
    Build,
    Check,
    Code,
    KernelCase,
    KernelSource,
    KernelTime,
    LibraryPolicy,
    Machine,
    Reason,
    Timing,
    Verdict,
)
from pytest_klineage.records.messages import (
    Attach,
    Attached,
    Checked,
    CheckRequest,
    Detach,
    Job,
    OpenCase,
    Opened,
    Problem,
)
from pytest_klineage.references import UnsupportedCase, reference_of
from pytest_klineage.references.device import chosen_variant, reference_notes
from pytest_klineage.references.functions import COMPILED
from pytest_klineage.references.refusals import refusal_in
from pytest_klineage.surfaces import Built, SurfaceFailure, surface_backend

ORACLE_DEADLINE_S = 600.0
"""Longest time for the oracle to make a case's problems; large shapes in float64 take a while."""
REFERENCE_LOAD_S = 300.0
"""Longest time for a reference on a GPU to load, to tune itself, and to try its variants."""
REFUSAL_LENGTH = 400
"""Characters of what a library said that a verdict keeps."""
CRASH_GRACE_S = 1.0
"""How long a worker whose channel closed is given to end by itself, so that its own status is seen."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a judgement stands."""

    stage: str
    """build, start, oracle, check, sanitize or time."""
    message: str
    done: int = 0
    total: int = 0


class Bench:
    """What the judgements of one gate share: settings, the secret behind all random inputs, and the processes."""

    def __init__(self, platform: str, settings: GateSettings, report: Callable[[Progress], None] | None) -> None:
        self.platform, self.settings, self._report = platform, settings, report
        self.threads = settings.threads or usable_cores()
        self.secret = settings.seed if settings.seed is not None else secrets.token_hex(16)
        self.place = place_for(platform, settings.stage)
        self.binding = self.place.binding(self.threads)
        self.processes = Processes(
            self.threads, {**self.place.environment, **self._reference_caches()}, self.binding.environment
        )
        self.software: dict[str, str] = {}
        """Versions that the workers have reported."""

    def _reference_caches(self) -> dict[str, str]:
        """Where references keep what they have compiled and tuned; candidates are never told."""
        folder = self.settings.cache_dir
        inductor = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "reference-inductor")}
        if self.place.device == "cpu":
            return inductor
        return {
            **inductor,
            "TRITON_CACHE_DIR": str(folder / "reference-triton"),
            "FLASHINFER_WORKSPACE_BASE": str(folder / "reference-flashinfer"),
        }

    def flush_bytes(self, case: KernelCase) -> int:
        """Bytes to write between two timed calls."""
        asked = self.settings.flush_bytes
        return self.place.flush_bytes(operator_of(case).signature(case).num_bytes) if asked is None else asked

    def machine(self) -> Machine:
        """The record of this machine."""
        return self.place.machine(self.software, self.threads)

    def report(self, stage: str, message: str, done: int = 0, total: int = 0) -> None:
        """Tell whoever listens where the judgement stands."""
        if self._report is not None:
            self._report(Progress(stage=stage, message=message, done=done, total=total))


class Judgement:
    """One kernel's way through the gate."""

    def __init__(
        self, bench: Bench, case: KernelCase, source: KernelSource, reference_source: KernelSource | None,
        precision: float | None = None,
    ) -> None:  # fmt: skip
        self.bench, self.case, self.source, self.reference_source = bench, case, source, reference_source
        self.settings, self.processes = bench.settings, bench.processes
        if precision is not None and precision < self.settings.precision:
            self.settings = msgspec.structs.replace(self.settings, precision=precision)
        self.flush_bytes = bench.flush_bytes(case)
        self.build: Build | None = None
        self.audit = Audit()
        self.checks: list[Check] = []
        self.timings: list[Timing] = []
        self.notes: list[str] = []
        self.log = ""
        self.containment: tuple[str, ...] = ()
        self.reference_facts: dict[str, str] = {}
        self.reference_ran = False
        """Whether it was timed once: what fails afterwards is no refusal."""
        self.workers: dict[str, Worker] = {}
        self.jobs: dict[str, tuple[Job, str]] = {}
        """What every worker was started with: its job and the template it was forked from."""
        self.libraries: set[str] = set()
        """Libraries that processes of the candidate which have ended had loaded."""
        self.opened: Opened | None = None
        self.timed_s = 0.0
        self.kernels: dict[str, tuple[KernelTime, ...]] = {}
        self.sanitizer: dict[str, str] = {}

    def run(self) -> tuple[Reason, ...]:
        """All stages in order. Returns the reasons; the first decides."""
        try:
            with machine_lock(self.bench.place.lock, alone=False):
                self._audit()
                # A user's definition that is no oracle is an error, and nothing is built for it.
                opened = self._open() if self.case.definition and self.settings.stage == "all" else None
                built = self._build(self.source)
                if self.settings.stage == "compile":
                    return (built_reason(built.build),)
                opened = opened or self._open()
                self._start_reference()
                self._check_candidate(built, opened)
                self._sanitize(built)
            timed = TimedStage(self)
            reason = timed.run(opened)
            timed.attribute()
            self._look_for_libraries()
        except Rejected as rejected:
            return rejected.reasons
        return (reason,)

    def discard(self) -> None:
        """Forget this judgement's workers, whose processes are gone."""
        for worker in self.workers.values():
            worker.discard()

    def close(self) -> None:
        """End this judgement's workers."""
        for role in self.workers:
            self.processes.ask_oracle(Detach(role=role), Attached, CALL_SLACK_S)
        for worker in self.workers.values():
            with contextlib.suppress(HarnessError):
                worker.end()

    # --- stages -------------------------------------------------------------------------------------------------------

    def _audit(self) -> None:
        self.audit = audit(self.source)
        self.notes += self.audit.notes
        if self.audit.reasons and "audit" in self.settings.defences:
            raise Rejected(*self.audit.reasons)

    def _build(self, source: KernelSource) -> Built:
        self.bench.report("build", f"building {source.label or source.surface}")
        try:
            built = build_kernel(source, self.bench.platform, self.settings)
        except SurfaceFailure as failure:
            self.log = findings.clean(failure.log)
            raise Rejected(Reason(code=failure.code, message=failure.message)) from failure
        if source is self.source:
            self.build = built.build
            self.notes += unchecked_notes(self.case, built.build, source.surface)
            if reasons := resource_reasons(self.case, built.build, source.surface):
                raise Rejected(*reasons)
        return built

    def _open(self) -> Opened:
        self.bench.report("oracle", "computing expected outputs in float64")
        request = OpenCase(
            case=self.case, secret=self.bench.secret, seeds=self.settings.seeds,
            flush_bytes=self.flush_bytes, threads=self.bench.threads, device=self.bench.place.device,
            definition=definition_file(self.case),
        )  # fmt: skip
        opened = self.processes.ask_oracle(request, Opened, ORACLE_DEADLINE_S)
        if isinstance(opened, Problem):
            raise HarnessError("the oracle could not open the case")
        self.opened = opened
        self.notes += opened.notes
        self.bench.software["torch"] = opened.settings["oracle_torch"]
        if opened.findings and "case_lint" in self.settings.defences:
            reasons = [
                Reason(code=Code.SKIPPED_NOT_SCORABLE, message=f"the case proves nothing: {f}") for f in opened.findings
            ]
            raise Rejected(*reasons)
        return opened

    def _start_reference(self) -> None:
        if self.reference_source is not None:
            built = self._build(self.reference_source)
            job = self._job(self.reference_source, built)
            preload = self._preload(self.reference_source)
            self.reference_facts = {"label": self.reference_source.label, "digest": self.reference_source.digest}
        else:
            job = Job(
                surface="reference", case=self.case, platform=self.bench.platform, threads=self.bench.threads,
                sandbox=False, flush_bytes=self.flush_bytes, processors=self.bench.binding.processors,
                definition=definition_file(self.case),
            )  # fmt: skip
            preload = "torch"
        attached = self._start("reference", job, preload)
        self.reference_facts |= attached.settings
        if self.reference_source is None:
            self.notes += reference_notes(attached.settings)

    def _start_candidate(self, built: Built, *, refuse_framework: bool, role: str = "candidate") -> None:
        job = self._job(self.source, built, refuse_framework=refuse_framework)
        self.containment = self._start(role, job, self._preload(self.source)).containment

    def _preload(self, source: KernelSource) -> str:
        return self.bench.place.preload(needs_torch=surface_backend(source.surface.value).needs_torch)

    def _job(self, source: KernelSource, built: Built, *, refuse_framework: bool = False) -> Job:
        importable = tuple(path for path in sys.path if path and os.path.isdir(path)) if source.module else ()
        return Job(
            surface=source.surface.value, artifact=str(built.artifact), entry=source.entry, module=source.module,
            case=self.case, platform=self.bench.platform, read_paths=importable, threads=self.bench.threads,
            sandbox="sandbox" in self.settings.defences, refuse_framework=refuse_framework,
            flush_bytes=self.flush_bytes, allow_processes=surface_backend(source.surface.value).allow_processes,
            processors=self.bench.binding.processors,
        )  # fmt: skip

    def _start(self, role: str, job: Job, preload: str) -> Attached:
        self.bench.report("start", f"starting the {role}")
        self._launch(role, job, preload)
        return self._attach(role)

    def _launch(self, role: str, job: Job, preload: str) -> None:
        """Start a worker's process, which loads its kernel without being asked."""
        self.jobs[role] = job, preload
        self.workers[role] = Worker(self.processes.template(preload), job)

    def _attach(self, role: str) -> Attached:
        """Wait until a worker has loaded its kernel, and have the oracle take it over."""
        worker = self.workers[role]
        fds = [worker.oracle_end.fileno()]
        # A reference may tune itself when it starts: FLA takes half a minute.
        tunes = self.bench.place.device != "cpu" or self.case.reference == COMPILED
        slow = role == "reference" and tunes
        deadline = max(self.settings.load_timeout_s, REFERENCE_LOAD_S) if slow else self.settings.load_timeout_s
        answer = self.processes.ask_oracle(
            Attach(role=role, deadline_s=deadline), Attached, deadline + CALL_SLACK_S, fds
        )  # fmt: skip
        worker.oracle_end.close()
        if isinstance(answer, Problem):
            raise self.failed(answer)
        return answer

    def _check_candidate(self, built: Built, opened: Opened) -> None:
        """Start the candidate and check it. Where a kernel of its own is asked for, the framework refuses to compute.

        The process that is checked is the one that is timed: whatever a kernel does when it is refused, it is measured
        doing that.
        """
        concerned = "own_kernel" in self.settings.defences and surface_backend(self.source.surface.value).needs_torch
        refused = concerned and self.case.library is LibraryPolicy.FORBID
        try:
            self._start_candidate(built, refuse_framework=refused)
            self._check_all(opened)
        except Rejected as rejected:
            if not refused or rejected.reasons[0].code not in LACKS_FRAMEWORK:
                raise
            self._check_with_framework(built, opened)
            raise Rejected(self._wrapper_reason(rejected.reasons[0])) from rejected
        if concerned and self.case.library is LibraryPolicy.LABEL:
            self._label_framework(built)

    def _check_with_framework(self, built: Built, opened: Opened) -> None:
        """Check a candidate that was rejected without the framework: what is still wrong is its own fault."""
        self.bench.report("check", "once more with the framework")
        self.checks.clear()
        self._start_candidate(built, refuse_framework=False, role="replay")
        self._check_all(opened, role="replay")

    def _label_framework(self, built: Built) -> None:
        """Note it when the candidate does not pass a check without the framework."""
        self.bench.report("check", "replay without the framework")
        own = self.log
        try:
            self._start_candidate(built, refuse_framework=True, role="replay")
            found = self._check(0, role="replay").reasons
        except Rejected as rejected:
            found = rejected.reasons
        self.processes.ask_oracle(Detach(role="replay"), Attached, CALL_SLACK_S)
        self.workers.pop("replay").end()
        self.log = own
        if found:
            reason = self._wrapper_reason(found[0])
            self.notes.append(f"{reason.code}: {reason.message}")

    def _wrapper_reason(self, found: Reason) -> Reason:
        code = Code.WRAPPER_FALLBACK if self.audit.fallback else Code.WRAPPER_FRAMEWORK
        detail = "its output is wrong without the framework"
        if found.code is Code.EXCEPTION:
            detail = found.message.strip().rpartition("\n")[2]
        return Reason(code=code, message=f"the framework does the work: {findings.clean(detail, 300)}")

    def _check_all(self, opened: Opened, role: str = "candidate") -> None:
        failures: list[Reason] = []
        for index, planned in enumerate(opened.checks):
            self.bench.report("check", planned.regime, index, len(opened.checks))
            answer = self._check(index, role)
            self.checks += answer.checks
            failures += answer.reasons
        if failures:
            raise Rejected(*sorted(failures, key=lambda reason: SEVERITY.get(reason.code, 0), reverse=True))

    def _check(self, index: int, role: str = "candidate") -> Checked:
        deadline = self.settings.run_timeout_s
        request = CheckRequest(role=role, index=index, deadline_s=deadline, defences=self.settings.defences)
        answer = self.processes.ask_oracle(request, Checked, 2 * deadline + CALL_SLACK_S)
        if isinstance(answer, Problem):
            raise self.failed(answer)
        self.end_a_flood()
        return answer

    def _sanitize(self, built: Built) -> None:
        """Have the tools of compute-sanitizer that were asked for watch the kernel."""
        tools = self.settings.sanitize
        if not tools:
            return
        found = sanitize(
            self._job(self.source, built), tools, environment=self.bench.place.environment,
            report=lambda tool, number: self.bench.report("sanitize", tool, number, len(tools)),
        )  # fmt: skip
        self.sanitizer = found.by_tool
        self.notes += found.notes
        if found.reasons:
            raise Rejected(*found.reasons)

    def renew(self) -> None:
        """Start both sides again, in new processes that load at the same time, with the jobs they had.

        The reference keeps the variant that it has chosen.
        """
        for role in ("reference", "candidate"):
            worker = self.workers[role]
            # Ended first: one that is told to stop is gone before anybody has seen what it had loaded.
            ended = worker.end()
            self.processes.ask_oracle(Detach(role=role), Attached, CALL_SLACK_S)
            if role == "candidate":
                self.libraries |= set(ended.libraries)
                self.log = self.log or findings.clean(worker.log.text())
            job, preload = self.jobs[role]
            if role == "reference":
                job = msgspec.structs.replace(job, **chosen_variant(self.reference_facts))
            self._launch(role, job, preload)
        for role in ("reference", "candidate"):
            self._attach(role)

    def memory_reason(self) -> Reason | None:
        """After a GPU ran out of memory: a reason when the candidate had taken it. Ends the candidate.

        More than half of the GPU comes free then: nobody else can have been the cause.
        """
        worker, before = self.workers.get("candidate"), self.bench.place.memory()
        if worker is None or before is None:
            return None
        with contextlib.suppress(HarnessError):
            worker.end()
        after = self.bench.place.memory()
        taken = after.free_bytes - before.free_bytes if after is not None else 0
        if taken <= before.total_bytes // 2:
            return None
        message = f"the kernel held {taken / 2**30:.1f} GiB of the GPU's memory; nothing was left to check it with"
        return Reason(code=Code.OUT_OF_MEMORY, message=message, evidence={"bytes": taken})

    def _look_for_libraries(self) -> None:
        ended = self.workers["candidate"].end()
        loaded = tuple(sorted(self.libraries | set(ended.libraries)))
        self.object_to_libraries(findings.library_reason(loaded))

    def object_to_libraries(self, reason: Reason | None) -> None:
        """Reject a kernel for its use of libraries, or note it, as the case says."""
        if reason is None or "own_kernel" not in self.settings.defences or self.case.library is LibraryPolicy.ALLOW:
            return
        if self.case.library is LibraryPolicy.FORBID:
            raise Rejected(reason)
        self.notes.append(f"{reason.code}: {reason.message}")

    # --- from answers to the verdict ----------------------------------------------------------------------------------

    def end_a_flood(self) -> None:
        """Reject a candidate that prints without end, right or wrong."""
        if self.workers["candidate"].log.flooded:
            raise self.failed(Problem(role="candidate", reasons=()))

    def failed(self, problem: Problem) -> Rejected:
        """A worker failed: the candidate's failure is a verdict, the reference's is ours."""
        worker = self.workers[problem.role if problem.role in self.workers else "candidate"]
        reasons = problem.reasons
        if problem.gone or worker.log.flooded:
            ended = worker.end(CRASH_GRACE_S)
            reasons = (findings.how_it_ended(ended, flooded=worker.log.flooded, printed=worker.log.total),)
        worker.end()
        text = findings.clean(worker.log.text())
        if problem.role == "reference":
            cause = reasons[0].message if reasons else "it ended"
            if "No module named" in cause:
                missing = cause.rpartition("No module named")[2].strip()
                what = f"{missing}, for the reference {self.case.reference},"
                raise MissingDependency(what, reference_of(self.case).remedy)
            if reasons and reasons[0].code is Code.OUT_OF_MEMORY and self.bench.place.device != "cpu":
                raise DeviceOutOfMemory(f"the reference {self.case.reference} found no memory on the GPU: {cause}")
            if reasons and reasons[0].code is Code.EXCEPTION and (why := self._refusal(cause)):
                raise UnsupportedCase.of(self.case.reference, self.case, self.bench.platform, why)
            raise HarnessError(f"the reference {self.case.reference} failed: {cause} {text}".strip())
        self.log = text
        return Rejected(*(Reason(code=r.code, message=findings.clean(r.message), evidence=r.evidence) for r in reasons))

    def _refusal(self, cause: str) -> str:
        """What the library said, on one bounded line, where it refused the case. A CPU has no trial beforehand."""
        if self.reference_source is not None or self.reference_ran:
            return ""
        why = refusal_in(cause, tried=self.bench.place.device != "cpu")
        return findings.clean(" ".join(why.split()))[:REFUSAL_LENGTH]

    def verdict(self, reasons: tuple[Reason, ...], *, overhead_s: float) -> Verdict:
        """The record of everything that was found."""
        if "candidate" in self.workers and not self.log:
            self.log = findings.clean(self.workers["candidate"].log.text())
        return Verdict(
            case=self.case,
            status=reasons[0].code.status,
            reasons=reasons,
            surface=self.source.surface.value,
            source_digest=self.source.digest,
            label=self.source.label,
            machine=self.bench.machine(),
            build=self.build,
            checks=tuple(self.checks),
            timing=self.timings[0] if self.timings else None,
            other_timings=tuple(self.timings[1:]),
            reference=self.reference_facts,
            kernels=self.kernels.get("candidate", ()),
            reference_kernels=self.kernels.get("reference", ()),
            sanitizer=self.sanitizer,
            containment=self.containment,
            notes=tuple(self.notes),
            log=self.log,
            overhead_s=overhead_s,
            judged_at=now(),
        )


LACKS_FRAMEWORK = frozenset({
    Code.EXCEPTION, Code.RETURNED_ERROR, Code.CRASH, Code.EXITED, Code.MISMATCH, Code.UNWRITTEN, Code.NON_FINITE,
})  # fmt: skip
"""How a candidate may fail because the framework refuses to compute."""


def now() -> str:
    """UTC time, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
