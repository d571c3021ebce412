"""The judge: the only way a kernel is accepted. It computes the verdict from raw samples and the oracle's comparisons.

It never imports torch or a candidate. A missing or malformed answer is a failure of the kernel; a fault of ours is an
exception (errors.HarnessError), never a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from pytest_klineage.errors import DeviceOutOfMemory, MissingDependency, UsageError
from pytest_klineage.gate.context import GateContext, Progress
from pytest_klineage.gate.host.platforms import resolve_platform
from pytest_klineage.gate.judgement import Judgement
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.gate.timing.policy import POLICIES, Paired
from pytest_klineage.records import Code, KernelCase, KernelSource, Machine, Reason, Verdict, covers
from pytest_klineage.references import UnsupportedCase, alternatives, reference_of
from pytest_klineage.results.runs import now
from pytest_klineage.surfaces import surface_backend


class Gate(AbstractContextManager["Gate"]):
    """Judges kernels on one platform. Keeps the oracle and the templates between judgements; close it when done."""

    def __init__(
        self, platform: str, settings: GateSettings | None = None, progress: Callable[[Progress], None] | None = None
    ) -> None:
        canonical = resolve_platform(platform)
        self.settings = settings or GateSettings()
        for policy in (self.settings.policy, *self.settings.also_policies):
            if canonical == "cpu" and POLICIES[policy].mode == "graph":
                raise UsageError(f"the timing policy {policy} needs a GPU; a CPU has paired, paper and do_bench")
        if canonical != "cpu" and self.settings.flush_bytes == 0:
            raise UsageError("a GPU's L2 is always flushed between two calls; --klineage-flush=0 is for a CPU")
        self.platform = canonical
        self._context = GateContext(canonical, self.settings, progress)

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process. A gate that was closed starts them again when it is used."""
        self._context.shared.discard()
        self._context.processes.close()

    def machine(self) -> Machine:
        """The record of this machine, with what the workers have reported so far."""
        return self._context.machine()

    def judge(
        self,
        case: KernelCase,
        source: KernelSource,
        *,
        reference_source: KernelSource | None = None,
        platforms: tuple[str, ...] = (),
        precision: float | None = None,
        screen_against: float | None = None,
    ) -> Verdict:
        """Build, check and time one kernel; in the compile stage build it only, without its reference.

        `reference_source` stands in for the case's reference, for A/A and A/B. `platforms` are those that the kernel
        was written for, when that are not all that its surface runs on. `precision` is a half-width at which sampling
        stops for this kernel, where the settings allow a wider one. `screen_against` is the speedup of the best kernel
        so far: timing then ends once its interval excludes that, or after a second; see `Verdict.screened`.

        Raises UsageError for a case that cannot be, HarnessError when our own machinery fails. What this machine lacks,
        and what the case's reference does not take, makes the verdict "skipped".
        """
        if screen_against is not None and not isinstance(POLICIES[self.settings.policy], Paired):
            raise UsageError(f"the timing policy {self.settings.policy} takes a fixed count; screening needs paired")
        if reference_source is None and self.settings.stage == "all":
            vendor = reference_of(case)
            if case.operator not in vendor.operators():
                raise UsageError(
                    f"reference {case.reference!r} has no {case.operator}; it has {', '.join(vendor.operators())}"
                )
        if elsewhere := self._why_elsewhere(source, platforms):
            return self._skipped(case, source, Reason(code=Code.SKIPPED_PLATFORM, message=elsewhere))
        if reference_source is None and self.settings.stage == "all":
            try:
                vendor.check(case, self.platform)
            except UnsupportedCase as error:
                return self._skipped(case, source, self._skip_reason(case, error))
        started = time.monotonic()
        judgement = Judgement(self._context, case, source, reference_source, precision, screen_against)
        try:
            reasons = judgement.run()
            judgement.close()
        except (MissingDependency, DeviceOutOfMemory, UnsupportedCase) as error:
            taken = judgement.memory_reason() if isinstance(error, DeviceOutOfMemory) else None
            self._context.processes.abort()
            judgement.discard()
            if taken is not None:
                return judgement.verdict((taken,), overhead_s=time.monotonic() - started)
            return self._skipped(case, source, self._skip_reason(case, error))
        except BaseException:
            # A process may still answer an earlier question: start new ones.
            self._context.processes.abort()
            judgement.discard()
            raise
        spent = judgement.timed_s + (judgement.build.seconds if judgement.build else 0.0)
        return judgement.verdict(reasons, overhead_s=max(0.0, time.monotonic() - started - spent))

    def _why_elsewhere(self, source: KernelSource, platforms: tuple[str, ...]) -> str:
        """Why a kernel is not for this platform; empty where it is."""
        backend = surface_backend(source.surface.value)
        if not covers(backend.platforms, self.platform):
            return (
                f"a {source.surface} kernel does not run on {self.platform}, only on {', '.join(backend.platforms)}; "
                f"--klineage-platform {backend.platforms[0]} judges it there"
            )
        if platforms and self.platform not in platforms:
            return f"the kernel was written for {', '.join(platforms)}, not for {self.platform}"
        return ""

    def _skip_reason(self, case: KernelCase, error: Exception) -> Reason:
        """Why a case is not judged, with the next step."""
        if isinstance(error, MissingDependency):
            return Reason(code=Code.SKIPPED_DEPENDENCY, message=str(error))
        if not isinstance(error, UnsupportedCase):
            return Reason(code=Code.SKIPPED_MEMORY, message=str(error))
        others = alternatives(case, self.platform)
        step = f"choose another ref=: {', '.join(others)}" if others else (
            f"no other reference takes it on {self.platform}: choose another case, or compare with a kernel (against=)"
        )  # fmt: skip
        return Reason(code=Code.SKIPPED_REFERENCE, message=f"{error}; {step}")

    def _skipped(self, case: KernelCase, source: KernelSource, reason: Reason) -> Verdict:
        return Verdict(
            case=case, status=reason.code.status, reasons=(reason,), surface=source.surface.value,
            source_digest=source.digest, label=source.label, machine=self.machine(), judged_at=now(),
        )  # fmt: skip
