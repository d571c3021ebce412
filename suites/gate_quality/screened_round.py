"""The rounds of kernels that screenings are measured with: on a GPU hand-made stages and experts of six workloads, on a
CPU the last states of the walked lineages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from on_gpu import ROOT

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.lab.library.lineages import FOLDER, HAND_MADE, load_lineage
from pytest_klineage.operators import paper_case
from pytest_klineage.records import KernelCase, KernelSource, Verdict, from_plain
from pytest_klineage.results.packed import is_there, read_packed

WORKLOADS: dict[str, dict[str, object]] = {
    "gemm": {}, "fmha": {}, "topk": {}, "gdn": {}, "conv2d": {}, "conv2d-nhwc": {"layout": "nhwc"},
}  # fmt: skip
"""Names, with the options of their published case."""
EACH = 10
"""Kernels of a workload on a GPU."""
LAST = 4
"""Kernels of a workload on a CPU: the last states of its lineage, since earlier ones take seconds a call."""
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
    for workload, options in workloads(platform).items():
        operator = workload.partition("-")[0]
        if platform == "cpu":
            case, taken = paper_case(operator, "cpu"), walked(operator)[-LAST:]
        else:
            case, taken = paper_case(operator, "gpu"), spread(stages(operator, platform), EACH)
        case = msgspec.structs.replace(case, options={**case.options, **options}, at_least=ANY_SPEED)
        for source, platforms in taken:
            yield Screened(workload, case, source, platforms, best[workload])


def workloads(platform: str) -> dict[str, dict[str, object]]:
    """Those of a platform; a CPU has one layout of the convolution."""
    return {name: options for name, options in WORKLOADS.items() if platform != "cpu" or not options}


def walked(operator: str) -> list[tuple[KernelSource, tuple[str, ...]]]:
    """The states of an operator's lineage on a CPU, naive first. Raises UsageError for none."""
    for expert in find_experts(ROOT / "experts", "cpu"):
        if expert.operator == operator and (expert.directory / FOLDER).is_dir():
            return [(source, ("cpu",)) for source in load_lineage(expert.directory / FOLDER).sources]
    raise UsageError(f"experts/{operator} has no lineage for a CPU")


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
    path = ROOT / "results" / f"main_tier-{platform}" / "records.jsonl"
    if not is_there(path):
        raise UsageError(f"{path.parent} has no recorded speedups to screen against")
    lines = [msgspec.json.decode(line) for line in read_packed(path).splitlines()]
    verdicts = [from_plain(line["verdict"], Verdict) for line in lines]
    return {workload_of(one.case): one.timing.speedup.estimate for one in verdicts if one.timing is not None}


def workload_of(case: KernelCase) -> str:
    """What the tables call a case."""
    layout = case.options.get("layout")
    return f"{case.operator}-{layout}" if layout else case.operator
