"""The round of kernels that screening's throughput is measured with: hand-made stages and experts of six workloads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from on_gpu import ROOT

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.lab.library.lineages import HAND_MADE, load_lineage
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelCase, KernelSource, Verdict, from_plain

WORKLOADS: dict[str, dict[str, object]] = {
    "gemm": {}, "fmha": {}, "topk": {}, "gdn": {}, "conv2d": {}, "conv2d-nhwc": {"layout": "nhwc"},
}  # fmt: skip
"""Names, with the options of their published case."""
EACH = 10
"""Kernels of a workload."""
ANY_SPEED = 1e-4


class Screened(NamedTuple):
    """One kernel of the round."""

    workload: str
    case: KernelCase
    source: KernelSource
    platforms: tuple[str, ...]
    best: float
    """Speedup that it is screened against."""


def the_round(platform: str) -> Iterator[Screened]:
    """All kernels of the round, workload by workload. Raises UsageError where nothing is recorded for a platform."""
    best = recorded_best(platform)
    for workload, options in WORKLOADS.items():
        operator = workload.partition("-")[0]
        case = msgspec.structs.replace(paper_case(operator, "gpu"), options=options, at_least=ANY_SPEED)
        for source, platforms in spread(stages(operator, platform), EACH):
            yield Screened(workload, case, source, platforms, best[workload])


def stages(operator: str, platform: str) -> list[tuple[KernelSource, tuple[str, ...]]]:
    """The stages behind the naive kernel and the expert, with the platforms of each. Raises UsageError for none."""
    for expert in find_experts(ROOT / "experts", platform):
        if expert.operator == operator and (expert.directory / HAND_MADE).is_dir():
            stored = load_lineage(expert.directory / HAND_MADE)
            made = list(zip(stored.sources, map(stored.platforms_of, stored.lineage.states), strict=True))[1:]
            last = expert.source("expert")
            known = {source.digest for source, _ in made}
            return made if last.digest in known else [*made, (last, expert.platforms_of(expert.variants["expert"]))]
    raise UsageError(f"experts/{operator} has no hand-made stages for {platform}")


def spread(chain: list[tuple[KernelSource, tuple[str, ...]]], count: int) -> list[tuple[KernelSource, tuple[str, ...]]]:
    """So many of a chain at even distances, the first and the last among them."""
    return [chain[round(index * (len(chain) - 1) / (count - 1))] for index in range(count)]


def recorded_best(platform: str) -> dict[str, float]:
    """The expert's recorded speedup by workload: a search that has found it screens against that."""
    path = Path(ROOT / "results" / f"main_tier-{platform}" / "records.jsonl")
    if not path.is_file():
        raise UsageError(f"{path.parent} has no recorded speedups to screen against")
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    verdicts = [from_plain(line["verdict"], Verdict) for line in lines]
    return {workload_of(one.case): one.timing.speedup.estimate for one in verdicts if one.timing is not None}


def workload_of(case: KernelCase) -> str:
    """What the tables call a case."""
    layout = case.options.get("layout")
    return f"{case.operator}-{layout}" if layout else case.operator
