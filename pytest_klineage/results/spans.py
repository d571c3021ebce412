"""Neighbouring steps of a lineage that were timed together: a file of lines beside lineage.json.

Nothing here is worked out from the effects of single steps, nor from two timings against a third kernel.
"""

from __future__ import annotations

from pathlib import Path

from pytest_klineage.records import Interval, Lineage, TimedSpan
from pytest_klineage.results.packed import append_line, read_lines
from pytest_klineage.results.retimed import verdict_problems

SPANS_FILE = "spans.verdicts.jsonl"


def read_spans(folder: Path) -> dict[tuple[str, ...], Interval]:
    """Effects of the spans of a lineage's folder, by the digests of their steps; the later line wins.

    Raises BadRecord for a line that does not decode.
    """
    found = {one.steps: one.effect for one in read_lines(folder / SPANS_FILE, TimedSpan)}
    return {steps: effect for steps, effect in found.items() if effect is not None}


def keep_span(folder: Path, one: TimedSpan) -> None:
    """Add a span that was timed. Raises StoreError."""
    append_line(folder / SPANS_FILE, one)


def span_problems(lineage: Lineage, folder: Path) -> list[str]:
    """What is wrong with timed spans: no neighbours of this lineage, another kernel or case, a disturbed timing."""
    chain = [step.digest for step in lineage.transitions]
    found = []
    for number, one in enumerate(read_lines(folder / SPANS_FILE, TimedSpan), start=1):
        found += [f"{SPANS_FILE}: line {number}: {text}" for text in _problems(lineage, chain, one)]
    return found


def _problems(lineage: Lineage, chain: list[str], one: TimedSpan) -> list[str]:
    at = chain.index(one.steps[0]) if one.steps and one.steps[0] in chain else len(chain)
    if len(one.steps) < 2 or tuple(chain[at : at + len(one.steps)]) != one.steps:
        return ["its steps are no neighbours of this lineage"]
    return [*verdict_problems(lineage, one.verdict, lineage.transitions[at].before)]
