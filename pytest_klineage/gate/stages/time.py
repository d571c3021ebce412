"""The timed part of a judgement: policies under the machine's lock, distrust of their times, attribution on a GPU."""

from __future__ import annotations

import time
from contextlib import closing
from statistics import median

import msgspec

from pytest_klineage.errors import HarnessError
from pytest_klineage.gate import findings
from pytest_klineage.gate.context import JudgementContext
from pytest_klineage.gate.host.hosts import DeviceMonitor, Environment
from pytest_klineage.gate.host.locks import DeviceLock
from pytest_klineage.gate.rejection import Rejected
from pytest_klineage.gate.stages import attribute as attribution
from pytest_klineage.gate.supervise import CALL_SLACK_S
from pytest_klineage.gate.timing import stability
from pytest_klineage.gate.timing.policy import (
    POLICIES,
    Measurement,
    Paired,
    Policy,
    Samples,
    TimeLimit,
    screening,
)
from pytest_klineage.gate.timing.restarts import restart_policy_for
from pytest_klineage.records import Interval, Reason, Timing
from pytest_klineage.records.messages import CaseOpened, Profiled, ProfileRequest, Timed, TimeRequest, WorkerFailure
from pytest_klineage.surfaces import surface_backend

PROFILE_DEADLINE_S = 90.0
"""Starting the device's profiler in a process takes seconds, once."""


