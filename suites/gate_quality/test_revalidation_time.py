"""How long it takes to validate every committed lineage and card again, without a model, as `pytest` does it."""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
SUITES = {"suites/lineage/test_revalidate.py": 300.0, "suites/admission": None}
"""By what is run: the most seconds allowed, if any."""


class Revalidation(msgspec.Struct, frozen=True, kw_only=True):
    """Raw figures: wall seconds of the whole command, and of every test in it."""

    suite: str
    seconds: float
    tests: dict[str, float]
    outcomes: dict[str, int]


def run(suite: str, folder: Path) -> Revalidation:
    """One run in a process of its own. What fails is counted: a busy machine can hide the sign of a small step."""
    report = folder / "report.xml"
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", suite, "--platform=cpu", "-q", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    tests, outcomes = {}, {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        tests[f"{case.get('classname')}::{case.get('name')}"] = float(case.get("time", 0))
        children = {child.tag for child in case}
        outcomes["failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"] += 1
    return Revalidation(suite=suite, seconds=seconds, tests=tests, outcomes=outcomes)


def test_revalidation_time(
    tmp_path: Path, publish: Callable[[str, str, list[Revalidation]], None], measured_here: str
) -> None:
    """The five lineages of the CPU are validated again within five minutes."""
    found = [run(suite, tmp_path) for suite in SUITES]
    lines = [
        "# How long it takes to validate lineages and cards again\n",
        f"{measured_here}. Each command in a process of its own, one after the other, without a model.\n",
        "| command | passed | failed | skipped | measured | target |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        limit = SUITES[one.suite]
        counts = " | ".join(str(one.outcomes[name]) for name in ("passed", "failed", "skipped"))
        lines.append(
            f"| `pytest {one.suite} --platform cpu` | {counts} | {one.seconds:.0f} s | "
            f"{'' if limit is None else f'{limit:.0f} s'} |"
        )
    publish("revalidation", "\n".join(lines) + "\n\nRaw figures: `revalidation.jsonl`.", found)
    for one in found:
        limit = SUITES[one.suite]
        assert limit is None or one.seconds <= limit, one.suite
        assert not one.outcomes["failed"], one.suite
