"""What a desk says of its cluster, the times it keeps, and how Ray's nodes become places for judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from pytest_klineage.extensions import extensions
from pytest_klineage.records import Machine
from pytest_klineage.records.platform import PLATFORMS

Place: TypeAlias = tuple[str, str, int]
"""A platform, a node of Ray's, and the number of a device there."""
PROTOCOL = 2
"""Of what askers, the desk and judges say to one another: one more with every call of `Desk` that changes. A desk
outlives who started it, so that each has a name of its own: who is of another version starts another desk."""
CPU_RESOURCE = "klineage_cpu"
"""Custom resource of Ray nodes that judge for the cpu platform: one for each judge."""
PRODUCT = "accelerator_type:"
"""Ray's own resource that names a node's GPU product."""


class ClusterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a desk, in seconds."""

    tend_s: float = 1.0
    """Between two looks at the cluster's nodes."""
    start_s: float = 600.0
    """Longest start of a judge: a reference's first use may compile for minutes."""
    judge_s: float = 900.0
    """Longest judgement; then the judge is taken for lost. The gate's own limits for kernels are much shorter."""
    alone_s: float = 60.0
    """How long a request waits for a device that may take it to join."""


class JudgeState(msgspec.Struct, kw_only=True):
    """One judge, as `pytest-klineage judges` shows it."""

    name: str
    platform: str
    product: str
    node: str
    state: str = "starting"
    """starting, canary, ready, judging, quarantine."""
    why: str = ""
    host: str = ""
    device: str = ""
    canary: float | None = None
    verdicts: int = 0
    faults: int = 0
    machine: Machine | None = None


class DeskState(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster stands."""

    judges: list[JudgeState]
    queued: dict[str, int]
    """Requests that wait, by pool: platform, or platform/product."""
    building: int
    judging: int
    unfetched: int
    """Answers that were not fetched."""
    verdicts_per_minute: float
    products: dict[str, list[str]]
    """GPU products of the nodes, by platform; "" where a node names none."""
    refused: int
    """Replies that were not believed."""
    unfit: list[str] = []
    """Devices on which no judge could start, and why; last, why the desk itself starts none."""


def pool_name(platform: str, product: str) -> str:
    """How a pool is called: "cpu", "sm90/H200"."""
    return f"{platform}/{product}" if product else platform


def places_of(nodes: Sequence[Mapping[str, Any]]) -> dict[Place, str]:
    """Every place where a judge may sit, with its GPU product; "" where the node names none. `nodes`: ray.nodes()."""
    found: dict[Place, str] = {}
    for node in nodes:
        resources = node["Resources"] if node["Alive"] else {}
        product = next((name.removeprefix(PRODUCT) for name in resources if name.startswith(PRODUCT)), "")
        for platform in (*PLATFORMS, *extensions("platforms")):
            count = int(resources.get(CPU_RESOURCE if platform == "cpu" else "GPU", 0))
            found |= {(platform, node["NodeID"], number): product for number in range(count)}
    return found


def last_line(error: BaseException) -> str:
    """The end of an error's message: what was raised, without the way there."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
