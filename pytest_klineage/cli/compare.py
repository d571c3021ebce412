"""`pytest-klineage compare`: two runs, or a baseline and a run, from their records."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.cli.console import FAILED, OK, Commands, run_path, write_to
from pytest_klineage.errors import UsageError

if TYPE_CHECKING:
    from pytest_klineage.records.baseline import Baseline, Comparison
    from pytest_klineage.results.runs import Run

EXIT_CODES = """\
exit codes:
  0  done; without --fail whatever was found
  1  with --fail: a kernel is slower or broken, or could not be compared
  2  the command line, or what it names, is not valid
"""


def add_compare(commands: Commands) -> None:
    """Add the command `compare`."""
    compare = commands.add_parser(
        "compare", help="compare the kernels of two runs, or of a baseline and a run", epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    compare.add_argument("old", metavar="OLD", help="a baseline's .json, a run's directory or its records.jsonl")
    compare.add_argument("new", metavar="NEW", help="a run's directory or its records.jsonl; or: latest (in results/)")
    compare.add_argument("--fail", metavar="slower:PERCENT", help="end with 1 for what is slower by more, or refused")
    compare.add_argument("--markdown", action="store_true", help="write Markdown instead of a terminal table")
    compare.add_argument("--output", metavar="FILE", type=Path, help="write to FILE instead of the standard output")
    compare.set_defaults(command=run_compare)


def run_compare(arguments: argparse.Namespace) -> int:
    """`compare`."""
    import msgspec

    from pytest_klineage.report.compare import MARGIN, read_tolerance
    from pytest_klineage.report.comparisons import comparison_lines, comparisons_markdown

    margin = read_tolerance(arguments.fail) if arguments.fail else MARGIN
    old, run = _old(Path(arguments.old)), _run(arguments.new)
    found = _comparisons(old, run, margin)
    if not found:
        raise UsageError(f"{run.path} has no verdict to compare")
    if not arguments.old.endswith(".json"):
        # A run has no name to be pinned again under.
        found = [msgspec.structs.replace(item, advice="") if "-save=" in item.advice else item for item in found]
    failing = arguments.fail is not None
    text = comparisons_markdown(found, failing=failing) if arguments.markdown else _lines(comparison_lines(found))
    write_to(arguments.output, text + _lines(f"warning: {warning}" for warning in run.warnings))
    return FAILED if failing and any(comparison.outcome.bad for comparison in found) else OK


def _comparisons(old: list[Baseline], run: Run, margin: float) -> list[Comparison]:
    """Every verdict of the run with the pin that its device has of it."""
    from pytest_klineage.report.compare import compare_with, missing
    from pytest_klineage.results.baselines import numbered

    pairs = [(record.nodeid, record.verdict) for record in run.records]
    found = []
    for (nodeid, verdict), number in zip(pairs, numbered(pairs), strict=True):
        device = verdict.machine.device if verdict.machine else ""
        chosen = next((baseline for baseline in old if baseline.device == device), None)
        if chosen is None:
            found.append(missing(nodeid, verdict, old[0].name, old, margin=margin))
        else:
            found.append(compare_with(chosen, nodeid, verdict, number=number, margin=margin))
    return found


def _old(path: Path) -> list[Baseline]:
    """What to compare with: a baseline, or the pins that a run comes to, by device."""
    from pytest_klineage.records.baseline import Baseline
    from pytest_klineage.results.baselines import pins_of, read_baseline

    if path.suffix == ".json" and path.name != "run.json":
        return [read_baseline(path)]
    run = _run(str(path))
    pins, _ = pins_of((record.nodeid, record.verdict) for record in run.records)
    devices = dict.fromkeys((pin.machine.platform, pin.machine.device) for pin in pins)
    if not devices:
        raise UsageError(f"{path} has no timed verdict to compare with")
    name = run.path.parent.name if run.path.is_file() else run.path.name
    return [
        Baseline(
            name=name, platform=platform, device=device,
            pins=tuple(pin for pin in pins if pin.machine.device == device),
        )
        for platform, device in devices
    ]  # fmt: skip


def _run(given: str) -> Run:
    from pytest_klineage.results.packed import is_there
    from pytest_klineage.results.runs import read_run

    path = run_path(given)
    if not path.exists() and not is_there(path):
        raise UsageError(f"{path} is not there; give a run's directory, its records.jsonl, or: latest")
    return read_run(path)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
