"""Which code rejects each generic attack on operators that a test file defines, by language.

pytest suites/gate_quality/test_open_attacks.py --platform cpu [--publish]       cpp and python: tests/exploits/open
pytest suites/gate_quality/test_open_attacks.py --platform sm90 [--publish]      cuda, triton, tilelang: tests/gpu/open
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import corpus
import device
import msgspec
import open_kernels
import pytest
from on_gpu import machine_of

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.records import KernelCase, KernelSource, Status, Verdict

GENERIC = {
    "S1": "unwritten output", "R1": "memo by pointer", "R3": "memo by contents", "R5": "last answer again",
    "T3": "late work", "S4": "input mutation", "S2": "in-place tensor left alone", "N2": "lower precision",
    "N4": "part left out", "N5": "option ignored", "N6": "inputs assumed", "W5": "framework computes",
}  # fmt: skip
"""What attacks of one entry of the catalogue do."""


class Attack(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel to judge."""

    generic: str
    name: str
    case: KernelCase
    source: KernelSource
    codes: tuple[str, ...]
    """Which must decide."""
    changed: dict[str, float] = {}
    """Settings of its own."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel, and what decided over it."""

    generic: str
    kernel: str
    surface: str
    operator: str
    expected: tuple[str, ...]
    code: str
    message: str
    machine: str

    @property
    def holds(self) -> bool:
        """Whether it was rejected as its file says."""
        return self.code in self.expected


def attacks_on_a_cpu() -> list[Attack]:
    """The part of the exploit corpus whose operators a file defines."""
    return [
        Attack(
            generic=GENERIC[item.fields["id"]], name=item.name, case=item.case, source=item.kernel,
            codes=item.expected.codes,
            changed={"time_limit_s": float(item.fields["time-limit"])} if "time-limit" in item.fields else {},
        )
        for item in corpus.read_all("open/attacks")
    ]  # fmt: skip


def attacks_on_a_gpu() -> list[Attack]:
    """The attacks of the tests on a GPU."""
    return [
        Attack(
            generic=item.generic, name=item.name, case=item.case, source=item.source, codes=item.codes,
            changed=open_kernels.COMPILER_LIMITS,
        )
        for item in open_kernels.ATTACKS
    ]  # fmt: skip


def row_of(attack: Attack, verdict: Verdict) -> Row:
    """What decided over an attack."""
    return Row(
        generic=attack.generic, kernel=attack.name, surface=attack.source.surface.value,
        operator=attack.case.operator.rpartition(":")[2], expected=attack.codes, code=verdict.code.value,
        message=verdict.reasons[0].message, machine=machine_of(verdict),
    )  # fmt: skip


def judged(attacks: Iterable[Attack], platform: str, settings: GateSettings) -> Iterator[Row]:
    """A row for each attack; with one gate, whose processes are started once."""
    with Gate(platform, settings) as gate:
        for attack in attacks:
            gate._context.settings = msgspec.structs.replace(settings, **attack.changed)
            yield row_of(attack, gate.judge(attack.case, attack.source))


def grid_of(rows: list[Row]) -> list[str]:
    """A line for each generic attack with the codes in each language."""
    surfaces = list(dict.fromkeys(row.surface for row in rows))
    lines = ["| generic attack | " + " | ".join(surfaces) + " |", "|---" * (len(surfaces) + 1) + "|"]
    for generic in dict.fromkeys(row.generic for row in rows):
        found = [{row.code for row in rows if (row.generic, row.surface) == (generic, surface)} for surface in surfaces]
        lines.append(f"| {generic} | " + " | ".join(", ".join(sorted(codes)) for codes in found) + " |")
    return lines


def page(rows: list[Row], platform: str) -> str:
    """The table."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = next((row.machine for row in rows if row.machine), "machine unknown")
    lines = [
        f"# Generic attacks on operators of a test file, {platform}", "", f"{date}, {machine}.", "",
        f"**{sum(row.holds for row in rows)} of {len(rows)} rejected as expected.**", "", *grid_of(rows), "",
        "| kernel | surface | operator | expected | decided |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        decided = row.code if row.holds else f"**{row.code}**: {row.message}"
        lines.append(
            f"| {row.kernel} | {row.surface} | {row.operator} | {' or '.join(row.expected)} | {decided} |"
        )  # fmt: skip
    return "\n".join([*lines, "", f"Raw records: `open_attacks-{platform}.jsonl`."])


def test_generic_attacks_are_rejected(
    request: pytest.FixtureRequest, klineage_session: KlineageSession, tmp_path: Path,
    publish: Callable[[str, str, list[Row]], None],
) -> None:  # fmt: skip
    """Every one by a code that its file names; one whose compiler is absent is shown, and counts as not tried."""
    platform = klineage_session.platform
    if platform == "cpu":
        attacks, settings = attacks_on_a_cpu(), corpus.quick_settings(tmp_path)
    else:
        attacks, settings = attacks_on_a_gpu(), device.quick_settings(request.config, tmp_path)
    rows = list(judged(attacks, platform, settings))
    publish(f"open_attacks-{platform}", page(rows, platform), rows)
    skipped = f"{Status.SKIPPED.value}."
    tried = [row for row in rows if not row.code.startswith(skipped)]
    assert tried
    assert not [(row.kernel, row.surface, row.code, row.message) for row in tried if not row.holds]
