"""Figures that the pages draw from records, and that no table of a suite holds, follow from those records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from pytest_klineage import Timing
from pytest_klineage.gate.statistics import log_ratios, median
from pytest_klineage.results import Record

ROOT = Path(__file__).parents[2]
FACTS = ROOT / "docs" / "measured-facts.md"


def text_of(page: Path) -> str:
    """A page without its line breaks."""
    return " ".join(page.read_text().split())


def charged_for_the_host() -> Iterator[str]:
    """The rows of the table in measured-facts.md, from the records of the runs: what two clocks of one block differ."""
    for run in ("main_tier-sm90", "main_tier-sm90-shared-host", "main_tier-sm90-earlier"):
        for line in (ROOT / "results" / run / "records.jsonl").read_text().splitlines():
            verdict = msgspec.json.decode(line, type=Record).verdict
            for timing in filter(None, (verdict.timing, *verdict.other_timings)):
                charge = timing.wall_gap_ms - timing.reference_wall_gap_ms
                if timing.policy != "do_bench" or charge <= 0:
                    continue
                name = verdict.case.operator + (", channels_last" if verdict.case.options else "")
                gaps = f"{1e3 * timing.wall_gap_ms:.1f} and {1e3 * timing.reference_wall_gap_ms:.1f}"
                times = f"{1e3 * timing.candidate_ms:.1f} | {1e3 * (timing.candidate_ms - charge):.1f}"
                before = timing.reference_ms / timing.candidate_ms
                after = timing.reference_ms / (timing.candidate_ms - charge)
                yield f"| `{run}` | {name} | {gaps} | {times} | {before:.2f}x | {after:.2f}x |"


def test_what_do_bench_charged_is_what_the_records_say() -> None:
    page = FACTS.read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `main_tier-sm90")]
    assert rows == list(charged_for_the_host())


def test_what_the_last_start_of_top_k_decided_is_what_the_record_says() -> None:
    lines = (ROOT / "results" / "main_tier-sm90" / "records.jsonl").read_text().splitlines()
    timing = next(
        record.verdict.timing
        for record in (msgspec.json.decode(line, type=Record) for line in lines)
        if record.verdict.case.operator == "topk"
    )
    assert timing is not None
    ratios = log_ratios(timing.reference_samples_ms, timing.candidate_samples_ms)
    groups = [ratios[start:end] for start, end in pairwise([*timing.starts, len(ratios)])]
    assert [len(group) for group in groups] == [4] * 7 + [148]
    last, of_all = math.exp(median(groups[-1])), math.exp(median([median(group) for group in groups]))
    text = text_of(FACTS)
    assert "seven starts of 4 pairs and one of 148" in text
    assert f"Its published speedup is {timing.speedup.estimate:.2f}x, the last start's own is {last:.2f}x" in text
    assert f"the median over the eight starts' own medians is {of_all:.2f}x" in text


def loads(name: str) -> list[float]:
    """The foreign load of every timing of an ablation."""
    path = ROOT / "results" / "ablations" / f"{name}-cpu.jsonl"
    return [
        timing.foreign_load for line in path.read_text().splitlines() for timing in timings(msgspec.json.decode(line))
    ]


def timings(record: object) -> Iterator[Timing]:
    """Every timing somewhere in a record."""
    if isinstance(record, dict):
        if "foreign_load" in record and "reference_ms" in record:
            yield msgspec.convert(record, Timing)
            return
        record = list(record.values())
    if isinstance(record, list):
        for item in record:
            yield from timings(item)


def test_how_busy_the_machine_of_the_ablations_was_is_what_the_timings_say() -> None:
    with_cards, without = loads("roundtrip_recovery"), loads("generated_only")
    busy, count = sum(load > 0.25 for load in with_cards + without), len(with_cards) + len(without)
    expected = (
        f"the median `foreign_load` is {median(with_cards):.2f} with cards and {median(without):.2f} without, and "
        f"{busy} of {count} timings are beyond"
    )
    assert expected in text_of(ROOT / "results" / "ablations" / "README.md")
