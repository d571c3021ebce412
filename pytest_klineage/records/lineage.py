"""Lineage: the states of a kernel from naive to expert, the edits between them, and what was refused.

States are stored naive first. The files themselves, and whether the edits fit them, are the library's business.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import cache
from typing import Any

import msgspec

from pytest_klineage.records.case import KernelCase
from pytest_klineage.records.codec import finite
from pytest_klineage.records.source import Surface
from pytest_klineage.records.verdict import SCHEMA_VERSION, Code, Interval, Timing, Verdict


class Category(StrEnum):
    """What one step adds to a kernel, in the field's words; the list is closed, so that steps can be compared."""

    TILE_STAGE = "tile_stage"
    """Tiles of reused operands are kept in shared memory, or in a cache-sized buffer."""
    PACK = "pack"
    """Operands are copied into the order in which they are read."""
    VECTORIZE_GLOBAL = "vectorize_global"
    """Wide, aligned loads and stores instead of scalar ones."""
    PIPELINE = "pipeline"
    """Copies of later tiles are under way while one is computed: cp.async, several stages."""
    PREFETCH = "prefetch"
    """Hints that bring data nearer before they are needed, without storage of their own."""
    TMA_LOAD = "tma_load"
    """Bulk tensor copies by a descriptor, completing on barriers."""
    TMA_STORE = "tma_store"
    """Results leave through shared memory and bulk tensor stores."""
    MULTICAST = "multicast"
    """Blocks of a cluster share one copy of an operand."""
    WARP_SPECIALIZE = "warp_specialize"
    """Some warps move data, others compute; registers are given to those who need them."""
    STAGED_OUTPUT = "staged_output"
    """Results are rearranged on the chip, so that they are written in order."""
    REGISTER_TILE = "register_tile"
    """Each thread computes a tile of results from operands in registers."""
    SIMD = "simd"
    """Vector instructions of a CPU."""
    LDMATRIX_SWIZZLE = "ldmatrix_swizzle"
    """Fragments by ldmatrix from a swizzled layout without bank conflicts."""
    MMA = "mma"
    """Tensor cores through mma.sync."""
    WGMMA = "wgmma"
    """Tensor cores through warpgroup instructions on shared memory."""
    SMEM_TRANSPOSE = "smem_transpose"
    """A strided axis is transposed in shared memory, so that work runs along it."""
    PHASE_DECOMPOSITION = "phase_decomposition"
    """Work per element is restructured into cooperative products, scans or blocks."""
    RADIX_SELECT = "radix_select"
    """Selection by digits, coarse and then fine, instead of by comparison."""
    SHUFFLE_SCAN = "shuffle_scan"
    """Scans, reductions and places by shuffles, ballots and warps instead of serially or by atomics."""
    FUSION = "fusion"
    """Passes over the data become one, such as online softmax."""
    OVERLAP = "overlap"
    """Independent work of one tile runs beside the dependent work of another."""
    ARITHMETIC = "arithmetic"
    """The same result from fewer or cheaper operations, or with a check that redoes the rare case."""
    BLOCK_PARALLEL = "block_parallel"
    """More threads, blocks or cores work at the same time."""
    CACHE_BLOCK = "cache_block"
    """Loops are cut into blocks that fit a cache, or ordered so that neighbours share it."""
    PERSISTENT = "persistent"
    """Blocks stay and walk over tiles, in an order of their own."""
    TEMPLATIZE = "templatize"
    """Tile sizes and such become constants of compilation, and other values are chosen."""
    AUTOTUNE = "autotune"
    """Several configurations are measured, and the best is used."""


class Termination(StrEnum):
    """Why the walk backward ended. Only `naive_reached` says that the first state is naive."""

    NAIVE_REACHED = "naive_reached"
    """Nothing is left that could be taken away: the first state is naive."""
    MODEL_STOPPED = "model_stopped"
    """The proposer said twice that it was done while the audit still saw something."""
    NO_VALID_STEP = "no_valid_step"
    """Every proposal was refused."""
    REJECTION_LIMIT = "rejection_limit"
    STEP_LIMIT = "step_limit"
    BUDGET = "budget"
    INTERRUPTED = "interrupted"
    """From outside."""
    HAND_MADE = "hand_made"
    """There was no walk: the author of the expert wrote every state, naive first."""


class EditKind(StrEnum):
    """How an edit is written down."""

    UNIFIED_DIFF = "unified_diff"
    SEARCH_REPLACE = "search_replace"
    DIGEST = "digest"
    """Only the SHA-256 of its content, as in an outline."""


class Replacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One block: `search` occurs exactly once in the file and gives way to `replace`."""

    file: str
    search: str
    replace: str


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change to the files of a kernel that applies exactly or is refused; the library applies it."""

    kind: EditKind
    diff: str = ""
    """The unified diff, for that kind; for an outline's the digest."""
    blocks: tuple[Replacement, ...] = ()
    """Replacements in order, for `search_replace`."""


class StateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a state: what the kernel calls it, and what it is called beside lineage.json."""

    name: str
    path: str


class LineageState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel of the lineage."""

    name: str
    """A word for people, such as "naive" or "register-tile"."""
    files: tuple[StateFile, ...]
    """The first is the one that is compiled or imported."""
    entry: str
    flags: tuple[str, ...] = ()
    source_digest: str
    """Digest of the KernelSource that files, entry, flags and the lineage's surface make."""
    verdict: Verdict | None = None
    """The gate's answer about this very source; None for a hand-made state that was not judged."""
    platforms: tuple[str, ...] = ()
    """Platforms that it can be built for; the lineage's own when empty."""

    @property
    def timing(self) -> Timing | None:
        """The times of its verdict, where it has both."""
        return self.verdict.timing if self.verdict is not None else None


class Rejection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A proposal that was not taken: evidence for a precondition or a risk."""

    forward: bool
    """Whether it was a re-derivation of the forward edit; otherwise a proposed simplification."""
    category: Category
    locus: str
    intent: str
    edit: Edit | None = None
    """None when the proposal could not be written as an edit."""
    reason: str
    """Why it was refused, in a sentence."""
    verdict: Verdict | None = None
    """The gate's answer; None when nothing could be built of it."""

    @property
    def code(self) -> Code | None:
        """The gate's deciding reason, if the gate was asked."""
        return self.verdict.code if self.verdict is not None else None


class Rederivation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A forward edit written from the simpler state alone that gives another text than the stored state."""

    edit: Edit
    source_digest: str
    """Digest of the KernelSource that it gives."""


class Transition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step from one state to the next. The verdict on the simpler kernel is that of its state."""

    category: Category
    locus: str
    """Where in the code it acts: a function, a loop, a buffer."""
    intent: str
    """What it does and which property of the platform it uses, in a sentence."""
    before: str
    """`source_digest` of the simpler state."""
    after: str
    """`source_digest` of the next state."""
    backward: Edit | None = None
    """The simplification that was accepted: gives the simpler state from the next. None for a hand-made step."""
    forward: Edit
    """Gives exactly the next state from the simpler one. Re-derived by the step's author, unless `rederived` is."""
    rederived: Rederivation | None = None
    """Where the re-derived edit gives another text; the two kernels were found equal by the gate, not by their text."""
    forward_verdict: Verdict | None = None
    """The gate's answer about the kernel that the re-derived edit gives; None for a hand-made step."""
    effect: Interval | None = None
    """Time of the simpler kernel over time of the next: above 1 the step makes it faster; None when not measured."""
    rejected: tuple[Rejection, ...] = ()
    """What was proposed at this place and refused."""
    preconditions: tuple[str, ...] = ()
    """What the author of a hand-made step says it needs."""
    risks: tuple[str, ...] = ()
    """What the author says goes wrong with it."""
    digest: str = ""
    """Covers everything above and the digest of the step that was made before it: see `Lineage.sealed`."""

    @property
    def forward_digest(self) -> str:
        """Digest of the source that `forward_verdict` is about."""
        return self.rederived.source_digest if self.rederived is not None else self.after


def inverse(interval: Interval) -> Interval:
    """The interval of one over a ratio. The median of paired logarithms makes this exact, not an approximation."""
    return Interval(1 / interval.estimate, 1 / interval.high, 1 / interval.low, interval.confidence)


class Retimed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step that was timed again, alone: its effect is this one, and no longer what the walk saw."""

    transition: str
    """The step's digest."""
    verdict: Verdict
    """On the simpler kernel, with the next state in the reference's place."""
    rederived: Verdict | None = None
    """On the re-derived kernel, with the next state in the reference's place; None where it was not timed."""
    better: Verdict | None = None
    """On the simpler kernel, with the re-derived one in the reference's place, where that is the faster of the two."""

    @property
    def effect(self) -> Interval | None:
        """Time of the simpler kernel over that of what the step leads to: the faster of next state and re-derived."""
        timing = (self.better or self.verdict).timing
        return inverse(timing.speedup) if timing is not None else None


