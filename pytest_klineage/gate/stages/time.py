"""The timed part of a judgement: policies under the machine's lock, distrust of their times, attribution on a GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from pytest_klineage.errors import HarnessError
from pytest_klineage.gate import findings
from pytest_klineage.gate.host.hosts import Surroundings, Watch
from pytest_klineage.gate.host.locks import machine_lock
from pytest_klineage.gate.rejection import Rejected
from pytest_klineage.gate.stages import attribute as attribution
from pytest_klineage.gate.timing import stability
from pytest_klineage.gate.timing.policy import POLICIES, Outcome, Paired, Samples
from pytest_klineage.gate.timing.restarts import renewal_for
from pytest_klineage.gate.timing.statistics import median
from pytest_klineage.records import Interval, Reason, Timing
from pytest_klineage.records.messages import Opened, Problem, Profiled, ProfileRequest, Timed, TimeRequest
from pytest_klineage.surfaces import surface_backend

if TYPE_CHECKING:
    from pytest_klineage.gate.judgement import Judgement

PROFILE_DEADLINE_S = 90.0
"""Starting the device's profiler in a process takes seconds, once."""
CALL_SLACK_S = 30.0
"""Time beside the kernel's own deadline that one request to the oracle may take."""


class TimedStage:
    """Times one judgement's candidate against its reference."""

    def __init__(self, judgement: Judgement) -> None:
        self.judgement = judgement
        self.watch: Watch | None = None

    def run(self, opened: Opened) -> Reason:
        """All timing policies in turn. Returns the reason that the first of them gives."""
        decisive: Reason | None = None
        for name in (self.judgement.settings.policy, *self.judgement.settings.also_policies):
            place = self.judgement.bench.place
            with machine_lock(place.lock, alone=True), place.watch() as self.watch:
                started = time.monotonic()
                outcome = self._measure(name)
                seconds, seen = time.monotonic() - started, self.watch.finish()
            self.judgement.timed_s += seconds
            self.judgement.timings.append(self._timing(name, outcome, seconds, seen))
            self._distrust(name, outcome, opened)
            if decisive is None:
                self.judgement.notes += seen.notes()
                decisive = seen.judge(self._timing_reason(outcome), self.judgement.settings.busy_limit)
        if decisive is None:
            raise HarnessError("no timing policy ran")
        return decisive

    def _timing_reason(self, outcome: Outcome) -> Reason:
        """What the interval says, and whether the times allow it."""
        case, limit = self.judgement.case, self.judgement.settings.spread_limit
        outcome = msgspec.structs.replace(outcome, samples=self._corrected(outcome.samples))
        reason = findings.timing_reason(case, outcome, self.judgement.settings.margin)
        return stability.steady_reason(reason, outcome.samples, at_least=case.at_least, limit=limit)

    def _corrected(self, samples: Samples) -> Samples:
        return findings.charged(samples) if "two_clocks" in self.judgement.settings.defences else samples

    def _measure(self, name: str) -> Outcome:
        started = time.monotonic()

        def report(done: int, total: int, interval: Interval | None) -> None:
            shown = f"{interval.estimate:.2f}x +-{100 * interval.half_width:.1f} %" if interval else name
            self.judgement.bench.report("time", shown, done, total)

        renewing_s = 0.0

        def renew() -> None:
            """Start both sides anew. On a GPU that takes seconds and is bounded by count, so it is not in the limit."""
            nonlocal renewing_s
            began = time.monotonic()
            self.judgement.renew()
            if self.judgement.bench.place.device != "cpu":
                renewing_s += time.monotonic() - began

        policy = POLICIES[name]
        warming_s = 0.0

        def sample(order: tuple[str, ...], reps: int, flush: bool = True) -> Samples:
            """Samples; the time of calls that warm up, which flush nothing, is counted apart."""
            nonlocal warming_s
            began = time.monotonic()
            samples = self._sample(order, reps, policy.mode, flush)
            if not flush:
                warming_s += time.monotonic() - began
            return samples

        def out_of_time() -> bool:
            """Whether the limit is reached. A kernel that is slow to warm up leaves no less time for its pairs, but it
            can only double what is spent."""
            limit_s = self.judgement.settings.time_limit_s
            return time.monotonic() - started - renewing_s - min(warming_s, limit_s) > limit_s

        return policy.measure(
            sample,
            self._corrected,
            precision=self.judgement.settings.precision,
            confidence=self.judgement.settings.confidence,
            out_of_time=out_of_time,
            report=report,
            renewal=renewal_for(
                self.judgement.bench.place.device, self.judgement.settings.time_limit_s, renew
            ) if isinstance(policy, Paired) else None,
        )  # fmt: skip

    def _sample(self, order: tuple[str, ...], reps: int, mode: str, flush: bool) -> Samples:
        deadline = self.judgement.settings.run_timeout_s
        request = TimeRequest(
            order=order, reps=reps, deadline_s=deadline, defences=self.judgement.settings.defences, mode=mode,
            flush=flush,
        )  # fmt: skip
        answer = self.judgement.processes.ask_oracle(request, Timed, deadline * len(order) * reps + CALL_SLACK_S)
        if isinstance(answer, Problem):
            raise self.judgement.failed(answer)
        self.judgement.end_a_flood()
        self.judgement.reference_ran |= "reference" in order
        if answer.reasons:
            raise Rejected(*answer.reasons)
        if self.watch is not None:
            self.watch.sample()
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

    def _distrust(self, name: str, outcome: Outcome, opened: Opened) -> None:
        """Reject times that cannot be."""
        reasons, samples = [], outcome.samples
        if "two_clocks" in self.judgement.settings.defences:
            reasons += [findings.clock_reason(samples), findings.novel_clock_reason(samples)]
            samples = findings.charged(samples)
        if "fresh_inputs" in self.judgement.settings.defences and name == "paired":
            reasons.append(findings.memory_reason(samples))
        if "floor" in self.judgement.settings.defences:
            reasons.append(self._floor_reason(outcome.samples, opened))
        if found := [reason for reason in reasons if reason is not None]:
            raise Rejected(*found)

    def _floor_reason(self, samples: Samples, opened: Opened) -> Reason | None:
        judgement = self.judgement
        peaks = judgement.bench.place.peaks(judgement.bench.threads, judgement.case.dtype)
        trusted_ms = median(samples.reference) if judgement.reference_source is None else None
        return findings.floor_reason(opened, median(samples.candidate), peaks, trusted_ms)

    def _timing(self, name: str, outcome: Outcome, seconds: float, seen: Surroundings) -> Timing:
        clocks = findings.clocks_of(outcome.samples)
        samples = self._corrected(outcome.samples)
        on_cpu = self.judgement.bench.place.device == "cpu"
        return Timing(
            policy=name,
            reference_ms=median(samples.reference),
            candidate_ms=median(samples.candidate),
            speedup=outcome.interval,
            reference_samples_ms=tuple(samples.reference),
            candidate_samples_ms=tuple(samples.candidate),
            warmup=outcome.warmup,
            flush_bytes=self.judgement.flush_bytes,
            statistic=outcome.statistic,
            wall_gap_ms=median(clocks.candidate_gaps),
            reference_wall_gap_ms=median(clocks.reference_gaps),
            reference_charges_ms=findings.charges(outcome.samples.reference, samples.reference),
            candidate_charges_ms=findings.charges(outcome.samples.candidate, samples.candidate),
            foreign_load=seen.foreign_load,
            threads=self.judgement.bench.threads if on_cpu else 0,
            binding=self.judgement.bench.binding.name if on_cpu else "",
            gpu=seen.readings,
            starts=tuple(outcome.samples.starts),
            calls_per_sample=outcome.samples.calls_per_sample,
            seconds=seconds,
            stopped=outcome.stopped,
        )

    def attribute(self) -> None:
        """On a GPU: which kernels were executed, in one more block of each side that looks like a timed one."""
        if self.judgement.bench.place.device == "cpu":
            return
        self.judgement.bench.report("time", "naming the kernels that were executed")
        with machine_lock(self.judgement.bench.place.lock, alone=True):
            self.judgement.kernels["reference"] = self._profile("reference").kernels
            if self.judgement.reference_source is None and not self.judgement.kernels["reference"]:
                raise HarnessError(
                    "the device's tracing shows no kernel of the reference either; end other profilers, and look "
                    "whether this container may trace"
                )
            profiled = self._profile("candidate")
        self.judgement.kernels["candidate"] = profiled.kernels
        if profiled.reasons:
            raise Rejected(*profiled.reasons)
        if "two_clocks" in self.judgement.settings.defences:
            timed = [timing for timing in self.judgement.timings if POLICIES[timing.policy].mode != "graph"]
            found = [attribution.hidden_reason(profiled)]
            found += [attribution.watched_reason(profiled, timing.candidate_ms) for timing in timed]
            if reasons := [reason for reason in found if reason is not None]:
                raise Rejected(*reasons)
        symbols = self._own_symbols()
        self.judgement.object_to_libraries(attribution.foreign_reason(profiled, own_symbols=symbols))

    def _own_symbols(self) -> tuple[str, ...]:
        """Kernels of the candidate's build, where the candidate is native: what else it loads is seen for itself."""
        build, surface = self.judgement.build, self.judgement.source.surface
        if build is None or surface_backend(surface.value).needs_torch:
            return ()
        return tuple(kernel.function for kernel in build.kernels)

    def _profile(self, role: str) -> Profiled:
        deadline = self.judgement.settings.run_timeout_s
        request = ProfileRequest(role=role, deadline_s=deadline, defences=self.judgement.settings.defences)
        answer = self.judgement.processes.ask_oracle(request, Profiled, PROFILE_DEADLINE_S + 2 * deadline)
        if isinstance(answer, Problem):
            raise self.judgement.failed(answer)
        return answer
