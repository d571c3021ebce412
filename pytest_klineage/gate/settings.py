"""What a user may set about a judgement, and the names of the defences."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.gate.timing.policy import POLICIES, SCREEN_LIMIT_S

DEFENCES = frozenset({
    "audit", "fresh_inputs", "verify", "two_clocks", "poison", "input_integrity", "guard_bands", "alias_rules",
    "case_lint", "own_kernel", "floor", "sandbox",
})  # fmt: skip
"""Every defence that can be switched off, which only the tests of the defences do."""

STAGES = ("all", "compile")
"""How far a judgement goes: to the verdict, or until the kernel is built, which needs no device."""
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
"""Tools of compute-sanitizer that a judgement on a GPU may run over a kernel."""
DAY_S = 86400.0
MOST_CONFIDENCE = 0.995
"""Of many pairs five of 2000 resamples lie beyond each end then; above it an end is what the most extreme one or two
happen to be. Of few pairs fewer do: `tail_share` leaves 2.1 at 32 pairs, 1.5 at 24, and 0.3 at 12, where the ends are
nearly those of all resamples."""
CONFIDENCE_ONCE = 0.9999
"""The most that could be asked for until 2026-11-30."""


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/pytest-klineage or ~/.cache/pytest-klineage."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pytest-klineage"


class GateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one gate. Raises UsageError for values that make no sense."""

    stage: str = "all"
    """One of STAGES."""
    artifacts: Path | None = None
    """Folder of built kernels: written in the compile stage, read in a whole judgement."""
    policy: str = "paired"
    """Timing policy that decides."""
    also_policies: tuple[str, ...] = ()
    """Further policies that are reported beside it."""
    margin: float = 0.05
    """How far below the required speedup a kernel may be."""
    precision: float = 0.01
    """Half-width of the interval at which sampling stops, relative."""
    confidence: float = 0.95
    """Of the interval."""
    time_limit_s: float = 10.0
    """Longest time to spend on the timed blocks of one policy."""
    busy_limit: float = 0.25
    """Share of the machine's CPU time that others may use during timing before the verdict is inconclusive."""
    spread_limit: float = 2.0
    """Factor between the quartiles of a side's times above which the verdict is inconclusive.unstable."""
    flush_bytes: int | None = None
    """Bytes to write between two calls, so that each starts from memory.

    None means what the case can have in the caches, at least 64 MiB and at most twice the last level
    (`devices.flush_size`), on a GPU 256 MiB. 0 is for a CPU only, where calls then start from warm caches.
    """
    seeds: int = 3
    """Random inputs of the default input distribution that every kernel must get right."""
    threads: int = 0
    """CPU threads for reference and candidate; 0 means all cores."""
    cache_dir: Path = msgspec.field(default_factory=default_cache_dir)
    build_timeout_s: float = 120.0
    load_timeout_s: float = 30.0
    run_timeout_s: float = 30.0
    seed: str | None = None
    """Fixes the inputs of the checks; None draws them from the system's randomness."""
    sanitize: tuple[str, ...] = ()
    """Those of SANITIZERS that are run over a kernel which passed its checks, before it is timed."""
    defences: frozenset[str] = DEFENCES

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise UnknownName("stage", self.stage, STAGES)
        for policy in (self.policy, *self.also_policies):
            if policy not in POLICIES:
                raise UnknownName("timing policy", policy, POLICIES)
        for tool in self.sanitize:
            if tool not in SANITIZERS:
                raise UnknownName("sanitizer", tool, SANITIZERS)
        for defence in self.defences - DEFENCES:
            raise UnknownName("defence", defence, DEFENCES)
        for name, low, high in (
            ("margin", 0.0, 0.99), ("precision", 1e-5, 1.0), ("confidence", 0.5, MOST_CONFIDENCE),
            ("busy_limit", 0.0, 1.0), ("spread_limit", 1.01, 1e9),
            ("seeds", 1, 1000), ("flush_bytes", 0, 1 << 40), ("threads", 0, 4096), ("time_limit_s", 0.05, DAY_S),
            ("build_timeout_s", 0.1, DAY_S), ("load_timeout_s", 0.1, DAY_S), ("run_timeout_s", 0.05, DAY_S),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} must lie between {low:g} and {high:g}, got {value:g}")


def as_recorded(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a request as this version takes them: one of an earlier version may ask for more confidence."""
    confidence = settings.get("confidence")
    if isinstance(confidence, float) and MOST_CONFIDENCE < confidence <= CONFIDENCE_ONCE:
        return {**settings, "confidence": MOST_CONFIDENCE}
    return settings


def for_screening(settings: GateSettings) -> GateSettings:
    """The settings of a screening: all checks, one timing policy, a second of it."""
    limit_s = min(settings.time_limit_s, SCREEN_LIMIT_S)
    return msgspec.structs.replace(settings, time_limit_s=limit_s, also_policies=())
