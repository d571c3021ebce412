"""Baseline: timings pinned to compare later runs with, and what such a comparison says."""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from pytest_klineage.records.case import KernelCase
from pytest_klineage.records.platform import Machine
from pytest_klineage.records.verdict import SCHEMA_VERSION, Interval, Status, Timing, Verdict


class ComparisonOutcome(StrEnum):
    """What a comparison of one kernel says."""

    SLOWER = "slower"
    """The whole interval of new over old lies below the margin."""
    FASTER = "faster"
    """The whole interval lies above the margin: a pinned baseline is outdated."""
    SAME = "same"
    """The whole interval lies within the margin."""
    UNCLEAR = "unclear"
    """The interval reaches over the margin, judgements of one kernel disagree, or the machine was busy.

    Against a base only after three judgements."""
    UNCHANGED = "unchanged"
    """The base has the same source: there was nothing to judge."""
    NEW = "new"
    """There is nothing older to compare with."""
    BROKEN = "broken"
    """It was timed then, and is wrong or does not run now."""
    SKIPPED = "skipped"
    """It was not judged now."""
    NO_BASELINE = "no_baseline"
    """There is no baseline of that name."""
    OTHER_DEVICE = "other_device"
    """The baseline was pinned on another GPU or CPU model."""
    OTHER_REFERENCE = "other_reference"
    """The reference was another one, or another version of it."""
    OTHER_DEFINITION = "other_definition"
    """The operator's definition was another one."""
    OTHER_POLICY = "other_policy"
    """The timing policy was another one."""
    OTHER_SETUP = "other_setup"
    """Another size of the cache flush, another number of threads, or another binding of them."""
    BASE_FAILED = "base_failed"
    """The base's kernel could not be judged."""
    NO_SOURCE = "no_source"
    """The kernel has no file that the base could have another version of."""

    @property
    def change(self) -> bool:
        """Whether the speed is said to have changed: what a second judgement has to confirm."""
        return self in (ComparisonOutcome.SLOWER, ComparisonOutcome.FASTER)

    @property
    def refused(self) -> bool:
        """Whether two figures exist that must not be compared, or one that should be there is not."""
        return self in (
            ComparisonOutcome.NO_BASELINE,
            ComparisonOutcome.OTHER_DEVICE,
            ComparisonOutcome.OTHER_REFERENCE,
            ComparisonOutcome.OTHER_DEFINITION,
            ComparisonOutcome.OTHER_POLICY,
            ComparisonOutcome.OTHER_SETUP,
        )

    @property
    def bad(self) -> bool:
        """Whether it fails a test under --klineage-compare-fail.

        A refusal does: a gate that compared nothing must not be green.
        """
        return self in (ComparisonOutcome.SLOWER, ComparisonOutcome.BROKEN) or self.refused


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel's timing, kept with everything that decides whether a later one compares with it."""

    nodeid: str
    """The test's pytest id."""
    case: KernelCase
    label: str
    """What people call the kernel."""
    number: int = 0
    """Counts verdicts of one test about the same case and label."""
    surface: str = ""
    source_digest: str = ""
    status: Status
    timing: Timing
    """With all samples: the interval of a comparison comes from those of both runs."""
    again: Timing | None = None
    """The same of a second judgement right after; a change has to hold against both."""
    reference: dict[str, str] = {}
    """Label, versions and flags of the reference."""
    machine: Machine
    pinned_at: str = ""
    """When it was judged; UTC, ISO 8601."""
    samples_digest: str
    """SHA-256 over the samples of both judgements, in hexadecimal."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes a later verdict one about the same kernel."""
        return (self.nodeid, self.case.id, self.label, self.number)


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Pins of one platform and one device under a name."""

    name: str
    platform: str
    device: str
    """Product name of the GPU, or of the CPU."""
    pins: tuple[Pin, ...]
    schema_version: int = SCHEMA_VERSION


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one kernel since a baseline, or since the base of a pull request."""

    nodeid: str
    case: str
    """The case's id."""
    kernel: str
    """The kernel's label."""
    against: str
    """Name of the baseline, or "base"."""
    outcome: ComparisonOutcome
    message: str = ""
    """One sentence: the figures, or why there are none."""
    advice: str = ""
    """The next step, where there is one."""
    margin: float = 0.0
    """Relative; beyond it a change counts."""
    ratio: Interval | None = None
    """New speed over old speed: above 1 the kernel has become faster. Against a base, of all judgements pooled."""
    ratios: tuple[Interval, ...] = ()
    """Those of each judgement by itself, when there were several; with a baseline the first is `ratio`."""
    old: Interval | None = None
    """The speedup over the reference then; None against a base, with which the kernel was timed in turns."""
    new: Interval | None = None
    """The speedup over the reference now."""
    file: str = ""
    """Where to show it, relative to pytest's root directory: the kernel, or its test."""
    line: int = 0
    """From 1; 0 when unknown."""
    verdict: Verdict | None = None
    """The judgement of the kernel against the base's, with its samples."""
    more: tuple[Verdict, ...] = ()
    """Further judgements against the base's, which are pooled with it."""
    again: Verdict | None = None
    """The second judgement against a baseline, which was to confirm that the speed has changed."""
    schema_version: int = SCHEMA_VERSION


def placed(comparison: Comparison, file: str, line: int | None) -> Comparison:
    """The comparison with the place where it is shown; `line` from 0, as pytest counts."""
    return msgspec.structs.replace(comparison, file=file, line=0 if line is None else line + 1)


def samples_digest(*timings: Timing | None) -> str:
    """SHA-256 over both sides' samples and their starts, in hexadecimal; of the timings that there are."""
    found = hashlib.sha256()
    for timing in timings:
        if timing is not None:
            content = (timing.reference_samples_ms, timing.candidate_samples_ms, timing.starts)
            found.update(msgspec.json.encode(content))
    return found.hexdigest()
