"""What the suite keeps of a verdict, and its table by family: FlagGems over each arm, effects of tuning and cards."""

from __future__ import annotations

import gzip
import math
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest
from rows import FAMILIES, REACHED, ROWS, Row
from tabulate import tabulate

from pytest_klineage.records import Interval, Verdict
from pytest_klineage.records.facts import MEASURED
from pytest_klineage.results.packed import packed

OWN = "flaggems."
"""How the names of FlagGems' entries begin among a reference's variants."""
EFFECTS = (("tuning", "idiom", "blind"), ("card", "blind", "card"))
"""Name of an effect, and the two arms whose times it is the ratio of."""


TEXT = pytest.StashKey[str]()
"""Where a session keeps the tables until its end."""
Key: TypeAlias = tuple[str, int, str]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel of one row: what it took beside its reference."""

    platform: str
    device: str
    row: int
    arm: str
    digest: str
    """Of the kernel's source, with its configuration."""
    code: str
    """The verdict's."""
    reference_ms: float = 0.0
    candidate_ms: float = 0.0
    floor_ms: float = 0.0
    """What the row's bytes or operations take at the least, by the device's data sheet; 0 where that is not known."""
    speedup: Interval | None = None
    """Over the reference, FlagGems on a GPU; None where no time counts."""
    beside: dict[str, float] = {}
    """Milliseconds of what else computes the row, by name, from before the judgement."""
    tuned: dict[str, str] = {}
    """Which of FlagGems' entries was charged, and the configurations that its tuner chose."""

    @property
    def key(self) -> Key:
        """What is kept only once."""
        return self.device, self.row, self.arm


def measured(row: Row, arm: str, platform: str, verdict: Verdict) -> Measured:
    """What a verdict says of a row."""
    timing = verdict.timing if verdict.ranked else None
    facts = verdict.reference
    times = {name.removeprefix(MEASURED): float(value) for name, value in facts.items() if name.startswith(MEASURED)}
    return Measured(
        platform=platform, device=verdict.machine.device if verdict.machine else "", row=row.number, arm=arm,
        digest=verdict.source_digest, code=verdict.code.value,
        reference_ms=timing.reference_ms if timing else 0.0, candidate_ms=timing.candidate_ms if timing else 0.0,
        floor_ms=verdict.floor.ms if verdict.floor else 0.0, speedup=timing.speedup if timing else None,
        beside={name: value for name, value in times.items() if not name.startswith(OWN)},
        tuned={name: value for name, value in facts.items() if name == "variant" or name.startswith("tuned.")},
    )  # fmt: skip


def read(path: Path) -> dict[Key, Measured]:
    """What earlier runs have kept. A line of another form, or one that was cut off, is passed over."""
    found: dict[Key, Measured] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            one = msgspec.json.decode(line, type=Measured)
        except msgspec.DecodeError:
            continue
        found[one.key] = one
    return found


def on_device(found: dict[Key, Measured], device: str) -> dict[Key, Measured]:
    """What was measured on a device."""
    return {key: one for key, one in found.items() if one.device == device}


def known(found: dict[Key, Measured], row: Row, digest: str) -> Measured | None:
    """What was measured of a kernel for a row, in any arm: rows share kernels, and arms share configurations."""
    return next((one for one in found.values() if (one.row, one.digest) == (row.number, digest)), None)


def skip_unless_due(path: Path, device: str, row: Row, arm: str, digest: str, until: float) -> None:
    """With a limit of time (`until`, on the monotonic clock, above 0): skip a kernel that is known, or too late.

    One that is known from another arm is kept for this one, too.
    """
    if until and (one := known(on_device(read(path), device), row, digest)) is not None:
        if one.arm != arm:
            append(path, msgspec.structs.replace(one, arm=arm))
        pytest.skip("it was judged before, on this device")
    if until and time.monotonic() > until:
        pytest.skip("time is up; the same command goes on")


