"""One kernel's way through the gate: audit, build, check, replay, time. Every stage may end it with its reasons."""

from __future__ import annotations

import signal

import msgspec

from pytest_klineage.errors import DeadlineExceeded, HarnessError, WorkerDied
from pytest_klineage.gate import findings
from pytest_klineage.gate.context import JudgementContext
from pytest_klineage.gate.definitions import definition_file, lost_oracle
from pytest_klineage.gate.host.locks import DeviceLock
from pytest_klineage.gate.rejection import SEVERITY, Rejected
from pytest_klineage.gate.stages.audit import audit, foreign_file_reasons, included_libraries
from pytest_klineage.gate.stages.build import build_kernel, build_notes, built_reason, resource_reasons
from pytest_klineage.gate.stages.sanitize import sanitize
from pytest_klineage.gate.stages.time import TimedStage
from pytest_klineage.gate.supervise import CALL_SLACK_S
from pytest_klineage.records import (
    Code,
    KernelSource,
    LibraryPolicy,
    Reason,
)
from pytest_klineage.records.messages import (
    DENORMALS,
    Attached,
    CaseOpened,
    Checked,
    CheckRequest,
    Detach,
    Job,
    OpenCase,
    Stock,
    WorkerFailure,
)
from pytest_klineage.references import reference_of
from pytest_klineage.references.device import chosen_variant, reference_notes
from pytest_klineage.surfaces import Built, SurfaceFailure, surface_backend

ORACLE_DEADLINE_S = 600.0
"""Longest time for the oracle to make a case's problems; large shapes in float64 take a while."""


