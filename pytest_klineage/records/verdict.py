"""Verdict: what the gate found about one kernel, with its reasons, its checks and every raw sample."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from pytest_klineage.records.case import KernelCase
from pytest_klineage.records.device import GpuReadings
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
    """Every reason the gate can give. `docs/reference/reason-codes.md` explains each."""

    ACCEPTED_FASTER = "accepted.faster"
    ACCEPTED_SAME = "accepted.same"
    ACCEPTED_MEETS_TARGET = "accepted.meets_target"
    ACCEPTED_BUILT = "accepted.built"
    SLOWER_THAN_REQUIRED = "slower.than_required"
    INCONCLUSIVE_INTERVAL = "inconclusive.interval"
    INCONCLUSIVE_BUSY = "inconclusive.busy_machine"
    INCONCLUSIVE_UNSTABLE = "inconclusive.unstable"
    INCONCLUSIVE_FEW = "inconclusive.few_pairs"
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
    NO_DEVICE_WORK = "cheat.no_device_work"
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
    SPILLS = "build_error.spills"
    MISSING_INSTRUCTION = "build_error.missing_instruction"
    ARTIFACT = "build_error.artifact"
    BUILD_IO = "build_error.io"
    EXCEPTION = "runtime_error.exception"
    RETURNED_ERROR = "runtime_error.returned_error"
    CRASH = "runtime_error.crash"
    EXITED = "runtime_error.exited"
    LOG_FLOOD = "runtime_error.log_flood"
    CUDA_ERROR = "runtime_error.cuda"
    SANITIZER = "runtime_error.sanitizer"
    NOT_CAPTURABLE = "runtime_error.not_capturable"
    OUT_OF_MEMORY = "runtime_error.out_of_memory"
    TIMEOUT_BUILD = "timeout.build"
    TIMEOUT_LOAD = "timeout.load"
    TIMEOUT_RUN = "timeout.run"
    SKIPPED_PLATFORM = "skipped.platform"
    SKIPPED_DEPENDENCY = "skipped.missing_dependency"
    SKIPPED_REFERENCE = "skipped.reference_limits"
    SKIPPED_NOT_SCORABLE = "skipped.not_scorable"
    SKIPPED_MEMORY = "skipped.out_of_memory"

    @property
    def status(self) -> Status:
        return Status(self.value.partition(".")[0])


DISTURBED = frozenset({Code.INCONCLUSIVE_BUSY, Code.INCONCLUSIVE_UNSTABLE, Code.INCONCLUSIVE_FEW})
"""Codes of a timing that says little about the kernel's speed: it is neither pinned nor compared."""
WIDEST = 2.0
"""An interval whose ends differ by more than this factor does not say how fast a kernel is."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One finding: its code, a sentence for people, and its figures."""

    code: Code
    message: str
    evidence: dict[str, float | int | str | bool] = {}


EDGE = 2.0
"""Up to so many times what is allowed, an error is rounding that went too far. What was not computed errs by more."""


def is_at_the_edge(reason: Reason) -> bool:
    """Whether a value was wrong by so little that other inputs of the same kind might have passed."""
    error, bound = reason.evidence.get("error"), reason.evidence.get("bound")
    known = isinstance(error, float | int) and isinstance(bound, float | int)
    return known and bound < error <= EDGE * bound  # type: ignore[operator]  # numbers: said one line above


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one output of one repetition with the oracle."""

    input_distribution: str = msgspec.field(name="regime")
    """Input distribution, or "timed" for repetitions inside timed blocks."""
    output: str
    error: float
    """Largest error, in units of the rounding error (see operators/tolerance.py)."""
    bound: float
    """What `error` may be at most."""
    passed: bool
    shape: dict[str, int] = {}
    """The shape, when it is one of the case's further shapes."""


