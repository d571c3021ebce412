"""What the oracle asks of a worker on a GPU, in which order and for how long; no device is needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pytest_klineage.records import Code, Reason
from pytest_klineage.records.messages import BlockReturned, EventsMade, Finished, MakeEvents, OutputsReady
from pytest_klineage.worker.device import rounds
from pytest_klineage.worker.device.rounds import LATE_BLOCKS, CallBlock, DeviceWorkerHandle
from pytest_klineage.worker.rounds import EARLY_SAMPLES, WorkerProblem

LATE = Reason(code=Code.LATE_WORK, message="the device went on")


class WrittenDown(DeviceWorkerHandle):
    """A player that writes down what it does instead of talking to a worker."""

    def __init__(self) -> None:
        super().__init__("candidate", cast(Any, SimpleNamespace()), settle_ns=1300, host_bound_ns=2000)
        self.did: list[str] = []
        self.waits: list[float] = []
        self.arenas = [cast(Any, SimpleNamespace())]

    def freeze(self, frozen: bool) -> None:
        self.did.append("freeze" if frozen else "thaw")

    def _send(self, message: Any, fds: list[int] | None = None) -> None:
        self.did.append(type(message).__name__)

    def _receive(self, kind: type, deadline_s: float, timeout_code: Code, nonce: int | None = None) -> Any:
        self.did.append(kind.__name__)
        self.waits.append(deadline_s)
        return kind

    def _exchange(self, *_: Any) -> Any:
        raise WorkerProblem(gone=True)


def block_of(calls: int) -> CallBlock:
    return CallBlock(views=[], calls=calls, arena=0, first_slot=0)


def test_events_are_made_before_there_are_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that makes them slowly gains no time with the inputs of its block."""
    handle = WrittenDown()
    monkeypatch.setattr(rounds.torch.cuda, "synchronize", lambda: handle.did.append("inputs"))
    for _ in range(2):
        with pytest.raises(WorkerProblem):
            handle.run_block(block_of(20), 30.0, frozenset())
    assert handle.did == [MakeEvents.__name__, EventsMade.__name__, "freeze", "inputs", "freeze", "inputs"]


def test_longer_blocks_have_more_events_made(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = WrittenDown()
    monkeypatch.setattr(rounds.torch.cuda, "synchronize", lambda: None)
    for calls in (20, 8, 3000):
        with pytest.raises(WorkerProblem):
            handle.run_block(block_of(calls), 30.0, frozenset())
    assert handle.did.count("MakeEvents") == 2


def test_an_exchange_has_one_deadline_however_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, now = WrittenDown(), [100.0]
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now[0])
    for kind in (Finished, BlockReturned, OutputsReady):
        handle._receive_until(130.0, kind, 1)
        now[0] += 20.0
    assert handle.waits == [30.0, 10.0, 0.001]


