"""The queue of a desk: priority, then order of arrival; never a device on which a request met a fault."""

from __future__ import annotations

import asyncio

import msgspec

from pytest_klineage.executors.desk import hopeless
from pytest_klineage.executors.queueing import LOOKED_AT, Outbox, Queue, QueuedJudgement
from pytest_klineage.executors.ray_judge import Order
from pytest_klineage.records.judging import FaultCode, MachineFault


def task(name: str, priority: int = 0, tried: tuple[str, ...] = (), product: str = "") -> QueuedJudgement:
    order = Order(
        digest=name,
        ticket="",
        platform="cpu",
        product=product,
        priority=priority,
        recipe="",
        request=msgspec.Raw(b"{}"),
    )
    return QueuedJudgement(order, b"", "asker", tried=set(tried))


def taken(queue: Queue, device: str = "one", pool: str = "cpu") -> list[str]:
    found = []
    while (next_task := queue.take(pool, device)) is not None:
        found.append(next_task.order.digest)
    return found


def test_priority_comes_before_order_of_arrival() -> None:
    queue = Queue()
    for name, priority in (("a", 0), ("b", 10), ("c", 0), ("d", 10), ("e", -1)):
        queue.put(task(name, priority))
    assert queue.lengths() == {"cpu": 5}
    assert taken(queue) == ["b", "d", "a", "c", "e"]
    assert queue.lengths() == {}


def test_a_device_is_not_given_what_it_failed() -> None:
    queue = Queue()
    for index in range(LOOKED_AT - 1):
        queue.put(task(f"failed {index}", 1, ("one",)))
    queue.put(task("other"))
    assert taken(queue, "one") == ["other"]
    assert len(taken(queue, "two")) == LOOKED_AT - 1


def test_pools_are_apart() -> None:
    queue = Queue()
    queue.put(task("a", product="H100"))
    assert taken(queue, pool="cpu/H200") == taken(queue, pool="cpu") == []
    assert taken(queue, pool="cpu/H100") == ["a"]


def test_what_no_device_may_take_is_hopeless() -> None:
    queue = Queue()
    for name, tried in (("a", ("one",)), ("b", ("one", "two")), ("c", ())):
        queue.put(task(name, tried=tried))
    assert queue.take_hopeless("cpu", {"one", "two"}, waited_s=60.0) == []
    assert [one.order.digest for one in queue.take_hopeless("cpu", {"one", "two"}, waited_s=-1.0)] == ["b"]
    assert len(queue.take_hopeless("cpu", set(), waited_s=-1.0)) == 2


def test_the_hopeless_get_what_the_last_judge_said() -> None:
    last = MachineFault(code=FaultCode.DEFINITION, message="no module is there", device="one")
    assert hopeless("no device is left", None).code is FaultCode.DIED
    found = hopeless("no device is left", last)
    assert (found.code, found.message) == (last.code, "no module is there; no device is left")


def test_doubts_are_said_until_the_asker_has_them() -> None:
    """An answer of the desk may be lost on its way; another asker's doubts are its own."""

    async def said() -> list[list[bytes]]:
        outbox = Outbox(b"s" * 32)
        for name in ("a", "b"):
            outbox.doubt(task(name), "judge", "the canary")
        found = [await outbox.take("asker", 0.0), await outbox.take("other", 0.0)]
        for known in ([], [("a", "")], [("a", ""), ("b", "")]):
            outbox.forget_doubts("asker", known)
            found.append(await outbox.take("asker", 0.0))
        return found

    both, others, again, second, none = asyncio.run(said())
    assert len(both) == 2
    assert again == both
    assert second == both[1:]
    assert others == none == []