class TimedStage:
    """Times one judgement's candidate against its reference."""

    def __init__(self, context: JudgementContext) -> None:
        self.context = context
        self.monitor: DeviceMonitor | None = None
        self.lock: DeviceLock | None = None

    def run(self, opened: CaseOpened) -> Reason:
        """All timing policies in turn. Returns the reason that the first of them gives."""
        decisive: Reason | None = None
        for name in (self.context.settings.policy, *self.context.settings.also_policies):
            host = self.context.gate.host
            self.context.gate.report("time", name)
            with self.context.locked(alone=True) as self.lock, closing(host.monitor()) as self.monitor:
                started = time.monotonic()
                outcome = self._measure(name, opened)
                seconds, seen = time.monotonic() - started, self.monitor.finish()
            self.context.timed_s += seconds
            self.context.timings.append(self._timing(name, outcome, seconds, seen))
            self._distrust(name, outcome, opened)
            if decisive is None:
                self.context.notes += seen.notes()
                decisive = seen.judge(self._timing_reason(outcome, opened), self.context.settings.busy_limit)
        if decisive is None:
            raise HarnessError("no timing policy ran")
        self._note_floor(opened)
        return decisive

    def _note_floor(self, opened: CaseOpened) -> None:
        """What the times are to be seen beside."""
        context, host = self.context, self.context.gate.host
        peaks = host.peaks(context.gate.threads, context.case.dtype)
        context.floor = findings.floor_of(opened.flops, opened.min_bytes, peaks, host.product)
        context.notes += host.notes()

    def _timing_reason(self, outcome: Measurement, opened: CaseOpened) -> Reason:
        """What the interval says, and whether the times allow it."""
        case, limit = self.context.case, self.context.settings.spread_limit
        taken = outcome.samples
        outcome = msgspec.structs.replace(outcome, samples=self._corrected(outcome.samples))
        reason = findings.timing_reason(case, outcome, self.context.settings.margin)
        if self._is_mixed(opened):
            reason = findings.compared_reason(reason, outcome)
        if "two_clocks" in self.context.settings.defences and self.context.gate.host.device == "cpu":
            policy = POLICIES[self.context.settings.policy]
            reason = findings.resolved_reason(reason, taken, self._line(), policy)
        return stability.steady_reason(reason, outcome.samples, at_least=case.at_least, line=self._line(), limit=limit)

    def _corrected(self, samples: Samples) -> Samples:
        return findings.overhead_corrected(samples) if "two_clocks" in self.context.settings.defences else samples

    def _measure(self, name: str, opened: CaseOpened) -> Measurement:
        started = time.monotonic()

        def report(done: int, total: int, interval: Interval | None) -> None:
            shown = f"{interval.estimate:.2f}x +-{100 * interval.half_width:.1f} %" if interval else name
            self.context.gate.report("time", shown, done, total)

        restarting_s = 0.0

        def restart() -> None:
            """Start both sides again. On a GPU that takes seconds and is bounded by count, so it is not in the
            limit; what others judge there goes on meanwhile."""
            nonlocal restarting_s
            if self.lock is None or self.context.gate.host.device == "cpu":
                self.context.restart()
                return
            began = time.monotonic()
            with self.lock.together():
                self.context.restart()
            restarting_s += time.monotonic() - began

        policy = screening(POLICIES[name], self.context.screen_against)
        warming_s = 0.0

        def sample(order: tuple[str, ...], reps: int, flush: bool = True) -> Samples:
            """Samples; the time of calls that warm up, which flush nothing, is counted apart."""
            nonlocal warming_s
            began = time.monotonic()
            samples = self._sample(order, reps, policy, flush)
            if not flush:
                warming_s += time.monotonic() - began
            return samples

        limit_s = self.context.settings.time_limit_s

        def spent() -> float:
            """Share of the limit. A kernel that is slow to warm up leaves no less time for its pairs, but it can only
            double what is spent."""
            return (time.monotonic() - started - restarting_s - min(warming_s, limit_s)) / limit_s

        limit = TimeLimit(spent=spent, mixed=self._is_mixed(opened), line=self._line())
        return policy.measure(
            sample,
            self._corrected,
            precision=self.context.settings.precision,
            confidence=self.context.settings.confidence,
            limit=limit,
            report=report,
            process_restart=restart_policy_for(
                self.context.gate.host.device, limit_s, self.context.settings.precision, restart, limit.is_up
            ) if isinstance(policy, Paired) else None,
        )  # fmt: skip

    def _is_mixed(self, opened: CaseOpened) -> bool:
        """Whether pairs on new and on known problems are to be compared; a screening's best is judged again in full."""
        return opened.mixed and self.context.screen_against is None and "fresh_inputs" in self.context.settings.defences

    def _line(self) -> float:
        return self.context.case.at_least * (1 - self.context.settings.margin)

    def _checks_among(self, policy: Policy) -> bool:
        """Whether checks come among the timed calls, as after them: not in a screening, whose best is judged again."""
        full = isinstance(policy, Paired) and self.context.screen_against is None
        return full and {"verify", "fresh_inputs"} <= self.context.settings.defences

    def _sample(self, order: tuple[str, ...], reps: int, policy: Policy, flush: bool) -> Samples:
        deadline = self.context.settings.run_timeout_s
        request = TimeRequest(
            order=order, reps=reps, deadline_s=deadline, defences=self.context.settings.defences, mode=policy.mode,
            flush=flush, checks=self._checks_among(policy),
        )  # fmt: skip
        answer = self.context.processes.ask_oracle(request, Timed, deadline * len(order) * reps + CALL_SLACK_S)
        if isinstance(answer, WorkerFailure):
            raise self.context.failed(answer)
        self.context.end_a_flood()
        self.context.reference_ran |= "reference" in order
        if answer.reasons:
            raise Rejected(*answer.reasons)
        if self.monitor is not None:
            self.monitor.sample()
        samples = Samples(calls_per_sample=answer.calls_per_sample, one_block=answer.one_block)
        for sample in answer.samples:
            own, wall = (
                (samples.candidate, samples.candidate_wall)
                if sample.role == "candidate"
                else (samples.reference, samples.reference_wall)
            )
            own.append(sample.elapsed_ns / 1e6)
            wall.append(sample.wall_ns / 1e6)
            if sample.role == "candidate":
                samples.candidate_waited.append(sample.waited_ns / 1e6)
                samples.novel.append(sample.novel)
        return samples

    def _distrust(self, name: str, outcome: Measurement, opened: CaseOpened) -> None:
        """Reject times that cannot be."""
        reasons, samples = [], outcome.samples
        if "two_clocks" in self.context.settings.defences:
            reasons += [findings.clock_reason(samples), findings.novel_clock_reason(samples)]
            samples = findings.overhead_corrected(samples)
        if "fresh_inputs" in self.context.settings.defences and name == "paired":
            reasons.append(findings.memory_reason(samples))
        if "floor" in self.context.settings.defences:
            reasons.append(self._floor_reason(outcome.samples, opened))
        if found := [reason for reason in reasons if reason is not None]:
            raise Rejected(*found)

    def _floor_reason(self, samples: Samples, opened: CaseOpened) -> Reason | None:
        context = self.context
        peaks = context.gate.host.bound(context.gate.threads, context.case.dtype)
        trusted_ms = median(samples.reference) if context.reference_source is None else None
        return findings.floor_reason(opened, median(samples.candidate), peaks, trusted_ms)

    def _timing(self, name: str, outcome: Measurement, seconds: float, seen: Environment) -> Timing:
        clocks = findings.clocks_of(outcome.samples)
        samples = self._corrected(outcome.samples)
        on_cpu = self.context.gate.host.device == "cpu"
        return Timing(
            policy=name,
            reference_ms=median(samples.reference),
            candidate_ms=median(samples.candidate),
            speedup=outcome.interval,
            reference_samples_ms=tuple(samples.reference),
            candidate_samples_ms=tuple(samples.candidate),
            warmup=outcome.warmup,
            flush_bytes=self.context.flush_bytes,
            statistic=outcome.statistic,
            wall_gap_ms=median(clocks.candidate_gaps),
            reference_wall_gap_ms=median(clocks.reference_gaps),
            reference_overheads_ms=findings.overheads_ms(outcome.samples.reference, samples.reference),
            candidate_overheads_ms=findings.overheads_ms(outcome.samples.candidate, samples.candidate),
            foreign_load=seen.foreign_load,
            threads=self.context.gate.threads if on_cpu else 0,
            binding=self.context.gate.binding.name if on_cpu else "",
            gpu=seen.readings,
            starts=tuple(outcome.samples.starts),
            calls_per_sample=outcome.samples.calls_per_sample,
            seconds=seconds,
            stopped=outcome.stopped,
        )

    def attribute(self) -> None:
        """On a GPU: which kernels were executed, in one more block of each side that looks like a timed one."""
        if self.context.gate.host.device == "cpu":
            return
        self.context.gate.report("time", "naming the kernels that were executed")
        with self.context.locked(alone=True):
            self.context.kernels["reference"] = self.context.named_before()
            if not self.context.kernels["reference"]:
                self.context.name_reference(self._profile("reference").kernels)
            if self.context.reference_source is None and not self.context.kernels["reference"]:
                raise HarnessError(
                    "the device's tracing shows no kernel of the reference either; end other profilers, and look "
                    "whether this container may trace"
                )
            profiled = self._profile("candidate")
        self.context.kernels["candidate"] = profiled.kernels
        if profiled.reasons:
            raise Rejected(*profiled.reasons)
        if "two_clocks" in self.context.settings.defences:
            timed = [timing for timing in self.context.timings if POLICIES[timing.policy].mode != "graph"]
            found = [attribution.hidden_reason(profiled)]
            found += [attribution.watched_reason(profiled, timing.candidate_ms) for timing in timed]
            if reasons := [reason for reason in found if reason is not None]:
                raise Rejected(*reasons)
        symbols = self._own_symbols()
        self.context.object_to_libraries(attribution.foreign_reason(profiled, own_symbols=symbols))

    def _own_symbols(self) -> tuple[str, ...]:
        """Kernels of the candidate's build, where the candidate is native: what else it loads is seen for itself."""
        build, surface = self.context.build, self.context.source.surface
        if build is None or surface_backend(surface.value).needs_torch:
            return ()
        return tuple(kernel.function for kernel in build.kernels)

    def _profile(self, role: str) -> Profiled:
        deadline = self.context.settings.run_timeout_s
        request = ProfileRequest(role=role, deadline_s=deadline, defences=self.context.settings.defences)
        answer = self.context.processes.ask_oracle(request, Profiled, PROFILE_DEADLINE_S + 2 * deadline)
        if isinstance(answer, WorkerFailure):
            raise self.context.failed(answer)
        return answer