class LateThread(WrittenDown):
    """Its worker fills in all outputs as soon as it may go on after a block's end."""

    def __init__(self, outputs: dict[int, dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.outputs = outputs

    def _exchange(self, *arguments: Any) -> Any:
        return DeviceWorkerHandle._exchange(self, *arguments)

    def _receive(self, kind: type, deadline_s: float, timeout_code: Code, nonce: int | None = None) -> Any:
        super()._receive(kind, deadline_s, timeout_code, nonce)
        if kind is OutputsReady:
            return OutputsReady(nonce=0)
        for output in self.outputs.values():
            output["c"].fill_(1 if kind is BlockReturned else 0)
        return BlockReturned(nonce=0, elapsed_ns=(1, 1, 1, 1), settled_ns=(0, 0, 0, 0), span_ns=1)


def test_all_outputs_are_checked_while_the_worker_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {slot: {"c": torch.full((5, 7), 9.0)} for slot in (2, 3, 4)}
    handle, arena = LateThread(outputs), SimpleNamespace(outputs=outputs.__getitem__)
    monkeypatch.setattr(rounds.torch.cuda, "synchronize", lambda: handle.did.append("wait"))
    block = CallBlock(views=cast(Any, [None] * 3), calls=4, first_slot=2)
    _returned, _done, _wall_ns, early = handle._exchange(arena, block, 1, 30.0)
    assert handle.did == [
        "wait", "thaw", "RunBlock", "Finished", "freeze", "wait", "thaw", "BlockReturned", "OutputsReady",
    ]  # fmt: skip
    assert early.keys() == {2, 3, 4}
    for slot, looked in early.items():
        where, seen = looked["c"]
        assert len(where) == EARLY_SAMPLES
        assert not seen.any()
        assert outputs[slot]["c"].flatten()[where].all()


@pytest.mark.parametrize(
    ("blocks", "allowed"), [(1, 1), (2, 1), (LATE_BLOCKS, 1), (2 * LATE_BLOCKS, 2), (2 * LATE_BLOCKS + 5, 2)]
)
def test_one_late_block_and_one_in_twenty_are_forgiven(
    blocks: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, answer = WrittenDown(), cast(Any, SimpleNamespace(settled_ns=(9,)))
    handle.is_new = False
    monkeypatch.setattr(handle, "_unsettled", lambda _answer: [])
    for _ in range(blocks - allowed - 1):
        assert not handle._late_once_too_often(answer)
    monkeypatch.setattr(handle, "_unsettled", lambda _answer: [LATE])
    verdicts = [handle._late_once_too_often(answer) for _ in range(allowed + 1)]
    assert verdicts[-1] == [LATE]
    assert verdicts[:1] == [[]]


def test_a_new_process_and_a_graph_spend_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = WrittenDown()
    monkeypatch.setattr(handle, "_unsettled", lambda _answer: [LATE])
    assert handle._late_once_too_often(cast(Any, SimpleNamespace(settled_ns=(9,)))) == [LATE]
    handle.is_new = False
    monkeypatch.setattr(handle, "_unsettled", lambda _answer: [])
    assert handle._late_once_too_often(cast(Any, SimpleNamespace(settled_ns=()))) == []
    assert handle._blocks == 0


FLUSH = rounds.Flush(bytes=1 << 28, ns=70_000)
CALLS = 20
HEAD_NS = CALLS * 142_000


def block_answer(between_ns: int, head_ns: int = HEAD_NS) -> BlockReturned:
    """Calls of 50 us, with so much between each of them and the next."""
    span_ns = head_ns + CALLS * (50_000 + 1_300 + between_ns)
    return BlockReturned(
        nonce=0, elapsed_ns=(50_000,) * CALLS, settled_ns=(1_300,) * CALLS, span_ns=span_ns, head_ns=head_ns
    )


@pytest.mark.parametrize("between_ns", [70_000, 75_000, 200_000])
def test_a_block_with_its_flushes_is_left_alone(between_ns: int) -> None:
    answer = block_answer(between_ns)
    assert rounds.unflushed(block_of(CALLS), answer, OutputsReady(nonce=0), FLUSH, num_slots=CALLS) is None


def test_a_block_without_room_for_its_flushes_is_a_cheat() -> None:
    reason = rounds.unflushed(block_of(CALLS), block_answer(6_000), OutputsReady(nonce=0), FLUSH, num_slots=CALLS)
    assert reason is not None
    assert reason.code is Code.CLOCK


def test_a_head_start_cannot_be_called_a_flush() -> None:
    answer = block_answer(70_000, head_ns=HEAD_NS // 2)
    assert rounds.unflushed(block_of(CALLS), answer, OutputsReady(nonce=0), FLUSH, num_slots=CALLS) is not None
    assert rounds.unflushed(block_of(CALLS), answer, OutputsReady(nonce=0), FLUSH, num_slots=3) is None, "no head start"


def test_a_trace_must_show_the_flushes() -> None:
    block = CallBlock(views=[], calls=CALLS, arena=0, first_slot=0, profile=True)
    answer = block_answer(70_000)
    seen, missing = OutputsReady(nonce=0, flush_ns=CALLS * 70_000), OutputsReady(nonce=0, flush_ns=CALLS * 2_000)
    assert rounds.unflushed(block, answer, seen, FLUSH, num_slots=CALLS) is None
    assert rounds.unflushed(block, answer, missing, FLUSH, num_slots=CALLS) is not None


def test_nothing_is_asked_of_graphs_and_of_no_flush() -> None:
    graph = CallBlock(views=[], calls=CALLS, arena=0, first_slot=0, graph=True)
    assert rounds.unflushed(graph, block_answer(0), OutputsReady(nonce=0), FLUSH, num_slots=CALLS) is None
    nothing = rounds.Flush()
    assert rounds.unflushed(block_of(CALLS), block_answer(0), OutputsReady(nonce=0), nothing, num_slots=CALLS) is None
