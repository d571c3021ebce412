"""How often the gate accuses an honest kernel, on a CPU: experts, the corpus's benign twins, and honest/.

pytest suites/gate_quality/test_false_alarms.py --platform cpu [--publish]
pytest suites/gate_quality/test_false_alarms.py --platform cpu --for 8      eight minutes more; go on with one version
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from corpus import read
from on_gpu import kept_rows, results_file

from pytest_klineage import GateSettings
from pytest_klineage.gate import Gate
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelCase, KernelSource, Verdict

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 1.0
FOLDERS = {
    "written for this set": ROOT / "suites" / "gate_quality" / "honest",
    "written for this set, a user's operator": ROOT / "suites" / "gate_quality" / "open" / "honest",
    "benign twin": ROOT / "tests" / "exploits" / "twins",
    "benign twin, a user's operator": ROOT / "tests" / "exploits" / "open" / "twins",
}
NAME = "false_alarms"


class Honest(msgspec.Struct, frozen=True, kw_only=True):
    """One honest kernel and what the gate said of it."""

    kind: str
    name: str
    what: str
    operator: str
    surface: str
    library: str
    code: str
    message: str
    speedup: float | None
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What no other row has."""
        return self.kind, self.name, self.operator, self.surface

    @property
    def hurt(self) -> bool:
        """Whether it was rejected for anything but its speed."""
        return self.code.partition(".")[0] not in ("accepted", "slower", "inconclusive")


def kernels() -> list[tuple[str, str, KernelCase, KernelSource, int]]:
    """Kind, what it does, case, source and threads (0 for all) of every kernel."""
    found = []
    for kind, folder in FOLDERS.items():
        for path in sorted(folder.iterdir()):
            one = read(path)
            found.append((kind, one.fields["mechanism"], one.case, one.kernel, int(one.fields.get("threads", 0))))
    for expert in find_experts(ROOT / "experts", "cpu"):
        case = msgspec.structs.replace(paper_case(expert.operator, "cpu", "torch"), at_least=0.0001)
        for method in ("expert", "naive"):
            found.append((method, "of experts/", case, expert.source(method), 0))
    return found


def key_of(one: tuple[str, str, KernelCase, KernelSource, int]) -> tuple[str, str, str, str]:
    """The key of a kernel's row."""
    kind, _, case, source, _ = one
    name = source.label if kind in FOLDERS else case.operator
    return kind, name, case.operator.rpartition(":")[2], source.surface.value


def judged(kind: str, what: str, case: KernelCase, verdict: Verdict, surface: str, name: str) -> Honest:
    """A verdict as a row."""
    return Honest(
        kind=kind, name=name, what=what, operator=case.operator.rpartition(":")[2], surface=surface,
        library=case.library.value, code=verdict.code.value, message=verdict.reasons[0].message,
        speedup=verdict.timing.speedup.estimate if verdict.timing else None,
        seconds=verdict.overhead_s + (verdict.timing.seconds if verdict.timing else 0.0),
    )  # fmt: skip


def table(rows: list[Honest], machine: str) -> str:
    """The page."""
    hurt = [row for row in rows if row.hurt]
    lines = [
        "# Honest kernels on a CPU: how many the gate accuses", "",
        f"{machine}; `--klineage-time-limit={TIME_LIMIT_S:g}`, any load of the machine and any "
        "scatter allowed: speeds say nothing here. A kernel is hurt when it is rejected for anything but its speed.",
        "",
        f"**{len(hurt)} of {len(rows)} hurt.**", "",
        "| kind | kernels | hurt | accepted | slower | inconclusive |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        counts = [sum(row.code.startswith(status) for row in own) for status in ("accepted", "slower", "inconclusive")]
        cells = [kind, len(own), sum(row.hurt for row in own), *counts]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| kernel | kind | operator | what it does | verdict |", "|---|---|---|---|---|"]
    lines += [f"| {row.name} ({row.surface}) | {row.kind} | {row.operator} | {row.what} | {row.code} |" for row in rows]
    return "\n".join([*lines, "", f"Raw records: `{NAME}.jsonl`."])


def test_no_honest_kernel_is_accused(
    measured_here: str, publish: Callable[[str, str, list[Honest]], None], tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """At least sixty kernels that do nothing wrong, each in its own way; none may be rejected."""
    minutes, path = request.config.getoption("--for"), results_file(request.config, NAME)
    rows = kept_rows(path, Honest, without=lambda row: False) if minutes else []
    done, until = {row.key for row in rows}, time.monotonic() + 60 * (minutes or float("inf"))
    everything = kernels()
    chosen = [one for one in everything if key_of(one) not in done]
    for threads in sorted({one[4] for one in chosen}):
        settings = GateSettings(
            time_limit_s=TIME_LIMIT_S, busy_limit=1.0, spread_limit=1e6, seeds=1, threads=threads,
            cache_dir=tmp_path,
        )  # fmt: skip
        with Gate("cpu", settings) as gate:
            for one in (one for one in chosen if one[4] == threads and time.monotonic() < until):
                kind, what, case, source, _ = one
                rows.append(judged(kind, what, case, gate.judge(case, source), source.surface.value, key_of(one)[1]))
    publish(NAME, table(rows, measured_here), rows)
    if len(rows) < len(everything):
        pytest.skip(f"{len(rows)} of {len(everything)} kernels: the same command goes on")
    assert len(rows) >= 60
    assert not [(row.name, row.code, row.message) for row in rows if row.hurt]
