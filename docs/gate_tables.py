"""Tables of what the gate was found to do, for regions of the pages: the PR gate's detections, and reruns."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

from rerun_intervals import Rerun, between_runs_of
from tabulate import tabulate

from pytest_klineage.records import Interval
from pytest_klineage.report.reruns import widened
from pytest_klineage.results.packed import line_files, read_lines

QUALITY = Path(__file__).parents[1] / "results" / "gate_quality"


def pr_gate() -> str:
    """How many kernels the PR gate found slower, by how much they were slowed, from the published tables."""
    pages = [(QUALITY / f"detection-{name}.md").read_text() for name in ("sm90", "cpu")]
    found = [detected(page) for page in pages]
    loops = sorted({loop for rows in found for loop in rows})
    rows = [(*about(page), *(own.get(loop, "-") for loop in loops)) for page, own in zip(pages, found, strict=True)]
    headers = ("slowed by", "margin", *("nothing" if loop == 0 else f"{loop:g} %" for loop in loops))
    return f"{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}\n"


def detected(page: str) -> dict[float, str]:
    """By slowdown in percent how many trials over all kernels found it, from a published table of detections."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    names = next(row for row in rows if "found slower" in row)
    over_all = [dict(zip(names, row, strict=True)) for row in rows if row[0] == "**all**"]
    return {float(row["busy loop"][:-1]): f"{row['found slower'].split()[0]} of {row['trials']}" for row in over_all}


def about(page: str) -> tuple[str, str]:
    """Device and margin of a published table of detections."""
    title, device = page.splitlines()[0], page.splitlines()[2]
    return re.split(r", \d{4}-", device)[0], title.partition("at a margin of ")[2]


def reruns() -> str:
    """Whether intervals of one kernel's recorded runs on an H200 overlap, and what estimates vary by beyond them."""
    groups: dict[tuple[str, str], list[Interval]] = {}
    for path in line_files(QUALITY, "reruns*-sm90"):
        for one in read_lines(path, Rerun):
            groups.setdefault((one.case, one.source_digest), []).append(one.speedup)
    spread = between_runs_of("main_tier-sm90")
    pairs = [(case, *pair) for (case, _), intervals in groups.items() for pair in combinations(intervals, 2)]
    as_said, wide = (
        sum(overlap(widened(one, sd.get(case, 0.0)), widened(other, sd.get(case, 0.0))) for case, one, other in pairs)
        for sd in ({}, spread)
    )
    by_case = ", ".join(f"{case.partition('-')[0]} {100 * share:.2f} %" for case, share in sorted(spread.items()))
    return (
        f"Of {len(pairs)} pairs of one kernel's recorded runs on H200s {as_said} have overlapping intervals. Beyond "
        f"them estimates vary from run to run by up to (s.d.): {by_case}; with that added {wide} pairs overlap.\n"
    )


def overlap(one: Interval, other: Interval) -> bool:
    """Whether two intervals have a number in common."""
    return one.low <= other.high and other.low <= one.high


def gate_quality() -> str:
    """Every published table on the gate, with its title."""
    pages = {path.stem: path.read_text().partition("\n")[0].removeprefix("# ") for path in sorted(QUALITY.glob("*.md"))}
    rows = [(f"`{name}`", title) for name, title in pages.items()]
    return f"{tabulate(rows, ('table', 'is about'), tablefmt='pipe', disable_numparse=True)}\n"


GATE_TABLES: dict[str, Callable[[], str]] = {"pr-gate": pr_gate, "reruns": reruns, "gate-quality": gate_quality}
