"""Generated regions of the pages: `make tables` rewrites each from the published records; a test says which are stale.

A region stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from tabulate import tabulate

from pytest_klineage.records import Timing, Verdict
from pytest_klineage.report.aggregate import summarise
from pytest_klineage.report.tables import milliseconds, ratio, speedup_text
from pytest_klineage.results.runs import Record

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
REGION = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.S)
ORDER = ("gemm", "fmha", "topk", "gdn", "conv2d")
"""Operators in the order of the README; a case is the operator's name, sizes and options."""
POLICIES = ("do_bench", "cudagraph")
"""Beside the policy that decides, `paired`."""


def main_tier(run: str) -> str:
    """The main tier of one run: device, date, a row per case, and the geometric mean with its coverage."""
    verdicts = sorted(published(run), key=lambda one: (ORDER.index(one.case.operator), one.case.id))
    policies = [name for name in POLICIES if any(other_timing(one, name) for one in verdicts)]
    rows = [[*row_of(one), *(speedup(other_timing(one, name)) for name in policies)] for one in verdicts]
    headers = ("case", "reference", "reference ms", "kernel ms", "speedup", *policies)
    table = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)
    summary = summarise(verdicts)
    mean = "no mean" if summary.geomean is None else f"geomean {ratio(summary.geomean)}x"
    machine = verdicts[0].machine
    device = machine.device if machine is not None else "an unknown device"
    return (
        f"{device}, {verdicts[0].judged_at[:10]}; policy `paired`, 95 % intervals; samples in `results/{run}`.\n\n"
        f"{table}\n\n{mean} over {summary.scored} of {summary.judged} cases.\n"
    )


def published(run: str) -> list[Verdict]:
    """Every verdict of a published run."""
    lines = (ROOT / "results" / run / "records.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=Record).verdict for line in lines]


def row_of(verdict: Verdict) -> Iterable[str]:
    """Case, reference, both times and the paired speedup."""
    timing = verdict.timing if verdict.scored else None
    reference = verdict.reference.get("label") or verdict.case.reference
    times = (milliseconds(timing.reference_ms), milliseconds(timing.candidate_ms)) if timing else ("-", "-")
    return (f"`{verdict.case.id}`", reference, *times, speedup_text(verdict) if timing else verdict.code.value)


def other_timing(verdict: Verdict, policy: str) -> Timing | None:
    """The timing of the same kernel under another policy."""
    return next((one for one in verdict.other_timings if one.policy == policy), None)


def speedup(timing: Timing | None) -> str:
    """A speedup without its interval."""
    return "-" if timing is None else f"{ratio(timing.speedup.estimate)}x"


TABLES: dict[str, Callable[[], str]] = {
    "main-tier-sm90": lambda: main_tier("main_tier-sm90"),
    "main-tier-cpu": lambda: main_tier("main_tier-cpu"),
}


def regenerated(text: str) -> str:
    """A page's text with every region made from the records. Raises KeyError for a region that has no table."""
    return REGION.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}{found[3]}", text)


def main() -> None:
    """Rewrite the regions of all pages."""
    for page in PAGES:
        before = page.read_text()
        if (after := regenerated(before)) != before:
            page.write_text(after)
            sys.stdout.write(f"make: {page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