class KernelResources(msgspec.Struct, frozen=True, kw_only=True):
    """What the compiler gave one GPU kernel: registers, spills, shared memory, and the instructions that matter."""

    name: str
    """The symbol, as the compiler prints it (mangled for C++)."""
    registers: int
    """Per thread."""
    spill_store_bytes: int = 0
    """Per thread; registers that did not fit and went to local memory."""
    spill_load_bytes: int = 0
    stack_bytes: int = 0
    """Local memory per thread: spills, and arrays that are not indexed by constants."""
    static_shared_bytes: int = 0
    """Shared memory per block that the source declares; what a launch adds is not known before it."""
    instructions: tuple[str, ...] | None = None
    """Words of records.case.INSTRUCTIONS found in the machine code, sorted; None when they were not searched."""

    @property
    def function(self) -> str:
        """The function's own name, without namespaces, template arguments and parameters."""
        rest, parts = self.name.removeprefix("_Z").lstrip("NK"), []
        while self.name.startswith("_Z") and (length := re.match(r"L?(\d+)", rest)):
            end = length.end() + int(length[1])
            parts.append(rest[length.end() : end])
            rest = rest[end:]
        return next((part for part in reversed(parts) if not part.startswith("_GLOBAL__N")), self.name)

    @property
    def spill_bytes(self) -> int:
        """What `max_spills` limits: bytes stored or bytes loaded, the larger one."""
        return max(self.spill_store_bytes, self.spill_load_bytes)


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """How the source became something that can be loaded."""

    digest: str
    """Content digest of source, flags, ABI header, architecture and toolchain."""
    recipe: str = ""
    """The same without the toolchain: the name of a portable artifact; empty where a surface has none."""
    platform: str = ""
    """What it was built for; empty for what runs anywhere."""
    command: str = ""
    toolchain: str = ""
    seconds: float = 0.0
    """Wall time of the build; 0 when it came from the cache."""
    cached: bool = False
    log: str = ""
    """The compiler's own messages, bounded."""
    includes: dict[str, str] = {}
    """Header libraries that were asked for by name, with their versions; headers of the package, with their digests."""
    reads: tuple[str, ...] = ()
    """Files that a cpp build read beside the source, the ABI and the compiler's own headers."""
    kernels: tuple[KernelResources, ...] = ()
    """The GPU kernels in it, by name; empty where a surface has none or builds them when they run."""
    artifact: str = ""
    """SHA-256 of the file, when it was taken from --klineage-artifacts instead of being built."""


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


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The least time that a machine's arithmetic or memory takes for a case, by data sheet or by a bound."""

    ms: float
    limit: str
    """What takes that long: "bytes" or "flops"."""
    product: str = ""
    """The product whose data sheet it is; empty where it is a bound of the platform's, and the true floor higher."""


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel, copy or fill by the name under which the device executed it."""

    name: str
    calls: int
    total_ns: int


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
    reference_overheads_ms: tuple[float, ...] = msgspec.field(default=(), name="reference_charges_ms")
    """What of every sample is not the worker's clock but an added gap; empty when none was added."""
    candidate_overheads_ms: tuple[float, ...] = msgspec.field(default=(), name="candidate_charges_ms")
    foreign_load: float = 0.0
    """Share of the machine's CPU time that other processes used meanwhile."""
    threads: int = 0
    """CPU threads of both sides; 0 on a GPU, and in records before they were kept."""
    binding: str = ""
    """Where OpenMP's threads of both sides were bound: "by core", "by thread" or "none"; empty as `threads` is 0."""
    starts: tuple[int, ...] = (0,)
    """Samples at which both sides were started in new processes; the interval is over starts and their samples."""
    calls_per_sample: int = 1
    """On a GPU a sample may be the median over a block of so many calls, or the mean of a graph of them."""
    gpu: GpuReadings | None = None
    """Clocks, power and temperature meanwhile, when a GPU was timed."""
    seconds: float = 0.0
    """Wall time of the timed blocks, including preparation of inputs between calls."""
    stopped: str = ""
    """Why sampling ended: "precise", "excluded" (screening: the interval excludes the best so far), "time limit",
    "start limit", "pair limit", "fixed count" or "fixed time"."""


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
    floor: Floor | None = None
    """What `timing` is to be seen beside; None where nothing was timed, and in records before it was kept."""
    other_timings: tuple[Timing, ...] = ()
    """Further policies, when asked for."""
    reference: dict[str, str] = {}
    """What the reference was: label, versions, backend flags."""
    kernels: tuple[KernelTime, ...] = ()
    """What a GPU executed for the candidate during one block, by device time; figures are of the whole block."""
    reference_kernels: tuple[KernelTime, ...] = ()
    sanitizer: dict[str, str] = {}
    """By tool of compute-sanitizer that was asked for: "clean", its first finding, or why it came to no result."""
    containment: tuple[str, ...] = ()
    """Sandbox mechanisms that were active in the candidate's process."""
    notes: tuple[str, ...] = ()
    """Hints of the static audit, labels that decided nothing; versions of the reference that were not checked,
    those of its libraries that failed, and a search that did not find its best plan again."""
    log: str = ""
    """What the candidate printed, bounded and cleaned of control characters."""
    overhead_s: float = 0.0
    """Wall time of the judgement outside of timed blocks and the build."""
    waits_s: dict[str, float] = {}
    """Of the judgement's wall time, what was waited for: "oracle" to make problems and answers, "reference" and
    "candidate" to start, all their restarts together, "lock" for others who judge on the device."""
    judged_at: str = ""
    """UTC, ISO 8601."""
    screened: float | None = None
    """The speedup of the best kernel so far, where timing ended once its interval excluded that, or after a second.

    Such a verdict ranks kernels within a search; its speedup is not for publication. None after a full judgement.
    """
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
        """True when the kernel was right and timed in full, so that its speedup counts."""
        return self.screened is None and self.ranked

    @property
    def ranked(self) -> bool:
        """True when the kernel was right and timed, in full or screened, so that a search can compare it."""
        return self.timing is not None and self.status in (Status.ACCEPTED, Status.SLOWER, Status.INCONCLUSIVE)


def speedup(reference_ms: float, candidate_ms: float) -> float:
    """Reference time over candidate time: the one definition in this package. Above 1 the candidate is faster."""
    return reference_ms / candidate_ms