def append(path: Path, one: Measured) -> None:
    """Add a line at once: a run that is cut loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(one) + b"\n")


def publish(kept: Path, to: Path, platform: str) -> None:
    """Copy what was measured: tables, the numbers in them, points with their choice, and verdicts with samples."""
    to.mkdir(parents=True, exist_ok=True)
    verdicts = (kept / f"{platform}-verdicts.jsonl").read_bytes()
    packed(to / "records.jsonl").write_bytes(gzip.compress(verdicts, mtime=0))
    for name in (f"{platform}.md", f"{platform}.jsonl", f"sweep-{platform}.jsonl", f"choices-{platform}.json"):
        if (kept / name).exists():
            shutil.copyfile(kept / name, to / name)


def tables(found: Iterable[Measured], arms: Sequence[str], absent: dict[str, str]) -> str:
    """The rows by family and the means, as Markdown. `absent`: by arm, why it has no kernels."""
    by_row: dict[int, dict[str, Measured]] = {}
    for one in found:
        by_row.setdefault(one.row, {})[one.arm] = one
    devices = sorted({one.device for arm in by_row.values() for one in arm.values()})
    parts, effects = (
        [f"{', '.join(devices)}; speedups with 95 % intervals."],
        [effect for effect in EFFECTS if {*effect[1:]} <= {*arms}],
    )
    for family in FAMILIES:
        cells = [
            cells_of(row, by_row[row.number], arms, effects)
            for row in ROWS
            if row.family == family and row.number in by_row
        ]
        if cells:
            columns = [*arms, *(f"{name} effect" for name, *_ in effects), "floor / fastest"]
            headers = [family, "torch us", "vendor us", "ref us", *columns]
            parts.append(tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True))
    parts.append(means(by_row, arms, effects))
    parts += [f"{arm}: {why}" for arm, why in absent.items()]
    return "\n\n".join(parts)


def cells_of(
    row: Row, found: dict[str, Measured], arms: Sequence[str], effects: Sequence[tuple[str, str, str]]
) -> list[str]:
    """One line of a family's table."""
    any_one = next(iter(found.values()))
    vendor = {name: ms for name, ms in any_one.beside.items() if name in ("cudnn", "flashinfer")}
    timed = [one.reference_ms for one in found.values() if one.speedup is not None]
    return [
        row.name(any_one.platform), microseconds(any_one.beside.get("torch")),
        microseconds(min(vendor.values(), default=None)), microseconds(min(timed, default=None)),
        *(speedup(found.get(arm)) for arm in arms),
        *(interval(over(found.get(one), found.get(other))) for _name, one, other in effects), of_floor(found.values()),
    ]  # fmt: skip


def of_floor(found: Iterable[Measured]) -> str:
    """The floor over the fastest arm: "78 %"."""
    timed = [one for one in found if one.speedup is not None and one.floor_ms and one.candidate_ms]
    return f"{max(one.floor_ms / one.candidate_ms for one in timed):.0%}" if timed else "-"


def means(by_row: dict[int, dict[str, Measured]], arms: Sequence[str], effects: Sequence[tuple[str, str, str]]) -> str:
    """Geometric mean with its interval, coverage and rows reached, by family and of all; then the effects' means."""
    lines = []
    for name in (*FAMILIES, "all"):
        rows = [by_row[row.number] for row in ROWS if name in ("all", row.family) and row.number in by_row]
        if rows:
            cells = [mean([row.get(arm) for row in rows]) for arm in arms]
            ratios = [[over(row.get(one), row.get(other)) for row in rows] for _name, one, other in effects]
            cells += [interval(geomean(found)) for found in ratios]
            lines.append([f"{name} ({len(rows)})", *cells])
    headers = ["geomean, coverage, reached", *arms, *(f"{name} effect" for name, *_ in effects)]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def mean(found: Sequence[Measured | None]) -> str:
    """Mean of the rows that were timed, how many were, and how many are REACHED: "1.210 [1.200, 1.220], 8/8, 8"."""
    scored = [one.speedup for one in found if one is not None and one.speedup is not None]
    value = geomean(scored)
    if value is None:
        return "-"
    return f"{interval(value)}, {len(scored)}/{len(found)}, {sum(one.low >= REACHED for one in scored)}"


def geomean(found: Sequence[Interval | None]) -> Interval | None:
    """Geometric mean of the intervals that are there, whose rows err independently; None without any."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    value = math.exp(sum(math.log(one.estimate) for one in known) / len(known))
    below = math.hypot(*(math.log(one.estimate / one.low) for one in known)) / len(known)
    above = math.hypot(*(math.log(one.high / one.estimate) for one in known)) / len(known)
    return msgspec.structs.replace(known[0], estimate=value, low=value * math.exp(-below), high=value * math.exp(above))


def over(one: Measured | None, other: Measured | None) -> Interval | None:
    """How many times faster the second arm is than the first, where both were paired with FlagGems; 1 of one kernel."""
    if one is None or other is None or one.speedup is None or other.speedup is None:
        return None
    a, b = one.speedup, other.speedup
    if one.digest == other.digest:
        return msgspec.structs.replace(b, estimate=1.0, low=1.0, high=1.0)
    return msgspec.structs.replace(b, estimate=b.estimate / a.estimate, low=b.low / a.high, high=b.high / a.low)


def speedup(one: Measured | None) -> str:
    """A cell: the interval, or the reason code of what was not timed."""
    if one is None:
        return "-"
    return interval(one.speedup) if one.speedup is not None else one.code


def interval(found: Interval | None) -> str:
    return f"{found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}]" if found is not None else "-"


def microseconds(ms: float | None) -> str:
    return f"{ms * 1000:.1f}" if ms else "-"
