"""Figures that the pages draw from records, and that no table of a suite holds, follow from those records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage import Timing, Verdict
from pytest_klineage.gate.timing.statistics import log_ratios, median, paired_interval
from pytest_klineage.results.runs import Record

ROOT = Path(__file__).parents[2]
FACTS = ROOT / "docs" / "measured-facts.md"


def text_of(page: Path) -> str:
    """A page without its line breaks."""
    return " ".join(page.read_text().split())


def verdicts_of(run: str) -> list[Verdict]:
    """Every verdict of a published run."""
    lines = (ROOT / "results" / run / "records.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=Record).verdict for line in lines]


def charged_for_the_host() -> Iterator[str]:
    """The rows of the table in measured-facts.md, from the records of the runs: what two clocks of one block differ."""
    for run in ("main_tier-sm90-charged", "main_tier-sm90-shared-host", "main_tier-sm90-earlier"):
        for verdict in verdicts_of(run):
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
    verdicts = verdicts_of("main_tier-sm90-charged")
    timing = next(verdict.timing for verdict in verdicts if verdict.case.operator == "topk")
    assert timing is not None
    ratios = log_ratios(timing.reference_samples_ms, timing.candidate_samples_ms)
    groups = [ratios[start:end] for start, end in pairwise([*timing.starts, len(ratios)])]
    assert [len(group) for group in groups] == [4] * 7 + [148]
    last, of_all = math.exp(median(groups[-1])), math.exp(median([median(group) for group in groups]))
    text = text_of(FACTS)
    assert "seven starts of 4 pairs and one of 148" in text
    assert f"Its published speedup is {timing.speedup.estimate:.2f}x, the last start's own is {last:.2f}x" in text
    assert f"the median over the eight starts' own medians is {of_all:.2f}x" in text


def test_what_do_bench_charges_now_is_what_the_record_says() -> None:
    timings_of = [
        (verdict.case.operator, timing)
        for verdict in verdicts_of("main_tier-sm90")
        for timing in verdict.other_timings
        if timing.policy == "do_bench"
    ]
    assert len(timings_of) == 6
    gaps = [(name, 1e3 * item.reference_wall_gap_ms, 1e3 * item.wall_gap_ms) for name, item in timings_of]
    theirs, ours = ([gap[side] for gap in gaps if gap[0] != "fmha"] for side in (1, 2))
    ((_, their_long, our_long),) = (gap for gap in gaps if gap[0] == "fmha")
    assert not any(sum(timing.candidate_charges_ms) for _, timing in timings_of)
    expected = (
        f"{min(theirs):.1f} to {max(theirs):.1f} us a call and the candidate's {min(ours):.1f} to {max(ours):.1f} us, "
        f"for attention {their_long:.1f} and {our_long:.1f} us, and nothing is charged"
    )
    assert expected in text_of(FACTS)
    *most, last = [f"{timing.speedup.estimate:.2f}x" for _, timing in sorted(timings_of, key=in_the_readmes_order)]
    assert f"Under `do_bench` they are {', '.join(most)} and {last}." in text_of(ROOT / "README.md")


def test_the_readmes_table_is_what_the_records_say_and_their_intervals_follow_from_their_samples() -> None:
    readme = (ROOT / "README.md").read_text()
    for verdict in verdicts_of("main_tier-sm90"):
        timing = verdict.timing
        assert timing is not None
        said = timing.speedup
        assert f"| {said.estimate:.2f}x [{said.low:.2f}, {said.high:.2f}] |" in readme
        again = paired_interval(timing.reference_samples_ms, timing.candidate_samples_ms, starts=timing.starts)
        assert (again.low, again.estimate, again.high) == pytest.approx((said.low, said.estimate, said.high), rel=1e-4)


def references_by_name(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a table of references."""
    path = ROOT / "results" / "gate_quality" / f"{name}.jsonl"
    return {row["name"]: row for row in map(msgspec.json.decode, path.read_text().splitlines())}


def cudnn_by_start(run: str, layout: str) -> list[float]:
    """Microseconds of cuDNN's convolution in every start of a run, smallest first."""
    timing = next(
        verdict.timing
        for verdict in verdicts_of(run)
        if verdict.case.operator == "conv2d" and verdict.case.options.get("layout", "nchw") == layout
    )
    assert timing is not None
    starts = pairwise([*timing.starts, len(timing.reference_samples_ms)])
    return sorted(1e3 * median(timing.reference_samples_ms[start:end]) for start, end in starts)


def test_the_speeds_of_cudnn_after_one_search_are_what_the_records_say() -> None:
    """By start in the main tier; the stages have one start each."""
    text = text_of(FACTS)
    by_start = cudnn_by_start("main_tier-sm90-one-search", "nhwc")
    fast, slow = [us for us in by_start if us < 16.5], [us for us in by_start if us >= 16.5]
    assert f"in the {len(by_start)} starts that `main_tier-sm90-one-search` has of it" in text
    assert f"takes {fast[0]:.1f} to {fast[-1]:.1f} us in {len(fast)} and {slow[0]:.1f} to {slow[-1]:.1f} us in" in text
    assert f"{slow[-1]:.1f} us in {len(slow)}. " in text
    before, later = (convolutions(f"main_tier-sm90-one-search{name}") for name in ("", "-later"))
    found = 1e3 * float(later["nhwc"][0]["variant_ms.channels_last+benchmark"])
    assert later["nhwc"][0]["variant"] == "channels_last"
    assert (
        f"found {found:.1f} us, so PyTorch's own choice was charged, {said_of(later['nhwc'][1], 'us: hence')}" in text
    )
    nchw = f"For NCHW it charged {said_of(before['nchw'][1], 'us and said')}, and later "
    assert nchw + said_of(later["nchw"][1], "us and") in text
    alone = [verdict for verdict in verdicts_of("stages-sm90") if verdict.case.operator == "conv2d"]
    stages = {(verdict.label[:2], bool(verdict.case.options)): verdict.timing for verdict in alone}
    for stage in ("13", "17"):
        timing = stages[stage, True]
        assert timing is not None
        assert timing.starts == (0,)
        words = f"{timing.speedup.estimate:.2f}x of stage {stage} against {1e3 * timing.reference_ms:.1f} us"
        assert words in text.replace(" is against", " against")