class TimedSpan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Neighbouring steps that were timed together: the kernel before the first against the one after the last."""

    steps: tuple[str, ...]
    """Digests of the transitions, in order."""
    verdict: Verdict
    """On the kernel before the span, with the one after it in the reference's place."""

    @property
    def effect(self) -> Interval | None:
        """Time before the span over time after it."""
        timing = self.verdict.timing
        return inverse(timing.speedup) if timing is not None else None


class Lineage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
    tag_field="schema_version", tag=SCHEMA_VERSION,
):  # fmt: skip
    """K0, t1, K1, ..., tn, Kn: the way from a naive kernel to an expert one, every state judged."""

    operator: str
    platform: str
    surface: Surface
    case: KernelCase
    """What the states were judged on."""
    states: tuple[LineageState, ...]
    """Naive first; one more than transitions."""
    transitions: tuple[Transition, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    """What was proposed for the first state, where the walk ended."""
    termination: Termination
    termination_reason: str
    """The same in a sentence, with what is left in the first state if anything is."""
    provenance: dict[str, str] = {}
    """Who proposed, with which versions, from which expert."""
    digest: str = ""
    """Covers everything: see `sealed`."""

    @property
    def name(self) -> str:
        """Its folder, such as "gemm/cpu-cpp"; of a kernel of others with the project, "gemm/sm90-cuda@fast.cu"."""
        return f"{self.folder}@{self.source.rstrip('/').rpartition('/')[2]}" if self.source else self.folder

    @property
    def folder(self) -> str:
        """The lineage's folder below experts/."""
        return f"{self.operator}/{self.platform}-{self.surface.value}"

    @property
    def source(self) -> str:
        """Address of the project whose kernel it begins at; empty for a kernel of the one that keeps the lineage."""
        return self.provenance.get("source", "")

    @property
    def hand_made(self) -> bool:
        """Whether the author of the expert wrote the states: there was no walk, and states may have no verdict."""
        return self.termination is Termination.HAND_MADE

    @property
    def complete(self) -> bool:
        """Whether the first state is naive."""
        return self.termination is Termination.NAIVE_REACHED

    def done_before(self, index: int) -> frozenset[Category]:
        """Categories of the steps that lead to the state before transition `index`."""
        return frozenset(transition.category for transition in self.transitions[:index])

    def sealed(self) -> Lineage:
        """The same lineage with every digest computed.

        The chain runs as the walk does, from the expert backward: a step's digest covers that of the step after it,
        so that it stays what it is when the walk goes on towards naive. In a hand-made lineage it covers what the
        author wrote of later steps: their effects and verdicts come one by one, and leave the digests of others alone.
        """
        chained: list[Transition] = []
        previous = content_digest(msgspec.structs.replace(self, states=self.states[-1:], transitions=(), **_OPEN_END))
        for transition in reversed(self.transitions):
            digest = _chained(previous, transition)
            chained.insert(0, msgspec.structs.replace(transition, digest=digest))
            previous = _chained(previous, _as_written(transition)) if self.hand_made else digest
        closed = msgspec.structs.replace(self, transitions=tuple(chained), digest="")
        return msgspec.structs.replace(closed, digest=content_digest(closed))


_OPEN_END: dict[str, Any] = {
    "rejected": (),
    "termination": Termination.INTERRUPTED,
    "termination_reason": "",
    "provenance": {},
    "digest": "",
}
"""What the end of a lineage looks like to the first digest: steps do not change with how the walk ended."""


def _as_written(transition: Transition) -> Transition:
    """A step of a hand-made lineage before anybody judged or re-derived it."""
    return msgspec.structs.replace(
        transition, backward=None, rederived=None, forward_verdict=None, effect=None, rejected=()
    )


def _chained(previous: str, transition: Transition) -> str:
    own = content_digest(msgspec.structs.replace(transition, digest=""))
    return hashlib.sha256(f"{previous} {own}".encode()).hexdigest()


def content_digest(record: msgspec.Struct) -> str:
    """SHA-256 over a record's content, in hexadecimal.

    Fields at their defaults do not count: a field that a later version adds leaves the digests of older records alone.
    """
    return hashlib.sha256(msgspec.json.encode(_content(record), order="deterministic")).hexdigest()


def _content(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        defaults = _defaults(type(value))
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        given = {encoded: getattr(value, name) for encoded, name in names}
        return {name: _content(item) for name, item in given.items() if name not in defaults or item != defaults[name]}
    if isinstance(value, dict):
        return {key: _content(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(_content(item) for item in value)
    if isinstance(value, list | tuple):
        return [_content(item) for item in value]
    return finite(value)


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            found[field.encode_name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            found[field.encode_name] = field.default_factory()
    return found
