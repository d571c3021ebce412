"""A thousand GPUs on paper: a model of judging on many, with recorded verdict times. Nothing is measured.

pytest suites/gate_quality/test_fleet_model.py [--publish]      needs simpy, of the development dependencies
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec
import pytest

pytest.importorskip("simpy", reason="the model needs simpy: pip install --group dev")

from fleet_model import CANARY_EVERY, PR, WINDOW, Fleet, Rates
from on_gpu import results_file
from recorded_pairs import RESULTS

from pytest_klineage.gate.timing.statistics import quantile
from pytest_klineage.results.runs import read_run

SEED = 20261123
FLEETS = ((1, 1_000), (8, 4_000), (64, 16_000), (256, 40_000), (1_000, 100_000))
"""GPUs and requests."""
BUSY_S, PR_SHARE = 900.0, 0.05
"""How long search saturates a fleet, and the PR gate's share of what it can judge."""
BUILD_S = (10.0, 15.0, 20.0)
"""Around 15 s of one core for a CUDA kernel: an assumption, since recorded builds came from the cache."""
MAKESPAN = 1.1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one simulated fleet did."""

    gpus: int
    requests: int
    makespan_s: float
    ideal_s: float
    """All verdicts' seconds over the GPUs."""
    most_waiting: int
    judged_again: int
    quarantined: int
    failures: int
    lost: int
    double: int
    pr_wait_p95_s: float
    """From built to begun, while search saturates the fleet."""
    verdict_s: float
    """Mean."""


def recorded() -> Rates:
    """Seconds of the recorded stages' and main tier's verdicts; a canary is the median one."""
    records = [record for name in ("stages-sm90", "main_tier-sm90") for record in read_run(RESULTS / name).records]
    seconds = [record.verdict.timing.seconds + record.verdict.overhead_s for record in records if record.verdict.timing]
    return Rates(verdict_s=seconds, build_s=BUILD_S, canary_s=median(seconds))


def batch_of(fleet: Fleet, requests: int) -> Fleet:
    """Run until every request has its verdict."""
    fleet.env.process(fleet.search(requests))
    while len(fleet.confirmed) < requests:
        fleet.env.step()
    return fleet


def pr_waits(gpus: int, rates: Rates) -> list[float]:
    """Waits of the PR gate's requests while there is more search than the fleet can judge."""
    fleet, mean_s = Fleet(gpus, rates, SEED), sum(rates.verdict_s) / len(rates.verdict_s)
    fleet.env.process(fleet.search(10**9))
    fleet.env.process(fleet.gate(PR_SHARE * gpus / mean_s, BUSY_S))
    fleet.env.run(until=BUSY_S)
    return sorted(fleet.waits[PR])


def row_of(gpus: int, requests: int, rates: Rates) -> Row:
    fleet = batch_of(Fleet(gpus, rates, SEED), requests)
    return Row(
        gpus=gpus, requests=requests, makespan_s=fleet.env.now, most_waiting=fleet.most_waiting,
        ideal_s=sum(request.verdict_s for request in fleet.asked) / gpus, judged_again=fleet.judged_again,
        quarantined=fleet.quarantined, failures=fleet.failures, lost=requests - len(fleet.confirmed),
        double=sum(count > 1 for count in fleet.confirmed.values()),
        pr_wait_p95_s=quantile(pr_waits(min(gpus, 256), rates), 0.95),
        verdict_s=sum(rates.verdict_s) / len(rates.verdict_s),
    )  # fmt: skip


def report_of(rows: Sequence[Row]) -> str:
    """The page."""
    lines = [
        "# Judging on many GPUs: a model\n",
        "A discrete-event simulation, not a measurement: verdict times are drawn from `stages-sm90` and "
        f"`main_tier-sm90` (H200s, {rows[0].verdict_s:.1f} s on average), builds take 10 to 20 s of one of 16 cores a "
        f"GPU, a canary is judged every {CANARY_EVERY} verdicts, 1 % of hosts of 8 GPUs fail in an hour, one canary in "
        f"10,000 finds a sick GPU, and search has {WINDOW} requests a GPU in the queue or being built. The PR gate "
        f"asks for {PR_SHARE:.0%} of what the fleet can judge while search saturates it; at most 256 GPUs there.\n",
        "| GPUs | requests | makespan | over ideal | most waiting | judged again | lost, double | "
        "PR gate waits, 95 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            f"{row.gpus:,}", f"{row.requests:,}", f"{row.makespan_s / 60:.1f} min",
            f"{row.makespan_s / row.ideal_s:.3f}", f"{row.most_waiting:,}", str(row.judged_again),
            f"{row.lost}, {row.double}", f"{row.pr_wait_p95_s:.2f} s",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "\nCurve: `fleet-model.svg`. Raw figures: `fleet-model.jsonl`."])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Verdicts a minute against GPUs, beside those of an ideal fleet."""
    matplotlib = pytest.importorskip("matplotlib", reason="the curve needs matplotlib")
    matplotlib.rcParams["svg.hashsalt"] = "fleet-model"  # the same curve is the same file
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(5, 3.2))
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="GPUs (a model)", ylabel="verdicts a minute")
    gpus = [row.gpus for row in rows]
    axes.plot(gpus, [60 * row.requests / row.ideal_s for row in rows], "--", color="#7a838c", label="ideal")
    axes.plot(gpus, [60 * row.requests / row.makespan_s for row in rows], "o-", color="#0072b2", label="model")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def test_fleet_model(request: pytest.FixtureRequest, publish: Callable[[str, str, list[Row]], None]) -> None:
    """Up to 1,000 GPUs: near ideal, nothing lost or double, a bounded queue, and a PR gate that hardly waits."""
    rates = recorded()
    rows = [row_of(gpus, requests, rates) for gpus, requests in FLEETS]
    publish("fleet-model", report_of(rows), rows)
    draw(rows, results_file(request.config, "fleet-model").with_suffix(".svg"))
    for row in rows:
        assert (row.lost, row.double) == (0, 0)
        assert row.most_waiting <= (WINDOW + CANARY_EVERY) * row.gpus
        assert row.makespan_s <= MAKESPAN * row.ideal_s
        if row.gpus > 1:  # one GPU is busy with whatever it has begun
            assert row.pr_wait_p95_s < row.verdict_s


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_when_hosts_fail_and_gpus_are_sick(seed: int) -> None:
    """Each host fails about twenty times an hour, three canaries in a hundred fail."""
    rates = recorded()
    bad = Rates(
        verdict_s=rates.verdict_s, build_s=rates.build_s, canary_s=rates.canary_s, host_failures_per_hour=20.0,
        host_back_s=120.0, sick_share=0.03,
    )  # fmt: skip
    fleet = batch_of(Fleet(64, bad, seed), 4_000)
    assert set(fleet.confirmed) == set(range(4_000))
    assert set(fleet.confirmed.values()) == {1}
    assert fleet.judged_again > 0
    assert fleet.failures > 0
    assert fleet.quarantined > 0