def test_the_speeds_of_cudnn_after_several_searches_are_what_the_records_say() -> None:
    text = text_of(FACTS)
    nhwc, nchw = (cudnn_by_start("main_tier-sm90", layout) for layout in ("nhwc", "nchw"))
    *most, last = nhwc
    assert (
        f"channels_last takes {most[0]:.1f} to {most[-1]:.1f} us in {len(most)} starts of {len(nhwc)}, and {last:.1f} "
        f"us in one, which nobody has explained; NCHW {nchw[0]:.1f} to {nchw[-1]:.1f} us in {len(nchw)}."
    ) in text
    now = {layout: timing.speedup.estimate for layout, (_, timing) in convolutions("main_tier-sm90").items()}
    assert f"our kernels are at {now['nhwc']:.2f}x and {now['nchw']:.2f}x" in text


def convolutions(run: str) -> dict[str, tuple[Mapping[str, str], Timing]]:
    """What a run says of the convolution's reference, and its times, by layout."""
    return {
        str(verdict.case.options.get("layout", "nchw")): (verdict.reference, verdict.timing)
        for verdict in verdicts_of(run)
        if verdict.case.operator == "conv2d" and verdict.timing is not None
    }


def said_of(timing: Timing, between: str) -> str:
    """The reference's time and the speedup, with words between them."""
    return f"{1e3 * timing.reference_ms:.1f} {between} {timing.speedup.estimate:.2f}x"


def test_what_the_references_take_is_what_the_records_say() -> None:
    rows, text = references_by_name("references-sm90"), text_of(FACTS)
    published = {name: row["measured_ms"] / row["published_ms"] for name, row in rows.items() if row["published_ms"]}
    near = [name for name, ratio in published.items() if abs(ratio - 1) <= 0.03]
    assert (len(near), len(published)) == (9, 11)
    assert "figures that were published are nine of eleven" in text
    shares = {name: 100 * (1 - published[name]) for name in ("gemm-2048", "topk", "conv2d-nchw", "conv2d-nhwc")}
    triton = {name: 100 * (1 - rows[name]["triton"]["milliseconds"] / rows[name]["published_ms"]) for name in shares}
    for name in ("gemm-2048", "topk"):
        assert f"{shares[name]:.1f} % less, where Triton's own takes {triton[name]:.1f} % less" in text
    assert f"{shares['conv2d-nchw']:.1f} % less and {-shares['conv2d-nhwc']:.1f} % more than published" in text
    others = [1e3 * figure for figure in rows["topk"]["triton"]["others_ms"]]
    assert f"{min(others):.1f} to {max(others):.1f} us for Triton's eight" in text
    one, before = (
        references_by_name(f"references-sm90-{name}")["topk"]["measured_ms"] for name in ("one-input", "topk")
    )
    less = 100 * (1 - one / median(references_by_name("references-sm90-one-input")["topk"]["triton"]["others_ms"]))
    expected = f"{one:.4f} ms eighteen minutes before (`references-sm90-one-input.md`), {less:.0f} % less than Triton"
    assert expected in text
    assert (
        f"and {before:.4f} in `references-sm90-topk.md`; with eight it says {rows['topk']['measured_ms']:.4f}" in text
    )


def test_every_reference_agrees_with_triton_or_the_librarys_own_choice() -> None:
    table = (ROOT / "results" / "gate_quality" / "references-sm90.md").read_text()
    answers = [line.split("|")[-2].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(answers) == len(references_by_name("references-sm90")) == 13
    assert all(answer.startswith("yes") for answer in answers)
    off = {
        name: 100 * (row["measured_ms"] / median(row["triton"]["others_ms"]) - 1)
        for name, row in references_by_name("references-sm90").items()
    }
    (name,) = (name for name, percent in off.items() if abs(percent) > 3)
    assert name == "conv2d-nchw-search"
    assert f"cuDNN's search for NCHW, which is another in every process, by {-off[name]:.1f} %" in text_of(FACTS)


def in_the_readmes_order(named: tuple[str, Timing]) -> tuple[int, float]:
    """The convolution's two layouts by their references, NCHW first."""
    name, timing = named
    return ("gemm", "fmha", "topk", "gdn", "conv2d").index(name), -timing.reference_ms


def test_how_often_a_a_holds_is_what_its_table_says() -> None:
    table = (ROOT / "results" / "gate_quality" / "a_a-sm90.md").read_text()
    rows = {cells[1].strip(): cells for line in table.splitlines() if len(cells := line.split("|")) > 3}
    text = text_of(FACTS)
    held, share = rows["all"][3].split()[0], rows["all"][3].split("(")[1].split(" ")[0]
    assert f"{held} of {rows['all'][2].strip()} hold 1.0 ({share} %)" in text
    assert f"has {rows['all'][2].strip()} trials" in text
    assert all(int(cells[2]) >= 30 for name, cells in rows.items() if name in ("conv2d", "fmha", "gdn", "gemm", "topk"))


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
