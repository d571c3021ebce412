"""What the judgements of a gate share, and what the stages of one judgement share."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from pytest_klineage.errors import DeviceOutOfMemory, HarnessError, MissingDependency, UsageError
from pytest_klineage.gate import findings
from pytest_klineage.gate.host.cpu import usable_cores
from pytest_klineage.gate.host.hosts import host_for
from pytest_klineage.gate.host.locks import DeviceLock, machine_lock
from pytest_klineage.gate.rejection import Rejected
from pytest_klineage.gate.settings import GateSettings, for_screening
from pytest_klineage.gate.shared_reference import SharedReference
from pytest_klineage.gate.stages.audit import Audit
from pytest_klineage.gate.supervise import CALL_SLACK_S, Processes, Worker
from pytest_klineage.gate.timing.policy import SIDES
from pytest_klineage.operators import operator_of
from pytest_klineage.records import (
    Build,
    Check,
    Code,
    Floor,
    KernelCase,
    KernelSource,
    KernelTime,
    LibraryPolicy,
    Machine,
    Reason,
    Surface,
    Timing,
    Verdict,
)
from pytest_klineage.records.messages import (
    Attach,
    Attached,
    CaseOpened,
    Detach,
    Job,
    WorkerFailure,
)
from pytest_klineage.references import UnsupportedCase, reference_of
from pytest_klineage.references.device import chosen_variant
from pytest_klineage.references.functions import COMPILED, FUNCTION
from pytest_klineage.references.refusals import refusal_in
from pytest_klineage.results.runs import now
from pytest_klineage.surfaces import Built, surface_backend

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


class GateContext:
    """What the judgements of one gate share: settings, the secret of all random inputs, and the processes."""

    def __init__(self, platform: str, settings: GateSettings, report: Callable[[Progress], None] | None) -> None:
        self.platform, self.settings, self._report = platform, settings, report
        self.threads = settings.threads or usable_cores()
        self.secret = settings.seed if settings.seed is not None else secrets.token_hex(16)
        self.host = host_for(platform, settings.stage)
        self.binding = self.host.binding(self.threads)
        self.processes = Processes(
            self.threads, {**self.host.environment, **self._reference_caches()}, self.binding.environment
        )
        self.software: dict[str, str] = {}
        """Versions that the workers have reported."""
        self.shared = SharedReference(self.processes)

    def _reference_caches(self) -> dict[str, str]:
        """Where references keep what they have compiled and tuned; candidates do not learn of it."""
        folder = self.settings.cache_dir
        inductor = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "reference-inductor")}
        if self.host.device == "cpu":
            return inductor
        return {
            **inductor,
            "TRITON_CACHE_DIR": str(folder / "reference-triton"),
            "FLASHINFER_WORKSPACE_BASE": str(folder / "reference-flashinfer"),
            "FLAGGEMS_CACHE_DIR": str(folder / "reference-flaggems"),
        }

    def flush_bytes(self, case: KernelCase) -> int:
        """Bytes to write between two timed calls."""
        asked = self.settings.flush_bytes
        return self.host.flush_bytes(operator_of(case).signature(case).num_bytes) if asked is None else asked

    def machine(self) -> Machine:
        """The record of this machine."""
        return self.host.machine(self.software, self.threads)

    def report(self, stage: str, message: str, done: int = 0, total: int = 0) -> None:
        """Report progress to the callback, if any."""
        if self._report is not None:
            self._report(Progress(stage=stage, message=message, done=done, total=total))


class JudgementContext:
    """What the stages of one judgement share: its case, its kernel, its processes, and what has been found."""

    def __init__(
        self, gate: GateContext, case: KernelCase, source: KernelSource, reference_source: KernelSource | None,
        precision: float | None = None, screen_against: float | None = None,
    ) -> None:  # fmt: skip
        self.gate, self.case, self.source, self.reference_source = gate, case, source, reference_source
        self.settings, self.processes = gate.settings, gate.processes
        if precision is not None and precision < self.settings.precision:
            self.settings = msgspec.structs.replace(self.settings, precision=precision)
        self.screen_against = screen_against
        if screen_against is not None:
            self.settings = for_screening(self.settings)
        self.flush_bytes = gate.flush_bytes(case)
        self.build: Build | None = None
        self.audit = Audit()
        self.checks: list[Check] = []
        self.timings: list[Timing] = []
        self.floor: Floor | None = None
        self.notes: list[str] = []
        self.log = ""
        self.containment: tuple[str, ...] = ()
        self.reference_facts: dict[str, str] = {}
        self.reference_said: dict[str, str] = {}
        self.reference_traced = False
        self.reference_ran = False
        """Whether it was timed once: what fails afterwards is no refusal."""
        self.workers: dict[str, Worker] = {}
        self.jobs: dict[str, tuple[Job, str]] = {}
        """What every worker was started with: its job and the template it was forked from."""
        self.libraries: set[str] = set()
        """Libraries that processes of the candidate which have ended had loaded."""
        self.opened: CaseOpened | None = None
        self.timed_s = 0.0
        self.waits_s: dict[str, float] = {}
        self.kernels: dict[str, tuple[KernelTime, ...]] = {}
        self.sanitizer: dict[str, str] = {}

    def shares_reference(self) -> bool:
        """Whether this is a screening against a library: such share what they know of it, and its process."""
        return self.screen_against is not None and self.reference_source is None

    def note_reference(self, said: dict[str, str]) -> None:
        """Keep what the reference says of itself; of a comparison of its variants, for screenings of this case too."""
        before, self.reference_said = self.chosen_before(), said
        self.reference_facts |= before | said
        if not before:
            self.gate.shared.note(self.case, said)

    def chosen_before(self) -> dict[str, str]:
        """In a screening, what the reference said when its variants were last compared on this case; else nothing.

        What a screening keeps as best is judged in full, where they are compared again.
        """
        return self.gate.shared.chosen(self.case) if self.screen_against is not None else {}

    def take_kept(self, job: Job, preload: str) -> dict[str, str] | None:
        """Go on with the last screening's reference; what it said, or None where there is none with this job."""
        kept = self.gate.shared.take(job) if self.shares_reference() else None
        if kept is None:
            return None
        self.workers["reference"], self.jobs["reference"] = kept.worker, (job, preload)
        return kept.said

    def named_before(self) -> tuple[KernelTime, ...]:
        """In a screening, what the device executes for this reference, once that was traced; else nothing."""
        return self.gate.shared.kernels(self.case, self.reference_facts) if self.shares_reference() else ()

    def name_reference(self, kernels: tuple[KernelTime, ...]) -> None:
        """Keep what was traced. A process that was traced is not kept: its launches may take longer from then on."""
        self.kernels["reference"], self.reference_traced = kernels, True
        if self.reference_source is None:
            self.gate.shared.name(self.case, self.reference_facts, kernels)

    def discard(self) -> None:
        """Forget this judgement's workers, whose processes are gone."""
        self.gate.shared.discard()
        for worker in self.workers.values():
            worker.discard()

    def close(self) -> None:
        """End this judgement's workers; the reference of a screening goes on with the next one."""
        worker = self.workers.get("reference")
        if worker is not None and worker.ended is None and self.shares_reference() and not self.reference_traced:
            del self.workers["reference"]
            self.gate.shared.keep(worker, self.jobs["reference"][0], self.reference_said)
        for role in self.workers:
            self.processes.ask_oracle(Detach(role=role), Attached, CALL_SLACK_S)
        for worker in self.workers.values():
            with contextlib.suppress(HarnessError):
                worker.end()

    def preload(self, source: KernelSource) -> str:
        return self.gate.host.preload(needs_torch=surface_backend(source.surface.value).needs_torch)

    def job(self, source: KernelSource, built: Built, *, refuse_framework: bool = False) -> Job:
        """What a worker of this case is started with."""
        importable = tuple(path for path in sys.path if path and os.path.isdir(path)) if source.module else ()
        return Job(
            surface=source.surface.value, artifact=str(built.artifact), entry=source.entry, module=source.module,
            case=self.case, platform=self.gate.platform, read_paths=importable, threads=self.gate.threads,
            sandbox="sandbox" in self.settings.defences, refuse_framework=refuse_framework,
            refuse_copies=refuse_framework and self.opened is not None and self.opened.only_moves,
            flush_bytes=self.flush_bytes, allow_processes=surface_backend(source.surface.value).allow_processes,
            processors=self.gate.binding.processors, own_files_only=self._own_files_only(source),
        )  # fmt: skip

    def _own_files_only(self, source: KernelSource) -> bool:
        """Whether the kernel may read no library of the machine."""
        forbidden = "own_kernel" in self.settings.defences and self.case.library is LibraryPolicy.FORBID
        return forbidden and source.surface is Surface.CPP

    def start(self, role: str, job: Job, preload: str) -> Attached:
        """Start a worker and wait for it. Raises Rejected when the candidate cannot be loaded."""
        self.gate.report("start", f"starting the {role}")
        self._launch(role, job, preload)
        return self._attach(role)

    def _launch(self, role: str, job: Job, preload: str) -> None:
        """Start a worker's process, which loads its kernel without being asked."""
        self.jobs[role] = job, preload
        with self.waiting_for(role):
            self.workers[role] = Worker(self.processes.template(preload), job)

    def _attach(self, role: str) -> Attached:
        """Wait until a worker has loaded its kernel, and have the oracle take it over."""
        worker = self.workers[role]
        fds = [worker.oracle_end.fileno()]
        # A reference may tune itself when it starts: FLA takes half a minute.
        tunes = self.gate.host.device != "cpu" or self.case.reference == COMPILED
        slow = role == "reference" and tunes
        deadline = max(self.settings.load_timeout_s, REFERENCE_LOAD_S) if slow else self.settings.load_timeout_s
        with self.waiting_for(role):
            request = Attach(
                role=role, deadline_s=deadline, read_only=self.cannot_write(role), unreadable=self.cannot_read_on(role)
            )  # fmt: skip
            answer = self.processes.ask_oracle(request, Attached, deadline + CALL_SLACK_S, fds)
        worker.oracle_end.close()
        if isinstance(answer, WorkerFailure):
            raise self.failed(answer)
        return answer

    def cannot_write(self, role: str) -> bool:
        """Whether a worker's inputs are to be mapped for reading alone, where they can be: those of a native candidate
        on a CPU."""
        native = role == "candidate" and self.jobs[role][0].surface == Surface.CPP
        return native and "input_integrity" in self.settings.defences

    def cannot_read_on(self, role: str) -> bool:
        """Whether a worker is not to read what lies behind its inputs: a native candidate on a CPU."""
        native = role != "reference" and self.jobs[role][0].surface == Surface.CPP
        return native and "guard_bands" in self.settings.defences

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Count the seconds that this takes: for the oracle, reference, lock, or a process of the candidate."""
        what, started = what if what in ("oracle", "reference", "lock") else "candidate", time.monotonic()
        try:
            yield
        finally:
            self.waits_s[what] = self.waits_s.get(what, 0.0) + time.monotonic() - started

    def locked(self, *, alone: bool) -> contextlib.AbstractContextManager[DeviceLock]:
        """The device's lock, held alone or together with others."""
        return machine_lock(self.gate.host.lock, alone=alone, waiting=partial(self.waiting_for, "lock"))

    def restart(self) -> None:
        """Start both sides again, in new processes that load at the same time, with the jobs they had.

        Both have ended before either starts, and who starts first is drawn: a process is given the pages of memory
        that were freed last, and would get its own again, with what they do to its times, at every start. The reference
        keeps the variant that it has chosen.
        """
        for role in SIDES:
            # Ended first: after a request to stop, what it had loaded could no longer be seen.
            ended = self.workers[role].end()
            self.processes.ask_oracle(Detach(role=role), Attached, CALL_SLACK_S)
            if role == "candidate":
                self.libraries |= set(ended.libraries)
                self.log = self.log or findings.clean(self.workers[role].log.text())
        drawn = random.SystemRandom().sample(SIDES, len(SIDES))
        for role in drawn:
            job, preload = self.jobs[role]
            if role == "reference":
                job = msgspec.structs.replace(job, **chosen_variant(self.reference_facts))
            self._launch(role, job, preload)
        for role in drawn:
            self._attach(role)

    def memory_reason(self) -> Reason | None:
        """After a GPU ran out of memory: a reason when the candidate had taken it. Ends the candidate.

        More than half of the GPU comes free then, so no other process was the cause.
        """
        worker, before = self.workers.get("candidate"), self.gate.host.memory()
        if worker is None or before is None:
            return None
        with contextlib.suppress(HarnessError):
            worker.end()
        after = self.gate.host.memory()
        taken = after.free_bytes - before.free_bytes if after is not None else 0
        if taken <= before.total_bytes // 2:
            return None
        message = f"the kernel held {taken / 2**30:.1f} GiB of the GPU's memory; nothing was left to check it with"
        return Reason(code=Code.OUT_OF_MEMORY, message=message, evidence={"bytes": taken})

    def object_to_libraries(self, reason: Reason | None) -> None:
        """Reject a kernel for its use of libraries, or note it, as the case says."""
        if reason is None or "own_kernel" not in self.settings.defences or self.case.library is LibraryPolicy.ALLOW:
            return
        if self.case.library is LibraryPolicy.FORBID:
            raise Rejected(reason)
        self.notes.append(f"{reason.code}: {reason.message}")

    def end_a_flood(self) -> None:
        """Reject a candidate that prints without end, right or wrong."""
        if self.workers["candidate"].log.flooded:
            raise self.failed(WorkerFailure(role="candidate", reasons=()))

    def failed(self, problem: WorkerFailure) -> Rejected:
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
            if reasons and reasons[0].code is Code.OUT_OF_MEMORY and self.gate.host.device != "cpu":
                raise DeviceOutOfMemory(f"the reference {self.case.reference} found no memory on the GPU: {cause}")
            if reasons and reasons[0].code is Code.EXCEPTION and (why := self._refusal(cause)):
                raise UnsupportedCase.of(self.case.reference, self.case, self.gate.platform, why)
            if FUNCTION.fullmatch(self.case.reference):
                raise UsageError(f"{findings.raised_at(cause)} (the reference {self.case.reference})")
            raise HarnessError(f"the reference {self.case.reference} failed: {cause} {text}".strip())
        self.log = text
        return Rejected(*(Reason(code=r.code, message=findings.clean(r.message), evidence=r.evidence) for r in reasons))

    def _refusal(self, cause: str) -> str:
        """What the library said, on one bounded line, where it refused the case. A CPU has no trial beforehand."""
        if self.reference_source is not None or self.reference_ran:
            return ""
        why = refusal_in(cause, tried=self.gate.host.device != "cpu")
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
            machine=self.gate.machine(),
            build=self.build,
            checks=tuple(self.checks),
            timing=self.timings[0] if self.timings else None,
            floor=self.floor,
            other_timings=tuple(self.timings[1:]),
            reference=self.reference_facts,
            kernels=self.kernels.get("candidate", ()),
            reference_kernels=self.kernels.get("reference", ()),
            sanitizer=self.sanitizer,
            containment=self.containment,
            notes=tuple(self.notes),
            log=self.log,
            overhead_s=overhead_s,
            waits_s={what: round(seconds, 3) for what, seconds in self.waits_s.items()},
            judged_at=now(),
            screened=self.screen_against if self.timings else None,
        )
