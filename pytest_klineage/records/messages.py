"""The messages that cross process boundaries: judge to oracle, oracle to worker. Plain data only."""

from __future__ import annotations

import msgspec

from pytest_klineage.records.case import DefinitionFile, KernelCase
from pytest_klineage.records.signature import Arena
from pytest_klineage.records.verdict import Check, Code, KernelTime, Reason

CANDIDATE_FRAME_BYTES = 64 * 1024
"""The longest frame that is read from an untrusted worker."""
DENORMALS = "denormal numbers"
FLOAT_CONTROL = ("rounding", DENORMALS, "floating-point exceptions", "precision")
"""What a processor's control registers decide, from the lowest bit of `Returned.changed_settings` on."""
FRAMEWORK_SETTINGS = ("PyTorch's default type", "PyTorch's gradients", "number of PyTorch's threads")
"""What PyTorch is set to, in the bits after those."""
CALLERS_SETTINGS = FLOAT_CONTROL + FRAMEWORK_SETTINGS


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process loads: a built kernel, or a reference."""

    surface: str
    """A surface, or "reference"."""
    artifact: str = ""
    """Path of the built kernel."""
    entry: str = ""
    module: str = ""
    case: KernelCase | None = None
    platform: str = "cpu"
    workdir: str = ""
    """Private directory, the only one the worker may write to."""
    read_paths: tuple[str, ...] = ()
    """Directories beside the interpreter's own that the worker may read."""
    own_files_only: bool = False
    """Whether a native kernel may read no library of the machine beside its language's runtime."""
    threads: int = 1
    processors: tuple[int, ...] = ()
    """Those that OpenMP's threads are bound to, one place or core each; empty where they are not bound."""
    sandbox: bool = True
    allow_processes: bool = False
    refuse_framework: bool = False
    refuse_copies: bool = False
    """Make every framework operation that computes raise, or also those that copy."""
    flush_bytes: int = 0
    """On a GPU the worker itself writes this much between two timed calls, on the stream of the calls."""
    variant: str = ""
    """Of a reference that has been chosen already; empty to compare its variants."""
    variant_ms: float = 0.0
    """Its median when it was compared, in milliseconds; 0 where that is not known."""
    definition: DefinitionFile = DefinitionFile()
    """Where a reference finds the case's definition and its own function. A candidate's is empty."""


# --- oracle to worker -------------------------------------------------------------------------------------------------


