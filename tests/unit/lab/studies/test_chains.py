"""Chains are read from trajectories as the runs went; first on made-up events, then on the published records."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from made_up import again, answered, begun, chain, judged, malformed, verdict

from pytest_klineage.lab.library.lineages import RIGHT
from pytest_klineage.lab.studies.chains import ROOT, Chain, Keys, ShotFailure, chain_of, chains_below, root_speeds
from pytest_klineage.records import Code, Event, Failed, Reason, Status, to_json
from pytest_klineage.results.runs import Record

SETTINGS = {"arm": "cards", "target": "fp8_gemm", "repeat": "2", "case": "fp8_gemm-8x8x8-bf16", "design": "d"}
RESULTS = Path(__file__).parents[4] / "results"


def read(*events: Event) -> Chain:
    return chain_of([begun(**SETTINGS), *events], Keys())


def speeds(found: Chain) -> list[float | None]:
    return [shot.speedup for shot in found.shots]


def test_shots_come_in_their_order_with_what_they_have_cost() -> None:
    found = read(
        *judged(0, 0.01), answered(1), *judged(1, Code.MISMATCH), answered(2), malformed(2), answered(3),
        *judged(3, 0.7),
    )  # fmt: skip
    assert (found.arm, found.trial, found.case, found.design) == (
        "cards", ("fp8_gemm", 2), "fp8_gemm-8x8x8-bf16", "d",
    )  # fmt: skip
    assert speeds(found) == [None, None, 0.7]
    assert [(shot.tokens, shot.usd) for shot in found.shots] == [(100, 0.5), (200, 1.0), (300, 1.5)]
    assert found.root is not None
    assert found.root.timing is not None
    assert found.best() == 0.7
    assert found.model == "made up"
    assert found.first_success() == found.shots[2]


def test_a_kernel_that_was_sent_before_has_the_verdict_of_then() -> None:
    found = read(*judged(0, 0.01), answered(1), *judged(1, 0.6), answered(2), again(2, 1), answered(3), again(3, 0))
    assert speeds(found) == [0.6, 0.6, 0.01]


def test_a_call_that_failed_costs_what_it_was_charged() -> None:
    lost = Failed(call=1, reason="lost", message="made up", cost_usd=0.25)
    found = read(lost, answered(2), *judged(2, 0.7))
    assert [(shot.tokens, shot.usd) for shot in found.shots] == [(100, 0.75)]


def test_a_chain_without_a_reply_has_no_shot() -> None:
    assert read().first is None
    assert read(*judged(0, 2.0)).shots == ()


def test_what_the_harness_could_not_judge_is_no_first_shot() -> None:
    skipped = next(code for code in Code if code.status is Status.SKIPPED)
    assert chain("cards", "a", 1, skipped, 2.0).first is None


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        (None, ShotFailure.MALFORMED), (0.49, ShotFailure.SLOW), (0.5, None), (3.0, None),
        (Code.MISSING_INSTRUCTION, ShotFailure.BUILD), (Code.FLAG_REFUSED, ShotFailure.BUILD),
        (Code.MISMATCH, ShotFailure.WRONG),
        (Code.CRASH, ShotFailure.CRASH),
    ],
)  # fmt: skip
def test_why_a_shot_is_no_success(said: float | Code | None, failure: ShotFailure | None) -> None:
    (shot,) = chain("cards", "a", 1, said).shots
    assert shot.failure() == failure
    assert shot.succeeds() is (failure is None)


def test_every_status_of_a_refused_kernel_has_its_failure() -> None:
    kinds = {code.status: chain("", "a", 1, code).shots[0].failure() for code in Code if code.status not in RIGHT}
    assert kinds[Status.TIMEOUT] is ShotFailure.HANG
    assert kinds[Status.CHEAT] is kinds[Status.WRAPPER] is ShotFailure.REFUSED
    assert kinds[Status.WRONG_SHAPE] is ShotFailure.WRONG


def test_events_without_a_beginning_are_refused() -> None:
    with pytest.raises(ValueError, match="begins with its settings"):
        chain_of([answered(1)], Keys())


def test_the_roots_last_speed_counts(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    assert root_speeds(path) == {}
    made = [verdict(0.1, label=ROOT), verdict(9.0, label="cards 1"), verdict(0.2, label=ROOT)]
    made[2] = msgspec.structs.replace(made[2], reasons=(Reason(code=Code.INCONCLUSIVE_FEW, message="few"),))
    wrong = verdict(Code.MISMATCH, label=ROOT)
    path.write_bytes(b"".join(to_json(Record(nodeid="x", verdict=one)) + b"\n" for one in [*made, wrong]))
    assert root_speeds(path) == {made[0].case.id: 0.2}


def test_published_chains_are_those_of_their_table() -> None:
    """results/ablations has steps and right kernels of every trial, counted by the suite from the same runs."""
    keys = Keys(arm="method", target="case", repeat="trial")
    chains = chains_below(RESULTS / "trajectories" / "roundtrip_recovery-cpu", keys)
    table = (RESULTS / "ablations" / "roundtrip_recovery-cpu.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d+) \| [\d.]+ \[.*?\] \| \S+ \| \S+ \| (\d+) \| (\d+) \|", table, re.M)
    assert len(rows) == len(chains) == 25
    shown = {(name, int(trial)): (int(steps), int(right)) for name, trial, steps, right in rows}
    counted = {one.trial: (len(one.shots), sum(shot.speedup is not None for shot in one.shots)) for one in chains}
    assert counted == shown
    assert Counter(one.arm for one in chains) == {"klineage": 25}


def test_shots_are_plain_data() -> None:
    made = chain("cards", "a", 1, 0.7, None)
    assert msgspec.json.decode(to_json(made), type=Chain) == made
