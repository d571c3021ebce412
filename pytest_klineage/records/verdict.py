"""Verdict: what the gate found about one kernel, with its reasons, its checks and every raw sample."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pytest_klineage.records.case import KernelCase
from pytest_klineage.records.platform import Machine

SCHEMA_VERSION = 1


class Status(StrEnum):
    """The outcome of a judgement. Every reason code begins with its status."""

    ACCEPTED = "accepted"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"
    WRONG_VALUE = "wrong_value"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    CHEAT = "cheat"
    WRAPPER = "wrapper"
    BUILD_ERROR = "build_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    SKIPPED = "skipped"


class Code(StrEnum):
    """Every reason the gate can give. `docs/reference/reason-codes.md` explains each and says what to do next."""

    ACCEPTED_FASTER = "accepted.faster"
    ACCEPTED_SAME = "accepted.same"
    ACCEPTED_MEETS_TARGET = "accepted.meets_target"
    SLOWER_THAN_REQUIRED = "slower.than_required"
    INCONCLUSIVE_INTERVAL = "inconclusive.interval"
    INCONCLUSIVE_BUSY = "inconclusive.busy_machine"
    MISMATCH = "wrong_value.mismatch"
    NON_FINITE = "wrong_value.non_finite"
    UNWRITTEN = "wrong_value.unwritten"
    INPUT_MUTATED = "wrong_value.input_mutated"
    OUT_OF_BOUNDS = "wrong_value.out_of_bounds"
    ALIASED_OUTPUT = "wrong_value.aliased_output"
    OUTPUT_SHAPE = "wrong_shape.shape"
    OUTPUT_COUNT = "wrong_shape.count"
    OUTPUT_STRIDES = "wrong_shape.strides"
    OUTPUT_DTYPE = "wrong_dtype.dtype"
    REPLAY = "cheat.replay"
    LATE_WORK = "cheat.late_work"
    CLOCK = "cheat.clock"
    TOO_FAST = "cheat.too_fast"
    FAKE_TENSOR = "cheat.fake_tensor"
    EARLY_EXIT = "cheat.early_exit"
    FORGED_REPLY = "cheat.forged_reply"
    TAMPERING = "cheat.tampering"
    WRAPPER_FRAMEWORK = "wrapper.framework"
    WRAPPER_FALLBACK = "wrapper.fallback"
    WRAPPER_LIBRARY = "wrapper.library"
    COMPILE = "build_error.compile"
    FLAG_REFUSED = "build_error.flag_refused"
    SOURCE_MISSING = "build_error.source_missing"
    ENTRY_MISSING = "build_error.entry_missing"
    BUILD_IO = "build_error.io"
    EXCEPTION = "runtime_error.exception"
    RETURNED_ERROR = "runtime_error.returned_error"
    CRASH = "runtime_error.crash"
    EXITED = "runtime_error.exited"
    LOG_FLOOD = "runtime_error.log_flood"
    OUT_OF_MEMORY = "runtime_error.out_of_memory"
    TIMEOUT_BUILD = "timeout.build"
    TIMEOUT_LOAD = "timeout.load"
    TIMEOUT_RUN = "timeout.run"
    SKIPPED_PLATFORM = "skipped.platform"
    SKIPPED_DEPENDENCY = "skipped.missing_dependency"
    SKIPPED_NOT_SCORABLE = "skipped.not_scorable"

    @property
    def status(self) -> Status:
        return Status(self.value.partition(".")[0])


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One finding: its code, a sentence for people, and the figures behind it."""

    code: Code
    message: str
    evidence: dict[str, float | int | str | bool] = {}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one output of one repetition with the oracle."""

    regime: str
    """Input distribution, or "timed" for repetitions inside timed blocks."""
    output: str
    error: float
    """Largest error, in units of the honest rounding error (see operators/tolerance.py)."""
    bound: float
    """What `error` may be at most."""
    passed: bool
    shape: dict[str, int] = {}
    """The shape, when it is one of the case's further shapes."""


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """How the source became something that can be loaded."""

    digest: str
    """Content digest of source, flags, ABI header and toolchain."""
    command: str = ""
    toolchain: str = ""
    seconds: float = 0.0
    """Wall time of the build; 0 when it came from the cache."""
    cached: bool = False
    log: str = ""
    """The compiler's own messages, bounded."""


class Interval(msgspec.Struct, frozen=True):
    """An estimate with a confidence interval."""

    estimate: float
    low: float
    high: float
    confidence: float = 0.95

    @property
    def half_width(self) -> float:
        """Half of the interval's width relative to the estimate."""
        return (self.high - self.low) / (2 * self.estimate) if self.estimate else float("inf")


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Every raw sample of one timing policy, and the speedup with its interval."""

    policy: str
    reference_ms: float
    """Median over `reference_samples_ms`."""
    candidate_ms: float
    """Median over `candidate_samples_ms`."""
    speedup: Interval
    """reference / candidate; above 1 the candidate is faster."""
    reference_samples_ms: tuple[float, ...]
    candidate_samples_ms: tuple[float, ...]
    """In `paired` the n-th samples of both belong together."""
    warmup: int
    """Effective warm-up calls of each side before the first sample."""
    flush_bytes: int
    """Bytes written between calls to empty the caches."""
    statistic: str
    """How estimate and interval were computed."""
    wall_gap_ms: float = 0.0
    """Median of the trusted clock minus the worker's clock, candidate side."""
    reference_wall_gap_ms: float = 0.0
    foreign_load: float = 0.0
    """Share of the machine's CPU time that other processes used meanwhile."""
    seconds: float = 0.0
    """Wall time of the timed blocks, including preparation of inputs between calls."""
    stopped: str = ""
    """Why sampling ended: "precise", "time limit" or "fixed count"."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's answer about one kernel on one case."""

    case: KernelCase
    status: Status
    reasons: tuple[Reason, ...]
    """The first is the one that decided."""
    surface: str = ""
    source_digest: str = ""
    label: str = ""
    """What people call the kernel."""
    machine: Machine | None = None
    build: Build | None = None
    checks: tuple[Check, ...] = ()
    timing: Timing | None = None
    other_timings: tuple[Timing, ...] = ()
    """Further policies, when asked for."""
    reference: dict[str, str] = {}
    """What the reference was: label, versions, backend flags."""
    containment: tuple[str, ...] = ()
    """Sandbox mechanisms that were active in the candidate's process."""
    notes: tuple[str, ...] = ()
    """Hints of the static audit and labels that decided nothing."""
    log: str = ""
    """What the candidate printed, bounded and cleaned of control characters."""
    overhead_s: float = 0.0
    """Wall time of the judgement outside of timed blocks and the build."""
    judged_at: str = ""
    """UTC, ISO 8601."""
    schema_version: int = SCHEMA_VERSION

    @property
    def code(self) -> Code:
        """The reason that decided."""
        return self.reasons[0].code

    @property
    def ok(self) -> bool:
        """True unless the kernel is wrong, slower, a cheat, or did not run."""
        return self.status in (Status.ACCEPTED, Status.INCONCLUSIVE)

    @property
    def scored(self) -> bool:
        """True when the kernel was right and really timed, so that its speedup counts."""
        return self.timing is not None and self.status in (Status.ACCEPTED, Status.SLOWER, Status.INCONCLUSIVE)


def speedup(reference_ms: float, candidate_ms: float) -> float:
    """Reference time over candidate time: the one definition in this package. Above 1 the candidate is faster."""
    return reference_ms / candidate_ms
