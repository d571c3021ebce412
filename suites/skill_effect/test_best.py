"""The best kernel of every target and arm, judged once more at the gate's defaults, with do_bench beside it.

pytest suites/skill_effect/test_best.py --platform sm90 --klineage-executor batch:JUDGE --klineage-trajectories DIR

A search takes the best of several short timings, which is too fast on average; what is published is timed again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from design import Design, read_design
from running import Runner

from pytest_klineage import GateSettings, KernelSource, UsageError
from pytest_klineage.executors.batch import REQUEST
from pytest_klineage.lab.studies.chains import Chain, chains_below
from pytest_klineage.records import Verdict, from_json
from pytest_klineage.records.judging import JudgeRequest
from pytest_klineage.results.packed import read_lines
from pytest_klineage.results.runs import Record

DESIGN = read_design()
AGAIN = {"also_policies": ("do_bench",)}


@pytest.mark.parametrize("arm", DESIGN.arms)
@pytest.mark.parametrize("target", DESIGN.targets)
def test_best(target: str, arm: str, design: Design, runner: Runner, request: pytest.FixtureRequest) -> None:
    """It is still right. Its speed is a figure, and decides nothing here."""
    session = runner.session
    if session.settings.batch is None:
        pytest.skip("takes kernels from the requests of a folder: --klineage-executor=batch:JUDGE")
    own = [one for one in chains_below(runner.folder / "effect") if (one.arm, one.target) == (arm, target)]
    best = fastest(own)
    if best is None:
        pytest.skip("no right kernel yet")
    done = [record.verdict for record in read_lines(runner.verdicts, Record) if record.nodeid == request.node.nodeid]
    if any(verdict.source_digest == best.source_digest for verdict in done):
        pytest.skip("it is judged again already")
    try:
        source = requested(session.settings.batch, best.source_digest)
    except UsageError as error:
        pytest.fail(f"klineage: {error}", pytrace=False)
    with session.gate_with(GateSettings(**(AGAIN | session.settings.gate))) as gate:
        verdict = runner.kept(gate.judge(design.case(target), source))
    assert verdict.scored, f"{verdict.code.value}: {verdict.reasons[0].message}"


def fastest(chains: list[Chain]) -> Verdict | None:
    """The verdict whose interval begins highest: of many estimates the highest would be the luckiest."""
    right = [
        (shot.verdict.timing.speedup.low, shot.verdict)
        for chain in chains for shot in chain.shots
        if shot.verdict is not None and shot.verdict.scored and shot.verdict.timing is not None
    ]  # fmt: skip
    return max(right, key=lambda one: one[0], default=(0.0, None))[1]


def requested(folder: Path, digest: str) -> KernelSource:
    """The kernel of a request. Raises UsageError where the folder is not the one that was judged."""
    for path in sorted((folder / REQUEST).glob("*.json")):
        source = from_json(path.read_bytes(), JudgeRequest).source
        if source.digest == digest:
            return source
    raise UsageError(
        f"{folder} has no request for the kernel {digest[:12]}: name the folder whose verdicts the trajectories have, "
        "by --klineage-executor=batch:DIR"
    )
