"""Baselines on disk: results/baselines/<platform>/<device>/<name>.json. What is compared, and how, is report's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from pytest_klineage.errors import BadRecord, StoreError, UsageError
from pytest_klineage.records import Verdict, from_json
from pytest_klineage.records.baseline import Baseline, Pin, samples_digest
from pytest_klineage.records.verdict import DISTURBED
from pytest_klineage.results.storage import record_json, write_atomically

FOLDER = "baselines"
PinKey: TypeAlias = tuple[str, str, str, int]
"""Of a pin and of what it was made from: test, case, label, number."""


def pins_of(
    verdicts: Iterable[tuple[str, Verdict]], again: Mapping[PinKey, Verdict] | None = None
) -> tuple[list[Pin], list[str]]:
    """Pins of what was timed on a quiet machine, and one sentence about each verdict that was not.

    `verdicts` are pairs of a test's id and a verdict, in order; `again` are second judgements of them.
    """
    pins: list[Pin] = []
    left: list[str] = []
    for (nodeid, verdict), number in zip(pairs := list(verdicts), numbered(pairs), strict=True):
        second = (again or {}).get((nodeid, verdict.case.id, verdict.label, number))
        unfit = next((said for said in (verdict, second) if said is not None and not can_be_pinned(said)), None)
        timing, machine = verdict.timing, verdict.machine
        if unfit is not None or timing is None or machine is None:
            left.append(f"{verdict.case.id} {verdict.label}".rstrip() + f" is {(unfit or verdict).code.value}")
            continue
        pin = Pin(
            nodeid=nodeid, case=verdict.case, label=verdict.label, number=number, surface=verdict.surface,
            source_digest=verdict.source_digest, status=verdict.status, timing=timing,
            again=second.timing if second else None, reference=verdict.reference, machine=machine,
            pinned_at=verdict.judged_at, samples_digest=samples_digest(timing, second.timing if second else None),
        )  # fmt: skip
        pins.append(pin)
    return pins, left


def can_be_pinned(verdict: Verdict) -> bool:
    """Whether it has a time that nothing disturbed."""
    timed = verdict.timing is not None and verdict.machine is not None
    return timed and verdict.scored and verdict.code not in DISTURBED


def numbered(verdicts: Iterable[tuple[str, Verdict]]) -> list[int]:
    """For each verdict, how many before it are of the same test, case and label."""
    seen: Counter[tuple[str, str, str]] = Counter()
    numbers = []
    for nodeid, verdict in verdicts:
        key = (nodeid, verdict.case.id, verdict.label)
        numbers.append(seen[key])
        seen[key] += 1
    return numbers


def check_name(name: str) -> str:
    """The name of a baseline. Raises UsageError for one that could not be a file's."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,99}", name):
        raise UsageError(
            f"a baseline is called by letters, digits and any of . _ + -, such as main or v1.2, got {name!r}"
        )
    return name


def baseline_path(root: Path, platform: str, device: str, name: str) -> Path:
    """Where a baseline lies; `root` is the results folder, `device` a product name."""
    key = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"
    return root / FOLDER / platform / key / f"{check_name(name)}.json"


def find_baselines(root: Path, name: str) -> list[Baseline]:
    """The baselines of that name on all platforms and devices. Raises BadRecord for a damaged one."""
    return [read_baseline(path) for path in sorted((root / FOLDER).glob(f"*/*/{check_name(name)}.json"))]


def read_baseline(path: Path) -> Baseline:
    """Read one file. Raises UsageError when it is absent, BadRecord when it is damaged or its samples were edited."""
    try:
        found = from_json(path.read_bytes(), Baseline)
    except FileNotFoundError as error:
        raise UsageError(f"{path} is not there; --klineage-save={path.stem} makes it") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except BadRecord as error:
        raise BadRecord(f"{path}: {error}; pin it again with --klineage-save={path.stem}") from error
    for pin in found.pins:
        if samples_digest(pin.timing, pin.again) != pin.samples_digest:
            raise BadRecord(
                f"{path}: the samples of {pin.case.id} {pin.label} are not those that were pinned; "
                f"pin it again with --klineage-save={path.stem}"
            )
    return found


def save_pins(root: Path, name: str, pins: Iterable[Pin]) -> list[tuple[Path, Baseline]]:
    """Pin under a name: one file for each platform and device. Raises StoreError, BadRecord.

    A pin replaces the older one of the same kernel; those of kernels that were not judged now stay, so a part of a
    suite can be pinned again. They say for themselves when and against what they were timed.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str, str, int], Pin]] = {}
    for pin in pins:
        groups.setdefault((pin.machine.platform, pin.machine.device), {})[pin.key] = pin
    saved = []
    for (platform, device), fresh in groups.items():
        path = baseline_path(root, platform, device, name)
        kept = {pin.key: pin for pin in read_baseline(path).pins} if path.exists() else {}
        chosen = tuple(pin for _, pin in sorted({**kept, **fresh}.items()))
        baseline = Baseline(name=name, platform=platform, device=device, pins=chosen)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, record_json(baseline))
        except OSError as error:
            raise StoreError(f"the baseline {path} cannot be written: {error.strerror or error}") from error
        saved.append((path, baseline))
    return saved
