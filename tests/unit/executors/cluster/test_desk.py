"""The desk: quarantine, refusals, retries, products, priorities, and runs that go on. Judges are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import HarnessError, UsageError, WaitsForVerdict
from pytest_klineage.executors.base import ExecutorGate, gate_settings, verdict_of
from pytest_klineage.executors.canary import default_canary
from pytest_klineage.executors.cluster import ClusterLimits
from pytest_klineage.executors.ray import NAME, NAMESPACE, RayExecutor
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.records.judging import JudgeRequest

from . import stand_ins
from .conftest import Nodes, end_desk, finish, judged_lines, judges, until

Ask = Callable[..., JudgeRequest]
Join = Callable[..., RayExecutor]


@pytest.fixture(scope="module", autouse=True)
def by_value(nodes: Nodes) -> None:
    """Judges' processes do not find this folder: Ray sends the classes in it."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(stand_ins)


def asks(ask: Ask, count: int, **fields: object) -> list[JudgeRequest]:
    """Different requests, which need no build."""
    return [ask(f"// {number}", repeat=number, **fields) for number in range(count)]


def submit(executor: RayExecutor, requests: list[JudgeRequest]) -> None:
    for request in requests:
        executor.submit(request)


def pools(executor: RayExecutor, **changes: object) -> None:
    """Give the cpu pool another canary."""
    canary = msgspec.structs.replace(default_canary("cpu"), **changes)  # type: ignore[type-var]  # there is one
    executor._call("set_pools", msgspec.json.encode({"cpu": canary}))


def test_a_canary_out_of_its_range(join: Join, ask: Ask) -> None:
    """Its judge is held, its verdicts since the last good one are in doubt, the others go on; until it is released."""
    executor = join(judge_class=stand_ins.Sick)
    pools(executor, every=5)
    requests = asks(ask, 60)
    submit(executor, requests)
    finish(executor)
    until(lambda: executor.collect(0.1) or judges(executor, "quarantine"))
    executor.collect(0.5)
    (held,) = judges(executor, "quarantine")
    assert held.canary == 3.0
    assert 1 <= len(executor.answers.doubts) <= 5
    assert {doubt.judge for doubt in executor.answers.doubts.values()} == {held.name}
    assert len(executor.doubt_lines()) == 1
    assert all(verdict_of(executor, request).ok for request in requests)
    assert len(judges(executor)) == 4
    pools(executor, every=5, high=4.0)
    assert executor._call("release") == 1
    until(lambda: not judges(executor, "quarantine"))


@pytest.mark.parametrize("kind", ["Liar", "OldReplies", "OtherSeals"])
def test_a_reply_that_cannot_be_believed(join: Join, ask: Ask, kind: str) -> None:
    executor = join(judge_class=getattr(stand_ins, kind))
    requests = asks(ask, 12)
    submit(executor, requests)
    finish(executor)
    (held,) = judges(executor, "quarantine")
    replies = [executor.lookup(request) for request in requests]
    assert held.name not in {reply.judge for reply in replies if reply}
    assert sorted(reply.attempt for reply in replies if reply) == [1] * 11 + [2]
    assert executor.state().refused == 1


def test_two_faults_in_a_row(join: Join, ask: Ask) -> None:
    """Each is tried on another device; the one that fails is held."""
    executor = join(judge_class=stand_ins.Broken)
    requests = asks(ask, 12)
    submit(executor, requests)
    finish(executor)
    (held,) = judges(executor, "quarantine")
    assert held.faults == 2
    attempts = [reply.attempt for request in requests if (reply := executor.lookup(request)) and reply.verdict]
    assert sorted(attempts) == [1] * 10 + [2, 2]


def test_a_request_that_no_judge_can_take(join: Join, ask: Ask) -> None:
    """The canary fails everywhere: what waits is given up with a fault, and a later call asks again."""
    executor = join(ClusterLimits(alone_s=1.0, tend_s=0.2), stand_ins.Quick)
    pools(executor, high=1.9)
    request = ask()
    executor.submit(request)
    finish(executor)
    assert len(judges(executor, "quarantine")) == 4
    with pytest.raises(HarnessError, match="quarantine"):
        verdict_of(executor, request)
    executor.answers.close()
    again = join(name="run")
    assert again.lookup(request) is None