class Map(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Map an arena; its memory comes as a file descriptor beside this message."""

    arena: Arena
    read_only: tuple[tuple[int, int], ...] = ()
    """Where pages of a second file, which can only be read, lie in the place of the first one's."""
    unreadable: tuple[tuple[int, int], ...] = ()
    """Where pages lie that the kernel is not to read."""


class RunKernel(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run the kernel once on one slot of one arena, after forgetting earlier results by their places, one by one."""

    arena: int
    slot: int
    nonce: int
    forget: tuple[int, ...] = ()


class Again(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Copy what an earlier call returned into a slot once more; answered by OutputsReady."""

    arena: int
    slot: int
    nonce: int
    back: int = 0
    """How many of the kept results ago, 0 for the last one; on a GPU always that."""


class MakeEvents(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """On a GPU: make what blocks of so many calls are timed with; answered by EventsMade."""

    calls: int
    nonce: int


class RunBlock(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """On a GPU: queue one call for every entry of `slots` without waiting between them, then wait for all."""

    arena: int
    slots: tuple[int, ...]
    nonce: int
    mask: int = 0
    """Inputs lie in their slots masked by these 16 bits, and are unmasked one by one, before a call's cache flush."""
    graph: bool = False
    """Record the calls in a CUDA graph first and time replays of it, without any flush."""
    profile: bool = False
    """Record which kernels the device executes meanwhile."""
    flush_bytes: int = 0
    """What to write before every call: said for each block, so that no process keeps it."""


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """End the worker."""


ToWorker = Map | RunKernel | MakeEvents | RunBlock | Again | StopWorker


class KernelLoaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The kernel is loaded and can be run."""

    containment: tuple[str, ...] = ()
    settings: dict[str, str] = {}


class LoadFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The kernel cannot be loaded."""

    code: Code
    message: str


class Mapped(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The arena is mapped at this address of the worker."""

    address: int


class ReturnedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that the kernel returned instead of writing into the output it was given."""

    address: int
    num_bytes: int
    strides: tuple[int, ...]


class Returned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The kernel's call has returned."""

    nonce: int
    elapsed_ns: int
    tensors: tuple[ReturnedTensor, ...] | None = None
    """What the call returned, copied as its last part; None where it is copied now, and OutputsReady follows."""
    refused: tuple[str, ...] = ()
    """Operators of the framework that have been refused in this process so far, at most a few."""
    digest: str = ""
    """Of the outputs as they are when this is sent: what is written later shows."""
    changed_settings: int = 0
    """On a CPU, what the calls so far have changed in how their thread computes: bits of `CALLERS_SETTINGS`."""


class EventsMade(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A block of that length can begin."""

    nonce: int


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All calls of a block have come to their end; their times follow."""

    nonce: int


class BlockReturned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the calls of a block took, by the device's clock."""

    nonce: int
    elapsed_ns: tuple[int, ...]
    """From a call's start to the end of what it queued on its stream; of a graph, the mean of every replay."""
    settled_ns: tuple[int, ...]
    """From there until nothing was left to do on the device; empty for a graph."""
    span_ns: int
    """From before the head start, or from a graph's first timed replay, to the end of everything."""
    head_ns: int = 0
    """How long the head start was; 0 for a graph and for a queue without one."""


class OutputsReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The outputs lie in the arena."""

    nonce: int
    tensors: tuple[ReturnedTensor, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    """What the device executed during a profiled block, without the flushes between calls."""
    busy_ns: int = 0
    """For how long it was executing at least one of them."""
    flush_ns: int = 0
    """For how long it was writing the flushes of a profiled block."""


class KernelFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The kernel did not produce outputs."""

    nonce: int
    code: Code
    message: str


FromWorker = (
    KernelLoaded | LoadFailed | Mapped | Returned | EventsMade | Finished | BlockReturned | OutputsReady | KernelFailed
)


# --- judge to oracle --------------------------------------------------------------------------------------------------


class OpenCase(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make inputs and expected outputs for a case. `secret` seeds every random number."""

    case: KernelCase
    secret: str
    seeds: int
    flush_bytes: int
    threads: int
    definition: DefinitionFile = DefinitionFile()
    """Where the case's definition is imported from."""
    device: str = "cpu"
    """Where inputs, answers and shared memory lie: "cpu" or "cuda"."""


class Attach(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take over the channel (beside this message) of a worker that was just started."""

    role: str
    deadline_s: float
    read_only: bool = False
    """Whether its inputs are mapped for reading alone."""
    unreadable: bool = False
    """Whether, in one of two places, it cannot read on after an input's end."""


class Detach(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Let go of a worker."""

    role: str


class CheckRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run the check with this index on a worker and compare its outputs with the oracle's."""

    role: str
    index: int
    deadline_s: float
    defences: frozenset[str]
    again: bool = False
    """Whether it comes after the timing: on a CPU it then has other inputs, where that is quick."""


class TimeRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run each role in `order` once per repetition, on inputs that are new every time and the same for both."""

    order: tuple[str, ...]
    reps: int
    deadline_s: float
    defences: frozenset[str]
    mode: str = "block"
    """On a GPU: "block" gives the median of a block of calls as one sample, "queued" every call's own time, "graph" the
    mean of a replayed graph. A CPU runs one call at a time in any mode but "graph"."""
    flush: bool = True
    """Whether calls on a CPU start from memory; those that warm a new process up need not."""
    checks: bool = False
    """Whether, on a CPU, a check of the candidate now and then takes the place of a pair, which then is not timed."""


class ProfileRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run one more block, like those that are timed, and record which kernels the device executes."""

    role: str
    deadline_s: float
    defences: frozenset[str]


class Stock(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make what timing the open case needs and checking it did not; answered by Attached."""

    checks: bool = True
    """Whether checks come among or after the timing."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the oracle."""


ToOracle = OpenCase | Attach | Detach | CheckRequest | TimeRequest | ProfileRequest | Stock | Shutdown


class PlannedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One check that the oracle has inputs for."""

    input_distribution: str
    shape: dict[str, int] = {}


class CaseOpened(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The case is ready."""

    checks: tuple[PlannedCheck, ...]
    findings: tuple[str, ...]
    """Why the case cannot be scored; empty when it can."""
    flops: float
    min_bytes: float
    settings: dict[str, str]
    notes: tuple[str, ...] = ()
    mixed: bool = False
    """Whether some timed pairs are on new problems and some on symmetry transforms of known ones."""
    only_moves: bool = False
    """Whether every output element is a copy of an input element, or constant: then copying is all of the work."""


class Attached(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker has loaded its kernel and mapped the arenas."""

    containment: tuple[str, ...] = ()
    settings: dict[str, str] = {}
    read_only: bool = False
    """Whether inputs are mapped for reading alone in every arena; it may have been asked for where that cannot be."""


class WorkerFailure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A worker failed; the reasons are findings about it. `gone` when its channel is closed."""

    role: str
    reasons: tuple[Reason, ...]
    gone: bool = False


class Checked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The outputs of one check, compared. `reasons` is empty when the worker passed."""

    checks: tuple[Check, ...]
    reasons: tuple[Reason, ...] = ()
    refused: tuple[str, ...] = ()
    """Operators of the framework that the worker says it was refused."""


class TimedCall(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One timed call: the worker's own clock and the oracle's."""

    role: str
    elapsed_ns: int
    wall_ns: int
    novel: bool = False
    """Whether the call's inputs were made for it alone, not a symmetry transform of inputs that were there before."""
    waited_ns: int = 0
    """For how long oracle and worker were ready meanwhile and had no processor; 0 on a GPU."""


class Timed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The samples of one request. `reasons` is empty when every output was right."""

    samples: tuple[TimedCall, ...]
    reasons: tuple[Reason, ...] = ()
    calls_per_sample: int = 1
    one_block: bool = False
    """On a GPU: whether all calls of a side were one block, and share what two clocks say of it."""


class Profiled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the device executed during one block. `reasons` is empty when every output was right."""

    kernels: tuple[KernelTime, ...]
    calls: int
    busy_ns: int
    """For how long the device was executing kernels, flushes left out."""
    claimed_ns: int
    """What the calls of the same block took by their own events."""
    reasons: tuple[Reason, ...] = ()


class OracleFault(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The oracle itself could not do what was asked."""

    kind: str
    message: str


FromOracle = CaseOpened | Attached | WorkerFailure | Checked | Timed | Profiled | OracleFault