class Judgement(JudgementContext):
    """All stages of one kernel."""

    lock: DeviceLock | None = None
    """The device's, which the stage that runs holds together with others."""
    only_reads = False
    """Whether the inputs of the candidate that was started last are mapped for reading alone."""

    def run(self) -> tuple[Reason, ...]:
        """All stages in order. Returns the reasons; the first decides."""
        try:
            self._audit()
            # What is built for a GPU disturbs no timing there. A user's definition that is no oracle is an error, and
            # nothing is built for it.
            first = bool(self.case.definition) and self.settings.stage == "all"
            built = None if first or self.gate.host.device == "cpu" else self._build(self.source)
            with self.locked(alone=False) as self.lock:
                opened = self._open() if first else None
                built = built or self._build(self.source)
                if self.settings.stage == "compile":
                    return (built_reason(built.build),)
                opened = opened or self._open()
                self._start_reference()
                self._check_candidate(built, opened)
                self._sanitize(built)
                self._stock()
            timed = TimedStage(self)
            reason = timed.run(opened)
            self._check_again(opened)
            timed.attribute()
            self._look_for_libraries()
        except Rejected as rejected:
            return rejected.reasons
        return (reason,)

    def _reference_preload(self) -> str:
        if self.reference_source is not None:
            return self.preload(self.reference_source)
        ahead = reference_of(self.case).ahead(self.case)
        return f"torch:{','.join(ahead)}" if ahead else "torch"

    def _audit(self) -> None:
        self.audit = audit(self.source)
        self.notes += self.audit.notes
        if self.audit.reasons and "audit" in self.settings.defences:
            raise Rejected(*self.audit.reasons)

    def _build(self, source: KernelSource) -> Built:
        self.gate.report("build", f"building {source.label or source.surface}")
        try:
            built = build_kernel(source, self.gate.platform, self.settings)
        except SurfaceFailure as failure:
            self.log = findings.clean(failure.log)
            raise Rejected(Reason(code=failure.code, message=failure.message)) from failure
        if self.settings.stage == "all":
            self.gate.host.check_toolchain(built.build.toolchain)
        if source is self.source:
            self.build = built.build
            if "audit" in self.settings.defences and (reasons := foreign_file_reasons(built.build)):
                raise Rejected(*reasons)
            self.object_to_libraries(findings.library_reason(included_libraries(built.build)))
            self.notes += build_notes(self.case, built.build, source.surface)
            if reasons := resource_reasons(self.case, built.build, source.surface):
                raise Rejected(*reasons)
        return built

    def _open(self) -> CaseOpened:
        self.gate.report("oracle", "computing expected outputs in float64")
        request = OpenCase(
            case=self.case, secret=self.gate.secret, seeds=self.settings.seeds,
            flush_bytes=self.flush_bytes, threads=self.gate.threads, device=self.gate.host.device,
            definition=definition_file(self.case),
        )  # fmt: skip
        # Its memory may be missing for another case.
        self.gate.shared.end(but_for=self.case if self.shares_reference() else None)
        # Started now, the reference's process imports torch while the oracle computes.
        self.processes.oracle()
        self.processes.template(self._reference_preload())
        try:
            with self.waiting_for("oracle"):
                opened = self.processes.ask_oracle(request, CaseOpened, ORACLE_DEADLINE_S)
        except (DeadlineExceeded, WorkerDied) as error:
            raise lost_oracle(self.case, error) from error
        if isinstance(opened, WorkerFailure):
            raise HarnessError("the oracle could not open the case")
        self.opened = opened
        self.notes += opened.notes
        self.gate.software["torch"] = opened.settings["oracle_torch"]
        if opened.findings and "case_lint" in self.settings.defences:
            reasons = [
                Reason(code=Code.SKIPPED_NOT_SCORABLE, message=f"the case proves nothing: {f}") for f in opened.findings
            ]
            raise Rejected(*reasons)
        return opened

    def _start_reference(self) -> None:
        if self.reference_source is not None:
            built = self._build(self.reference_source)
            job = self.job(self.reference_source, built)
            self.reference_facts = {"label": self.reference_source.label, "digest": self.reference_source.digest}
        else:
            job = Job(
                surface="reference", case=self.case, platform=self.gate.platform, threads=self.gate.threads,
                sandbox=False, flush_bytes=self.flush_bytes, processors=self.gate.binding.processors,
                definition=definition_file(self.case), **chosen_variant(self.chosen_before()),
            )  # fmt: skip
        preload = self._reference_preload()
        said = self.take_kept(job, preload)
        if said is None:
            said = self.start("reference", job, preload).settings
        if self.reference_source is not None:
            self.reference_facts |= said
            return
        self.note_reference(said)
        self.notes += reference_notes(self.reference_facts)

    def _start_candidate(self, built: Built, *, refuse_framework: bool, role: str = "candidate") -> None:
        job = self.job(self.source, built, refuse_framework=refuse_framework)
        # On a GPU the worker itself makes the framework refuse, once its clock is there.
        ready = refuse_framework and self.gate.host.device == "cpu"
        preload = "refused" if ready else self.preload(self.source)
        self.only_reads = False
        started = self.start(role, job, preload)
        self.containment, self.only_reads = started.containment, started.read_only
        note = f"{DENORMALS} are {said}" if (said := findings.clean(started.settings.get(DENORMALS, ""), 100)) else ""
        if note and note not in self.notes:
            self.notes.append(note)

    def _check_candidate(self, built: Built, opened: CaseOpened) -> None:
        """Start the candidate and check it. Where a kernel of its own is asked for, the framework refuses to compute.

        The process that is checked is the one that is timed: whatever a kernel does when it is refused, it is measured
        doing that.
        """
        concerned = "own_kernel" in self.settings.defences and surface_backend(self.source.surface.value).needs_torch
        if concerned and self.case.library is LibraryPolicy.LABEL:
            self._check_labelled(built, opened)
            return
        refused = concerned and self.case.library is LibraryPolicy.FORBID
        try:
            self._start_candidate(built, refuse_framework=refused)
            self._check_all(opened)
        except Rejected as rejected:
            if ended := self._ended_by_writing(rejected.reasons[0]):
                if not self._ends_again(built, opened):
                    raise
                self._check_once_more(built, opened, "with inputs that can be written to")
                raise Rejected(ended) from rejected
            if not refused or rejected.reasons[0].code not in LACKS_FRAMEWORK:
                raise
            self._check_once_more(built, opened, "with the framework")
            raise Rejected(self._wrapper_reason(rejected.reasons[0])) from rejected

    def _check_labelled(self, built: Built, opened: CaseOpened) -> None:
        """Check a candidate that may use the framework, and note it when it does.

        One that does without is timed without as well: it could ask whether the framework refuses, and use it later.
        """
        try:
            self._start_candidate(built, refuse_framework=True)
            first = self._check(0)
            found, refused = first.reasons, first.refused
            if not found and not refused:
                self._check_all(opened)
                return
        except Rejected as rejected:
            found, refused = rejected.reasons, ()
        self.checks.clear()
        self.log = ""
        self._check_in_new_process(built, opened)
        self._label_framework(found, refused)

    def _check_in_new_process(self, built: Built, opened: CaseOpened) -> None:
        self.processes.ask_oracle(Detach(role="candidate"), Attached, CALL_SLACK_S)
        self.workers.pop("candidate").end()
        self._start_candidate(built, refuse_framework=False)
        self._check_all(opened)

    def _ended_by_writing(self, found: Reason) -> Reason | None:
        """What is wrong with a candidate that ended by a signal of memory, should it be right in other memory."""
        memory = found.code is Code.CRASH and found.evidence.get("signal") in (signal.SIGSEGV, signal.SIGBUS)
        if not memory or not self.only_reads:
            return None
        message = f"the kernel writes to its inputs, if only for a while; where they can only be read, {found.message}"
        return Reason(code=Code.INPUT_MUTATED, message=message, evidence=found.evidence)

    def _ends_again(self, built: Built, opened: CaseOpened) -> bool:
        """Whether a candidate that ended so does in a second process as well: a fault that comes and goes is no write
        to its inputs, though it be right in other memory."""
        self.gate.report("check", "once more with inputs that can only be read")
        found = self.checks, self.log
        self.checks = []
        try:
            self._check_in_new_process(built, opened)
        except Rejected as rejected:
            return self._ended_by_writing(rejected.reasons[0]) is not None
        finally:
            self.checks, self.log = found
        return False

    def _check_once_more(self, built: Built, opened: CaseOpened, how: str) -> None:
        """Check a candidate that was rejected as the gate starts it: what is still wrong is its own fault."""
        self.gate.report("check", f"once more {how}")
        self.checks.clear()
        self._start_candidate(built, refuse_framework=False, role="replay")
        self._check_all(opened, role="replay")

    def _label_framework(self, found: tuple[Reason, ...], refused: tuple[str, ...]) -> None:
        """Note what a candidate, which is right with the framework, did without it."""
        if found:
            reason = self._wrapper_reason(found[0])
            self.notes.append(f"{reason.code}: {reason.message}")
        else:
            called = findings.clean(", ".join(refused), 300)
            message = f"the framework is called, and does without where it refuses: {called}"
            self.notes.append(f"{Code.WRAPPER_FALLBACK}: {message}")

    def _wrapper_reason(self, found: Reason) -> Reason:
        code = Code.WRAPPER_FALLBACK if self.audit.fallback else Code.WRAPPER_FRAMEWORK
        detail = "its output is wrong without the framework"
        if found.code is Code.EXCEPTION:
            detail = found.message.strip().rpartition("\n")[2]
        return Reason(code=code, message=f"the framework does the work: {findings.clean(detail, 300)}")

    def _check_all(self, opened: CaseOpened, role: str = "candidate", *, again: bool = False) -> None:
        failures: list[Reason] = []
        for index, planned in enumerate(opened.checks):
            self._give_way()
            self.gate.report("check", planned.input_distribution, index, len(opened.checks))
            answer = self._check(index, role, again=again)
            self.checks += answer.checks
            failures += answer.reasons
        if failures:
            raise Rejected(*sorted(failures, key=lambda reason: SEVERITY.get(reason.code, 0), reverse=True))

    def _give_way(self) -> None:
        """Let a timing of another judge on this GPU go first, while nothing of ours runs there."""
        if self.lock is not None and self.gate.host.device != "cpu":
            self.lock.give_way()

    def _checks_again(self) -> bool:
        """Whether checks come among and after the timing."""
        return self.screen_against is None and {"verify", "fresh_inputs"} <= self.settings.defences

    def _check_again(self, opened: CaseOpened) -> None:
        """Check the process that was timed once more: one that has counted its calls may know that checks are over.

        Most checks have other inputs by then: it may know those that it has seen. A screening leaves it out: the best
        of those is judged in full.
        """
        if not self._checks_again():
            return
        before, self.checks = self.checks, []
        try:
            with self.locked(alone=False) as self.lock:
                self._check_all(opened, again=True)
        except Rejected as rejected:
            later = "right before it was timed, and afterwards"
            raise Rejected(
                *(msgspec.structs.replace(reason, message=f"{later}: {reason.message}") for reason in rejected.reasons)
            ) from rejected
        self.checks = before

    def _check(self, index: int, role: str = "candidate", *, again: bool = False) -> Checked:
        deadline = self.settings.run_timeout_s
        request = CheckRequest(
            role=role, index=index, deadline_s=deadline, defences=self.settings.defences, again=again
        )  # fmt: skip
        answer = self.processes.ask_oracle(request, Checked, 2 * deadline + CALL_SLACK_S)
        if isinstance(answer, WorkerFailure):
            raise self.failed(answer)
        self.end_a_flood()
        return answer

    def _sanitize(self, built: Built) -> None:
        """Have the tools of compute-sanitizer that were asked for watch the kernel."""
        tools = self.settings.sanitize
        if not tools:
            return
        found = sanitize(
            self.job(self.source, built), tools, environment=self.gate.host.environment,
            report=lambda tool, number: self.gate.report("sanitize", tool, number, len(tools)),
        )  # fmt: skip
        self.sanitizer = found.by_tool
        self.notes += found.notes
        if found.reasons:
            raise Rejected(*found.reasons)

    def _stock(self) -> None:
        """Have the oracle make what timing needs, now that there is a kernel to be timed."""
        self.gate.report("oracle", "making new problems for timing")
        with self.waiting_for("oracle"):
            self.processes.ask_oracle(Stock(checks=self._checks_again()), Attached, ORACLE_DEADLINE_S)

    def _look_for_libraries(self) -> None:
        ended = self.workers["candidate"].end()
        if ended.generated_bytes:
            self.notes.append(f"the kernel ran with {ended.generated_bytes >> 10} KiB of code that it generated itself")
        loaded = tuple(sorted(self.libraries | set(ended.libraries)))
        self.object_to_libraries(findings.library_reason(loaded))


LACKS_FRAMEWORK = frozenset({
    Code.EXCEPTION, Code.RETURNED_ERROR, Code.CRASH, Code.EXITED, Code.MISMATCH, Code.UNWRITTEN, Code.NON_FINITE,
})  # fmt: skip
"""How a candidate may fail because the framework refuses to compute."""