def test_products_are_not_mixed(join: Join, ask: Ask, nodes: Nodes) -> None:
    fast, slow = nodes.add("FAST"), nodes.add("SLOW")
    try:
        with pytest.raises(UsageError, match="several products for cpu"):
            join(judge_class=stand_ins.Quick)
        with pytest.raises(UsageError, match="has no OTHER for cpu"):
            join(judge_class=stand_ins.Quick, product="OTHER")
        executor = join(judge_class=stand_ins.Quick, product="FAST")
        requests = asks(ask, 30, product="FAST")
        submit(executor, requests)
        finish(executor)
        replies = [executor.lookup(request) for request in requests]
        assert {reply.product for reply in replies if reply} == {"FAST"}
        assert {reply.verdict.machine.device for reply in replies if reply and reply.verdict} == {"FAST"}  # type: ignore[union-attr]  # stand-ins have one
        assert executor.lookup(ask(product="SLOW")) is None
    finally:
        for node in (fast, slow):
            nodes.cluster.remove_node(node)


def test_a_narrower_precision_travels(join: Join, ask: Ask) -> None:
    executor = join(judge_class=stand_ins.Quick)
    request, narrow = ask(), ask(settings={"precision": 0.2})
    gate = ExecutorGate(executor, "cpu", gate_settings(request, GateSettings()))
    with pytest.raises(WaitsForVerdict):
        gate.judge(request.case, request.source, precision=0.2)
    finish(executor)
    assert gate.judge(request.case, request.source, precision=0.2).ok
    assert executor.lookup(request) is None
    assert executor.lookup(narrow) is not None


def test_higher_priorities_come_first(join: Join, ask: Ask) -> None:
    """A pull request that asks late overtakes a search that has filled the queue."""
    search = join(judge_class=stand_ins.Wanderer, name="search")
    gate = join(judge_class=stand_ins.Wanderer, name="gate")
    search._call("warm", "cpu")
    until(lambda: len(judges(search, "ready")) == 4)
    submit(search, asks(ask, 60))
    search.collect(0.0)
    submit(gate, [ask(f"// gate {number}", repeat=100 + number, priority=10) for number in range(4)])
    finish(gate)
    assert search.num_open - len(search.collect(0.0)) > 30
    finish(search)


def test_a_driver_that_was_lost(join: Join, ask: Ask, nodes: Nodes, tmp_path: Path) -> None:
    """What it asked for is judged all the same; who goes on with its file gets every verdict, each judged once."""
    executor = join(judge_class=stand_ins.Wanderer)
    requests = asks(ask, 20)
    submit(executor, requests)
    executor.collect(0.0)
    executor.answers.close()  # and is never heard of again
    resumed = join(judge_class=stand_ins.Wanderer)
    submit(resumed, [*requests, *asks(ask, 22)])
    finish(resumed)
    assert all(verdict_of(resumed, request).ok for request in asks(ask, 22))
    lines = judged_lines(nodes)
    assert [lines.count(request.digest) for request in asks(ask, 22)] == [1] * 22
    third = join(judge_class=stand_ins.Wanderer)
    submit(third, requests)
    assert third.num_open == 0


def test_a_desk_that_was_lost(join: Join, ask: Ask) -> None:
    executor = join(judge_class=stand_ins.Wanderer)
    requests = asks(ask, 20)
    submit(executor, requests)
    executor.collect(0.0)
    before = executor._incarnation
    end_desk()
    join(judge_class=stand_ins.Wanderer, name="other")
    finish(executor)
    assert all(verdict_of(executor, request).ok for request in requests)
    assert executor._incarnation != before


def test_the_end_of_a_desk_of_another_version(join: Join) -> None:
    """It runs beside this one's, on the same devices."""
    import ray

    class Stale:
        """Does nothing."""

    executor = join()
    ray.remote(Stale).options(name="desk", namespace=NAMESPACE, lifetime="detached", num_cpus=0).remote()
    until(lambda: names() >= {"desk", NAME})
    executor.desk.end()
    until(lambda: not names() & {"desk", NAME})


def names() -> set[str]:
    """Of the actors of all clients."""
    import ray

    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
