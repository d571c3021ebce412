"""Canaries: a pair of kernels whose ratio is known. A judge that measures another ratio is put in quarantine."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.executors.base import plain_settings
from pytest_klineage.executors.cluster import pool_name
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelSource, SourceFile, Surface, from_json
from pytest_klineage.records.judging import JudgeReply, JudgeRequest

EVERY = 50
"""Verdicts between two canaries."""
CPU_RANGE = (1.6, 2.5)
"""Of a pair of 0.1 ms calls on a shared CPU. The second makes the same product twice, so the first is twice as fast."""
CPU_TEXT = """#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const float *ap = (const float *)a.data, *bp = (const float *)b.data;
    for (int pass = 0; pass < PASSES; ++pass)
        for (int64_t i = 0; i < c.shape[0]; ++i)
            for (int64_t j = 0; j < c.shape[1]; ++j) {
                double sum = 0;
                for (int64_t k = 0; k < a.shape[1]; ++k)
                    sum += (double)ap[i * a.stride[0] + k * a.stride[1]] * bp[k * b.stride[0] + j * b.stride[1]];
                *(volatile float *)((float *)c.data + i * c.stride[0] + j * c.stride[1]) = (float)sum;
            }
    return 0;
}
"""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A known pair, and the range that its measured ratio must lie in."""

    request: JudgeRequest
    low: float
    high: float
    every: int = EVERY

    def trouble(self, reply: JudgeReply) -> str:
        """Why a judge that replied so must not judge; empty when all is well."""
        if reply.fault is not None:
            return f"the canary was not judged: {reply.fault.message}"
        ratio = measured(reply)
        if ratio is None:
            return f"the canary was not timed: {reply.verdict.reasons[0].message if reply.verdict else 'no verdict'}"
        if not self.low <= ratio <= self.high:
            return f"the canary ran at {ratio:.3f}, outside of {self.low:g} to {self.high:g}"
        return ""


def measured(reply: JudgeReply) -> float | None:
    """The speedup that a judge measured; None when it timed nothing."""
    verdict = reply.verdict
    return verdict.timing.speedup.estimate if verdict and verdict.scored and verdict.timing else None


@functools.cache
def default_canary(platform: str) -> Canary | None:
    """The pair of the cpu platform; a GPU pool's is given by who runs the judges, with its pinned ratio."""
    if platform != "cpu":
        return None
    case = make_case("gemm", (64, 64, 64), "fp32", "torch", at_least=1.0)
    settings = GateSettings(time_limit_s=1.0, precision=0.05, seeds=1, busy_limit=1.0, spread_limit=1e6)
    request = JudgeRequest(
        case=case, source=_passes(1), reference_source=_passes(2), platform=platform, settings=plain_settings(settings)
    )
    return Canary(request=request, low=CPU_RANGE[0], high=CPU_RANGE[1])


class Canaries:
    """The canaries of a cluster by pool, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pools = msgspec.json.decode(path.read_bytes(), type=dict[str, Canary]) if path.exists() else {}

    def update(self, pools: bytes) -> None:
        """Take canaries, as JSON by pool."""
        self._pools |= msgspec.json.decode(pools, type=dict[str, Canary])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(msgspec.json.encode(self._pools))

    def of(self, platform: str, product: str) -> Canary | None:
        """The canary of a product's pool, else of its platform, else the platform's own; None without any."""
        own = self._pools.get(pool_name(platform, product)) or self._pools.get(platform)
        return own or default_canary(platform)

    def every(self, platform: str, product: str) -> float:
        """Verdicts between two canaries; infinite without one."""
        canary = self.of(platform, product)
        return canary.every if canary is not None else float("inf")


def read_pools(path: Path) -> dict[str, Canary]:
    """Canaries by pool, such as "cpu" or "sm90/H200", from a TOML file. Raises UsageError.

    Each table has `low` and `high`, may have `every`, and names in `request` a file with a JudgeRequest, as the
    executor batch:DIR writes it; without `request` the platform's own pair is meant.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        return {pool: _canary(pool, table, path.parent) for pool, table in tables.items()}
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}") from error


def _canary(pool: str, table: Any, base: Path) -> Canary:
    if not isinstance(table, dict):
        raise UsageError(f"{pool} = {table!r} is in no table; each pool has its own, such as [cpu]")
    own = default_canary(pool.partition("/")[0])
    if "request" in table:
        request = from_json((base / str(table["request"])).read_bytes(), JudgeRequest)
    elif own is not None:
        request = own.request
    else:
        raise UsageError(f'the pool {pool} needs request = "FILE", a request that batch:DIR wrote for its known pair')
    return msgspec.convert({"every": EVERY, **table, "request": msgspec.to_builtins(request)}, Canary)


def _passes(count: int) -> KernelSource:
    return KernelSource(
        surface=Surface.CPP, files=(SourceFile("canary.cpp", CPU_TEXT),), entry="run",
        flags=("-O2", f"-DPASSES={count}"), label=f"canary, {count}x",
    )  # fmt: skip
