"""What a device's trace is reduced to, and what the loop answers when: by a clock that stands in for a GPU's."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.channel import Channel
from pytest_klineage.errors import DeviceOutOfMemory, HarnessError
from pytest_klineage.records import Code
from pytest_klineage.records.messages import (
    BlockReturned,
    EventsMade,
    Finished,
    FromWorker,
    MakeEvents,
    OutputsReady,
    ReturnedTensor,
    RunBlock,
)
from pytest_klineage.worker.device.calls import DeviceLoop, DeviceMapping, code_of, halves
from pytest_klineage.worker.device.trace import MAX_KERNELS, MAX_NAME, by_name, covered_ns, summary

SPANS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100)).map(lambda s: (s[0], s[0] + s[1])), max_size=20)


def test_kernels_of_one_name_are_added_up_and_sorted() -> None:
    kernels = by_name({(0, 5, "a"), (10, 7, "a"), (20, 30, "b")})
    assert [(kernel.name, kernel.calls, kernel.total_ns) for kernel in kernels] == [("b", 1, 30), ("a", 2, 12)]


def test_what_is_ours_is_left_out_and_no_more() -> None:
    """A kernel of the candidate's that borrows the name of one of ours is one too many, and stays."""
    executed = [
        (0, 900, "spin_kernel(long)"), (1000, 300, "spin_kernel(long)"), (2000, 60, "Memset (Device)"),
        (2100, 2, "Memset (Device)"), (2200, 3, "BitwiseXorFunctor"), (2300, 1, "BitwiseXorFunctor"), (2400, 10, "own"),
    ]  # fmt: skip
    kernels, busy_ns, _flush_ns = summary(executed, fills=1, masks=1)
    assert {(kernel.name, kernel.total_ns) for kernel in kernels} == {
        ("spin_kernel(long)", 300), ("Memset (Device)", 2), ("BitwiseXorFunctor", 3), ("own", 10),
    }  # fmt: skip
    assert busy_ns == 315


def test_flushes_and_our_copies_are_not_counted_as_kernels() -> None:
    executed = [
        (0, 60, "Memset (Device)"), (100, 70, "Memset (Device)"), (200, 4, "at::direct_copy_kernel_cuda"),
        (300, 9, "at::direct_copy_kernel_cuda"), (400, 50, "own"),
    ]  # fmt: skip
    kernels, busy_ns, flush_ns = summary(executed, fills=2, masks=0, copies=1)
    assert flush_ns == 130
    assert busy_ns == 63
    assert {(kernel.name, kernel.total_ns) for kernel in kernels} == {("at::direct_copy_kernel_cuda", 9), ("own", 50)}


@pytest.mark.parametrize("name", ["BitwiseXor_gemm(int*)", "Memset_gemm(int*)"])
def test_a_borrowed_name_hides_no_time(name: str) -> None:
    executed = [(0, 60, "Memset (Device)"), (100, 3, "BitwiseXorFunctor"), (200, 500, name)]
    kernels, busy_ns, _flush_ns = summary(executed, fills=1, masks=1)
    assert busy_ns == 500
    assert [kernel.name for kernel in kernels] == [name]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_a_mask_is_undone_by_itself(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).view(3, 4).to(dtype).t()
    before = tensor.clone()
    halves(tensor).bitwise_xor_(12345)
    assert not torch.equal(tensor, before)
    halves(tensor).bitwise_xor_(12345)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_an_odd_byte_stays_unmasked(dtype: torch.dtype) -> None:
    tensor = torch.arange(7).remainder(2).to(dtype)
    before = tensor.view(torch.uint8).clone()
    halves(tensor).bitwise_xor_(12345)
    assert not torch.equal(tensor.view(torch.uint8)[:6], before[:6])
    assert int(tensor.view(torch.uint8)[6]) == int(before[6])
    halves(tensor).bitwise_xor_(12345)
    assert torch.equal(tensor.view(torch.uint8), before)


def test_inout_tensors_are_given_back_before_every_further_call() -> None:
    mapping = DeviceMapping.__new__(DeviceMapping)
    x, y = torch.ones(4), torch.zeros(4)
    mapping._masked, mapping._inout, mapping._kept = [[halves(x)], [halves(y)]], [[x], []], {}
    mapping.calls = [lambda: None, lambda: None]
    halves(x).bitwise_xor_(77)
    first = mapping.preparation(0, 77, first=True, again=True)
    assert first is not None
    first()
    assert torch.equal(x, torch.ones(4))
    x.add_(1)
    further = mapping.preparation(0, 77, first=False, again=True)
    assert further is not None
    further()
    assert torch.equal(x, torch.ones(4))
    assert mapping.preparation(1, 0, first=False, again=True) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Code.OUT_OF_MEMORY),
        (DeviceOutOfMemory("cuMemCreate failed"), Code.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: an illegal memory access"), Code.CUDA_ERROR),
        (HarnessError("cuEventCreate failed: CUDA_ERROR_ILLEGAL_ADDRESS"), Code.CUDA_ERROR),
        (ValueError("no"), Code.EXCEPTION),
    ],
)
def test_errors_of_the_device_have_codes_of_their_own(error: Exception, code: Code) -> None:
    assert code_of(error) is code


def test_what_is_kept_is_bounded() -> None:
    kernels = by_name({(n, 1, f"{n}" + "x" * 1000) for n in range(3 * MAX_KERNELS)})
    assert len(kernels) == MAX_KERNELS
    assert all(len(kernel.name) <= MAX_NAME for kernel in kernels)


def test_covered_time_counts_overlaps_once() -> None:
    assert covered_ns([]) == 0
    assert covered_ns([(0, 10), (5, 15), (20, 25), (21, 22)]) == 20


@given(SPANS)
def test_covered_time_is_the_number_of_moments_in_any_span(spans: list[tuple[int, int]]) -> None:
    assert covered_ns(spans) == len({moment for start, stop in spans for moment in range(start, stop)})


class StandInClock:
    """Writes down what it is asked to do; every span of time is 5 ns. The real one needs a driver."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.begin = self.ready = SimpleNamespace()

    def moments(self, count: int) -> list[Any]:
        self.did.append(f"moments {count}")
        return [SimpleNamespace(start=0, stop=1, settled=2) for _ in range(count)]

    def run(self, moments: Any, invoke: Any, prepare: Any = None, flush_bytes: int = 0) -> Any:
        self.did.append(f"call {flush_bytes}" if flush_bytes else "call")
        return invoke()

    def between_ns(self, first: Any, last: Any) -> int:
        self.did.append("read")
        return 5

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: self.did.append(name)


@pytest.fixture
def loop() -> Iterator[tuple[DeviceLoop, StandInClock, Channel]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    clock, oracle = StandInClock(), Channel(theirs)
    loop = DeviceLoop(Channel(ours), SimpleNamespace(copied_under_the_clock=True), clock)  # type: ignore[arg-type] # stand-ins
    calls, slots = [lambda: None] * 2, [SimpleNamespace(outputs=(), separate=())] * 2
    loop.arenas.append(
        SimpleNamespace(
            calls=calls, slots=slots, preparation=lambda *_args, **_named: None, prepare=lambda *_args, **_named: None,
            restore=lambda *_args: None, memory=None,
        )
    )  # fmt: skip
    yield loop, clock, oracle
    loop.channel.close()
    oracle.close()


def test_events_are_made_before_and_read_after_a_block(
    loop: tuple[DeviceLoop, StandInClock, Channel],
) -> None:
    worker, clock, oracle = loop
    worker.run(MakeEvents(calls=3, nonce=7))
    assert oracle.receive(FromWorker, timeout_s=1) == EventsMade(nonce=7)
    assert clock.did == ["moments 3"]
    genuine_send = worker.channel.send

    def send(message: Any, *rest: Any) -> None:
        clock.did.append(type(message).__name__)
        genuine_send(message, *rest)

    worker.channel.send = send  # type: ignore[method-assign]
    worker.run(RunBlock(arena=0, slots=(0, 1, 0), nonce=8))
    assert oracle.receive(FromWorker, timeout_s=1) == Finished(nonce=8)
    returned = oracle.receive(FromWorker, timeout_s=1)
    assert isinstance(returned, BlockReturned)
    assert (returned.elapsed_ns, returned.settled_ns, returned.span_ns) == ((5,) * 3, (5,) * 3, 5)
    assert isinstance(oracle.receive(FromWorker, timeout_s=1), OutputsReady)
    finished = clock.did.index("Finished")
    assert clock.did.index("wait") < finished
    assert "read" not in clock.did[:finished]
    assert clock.did[finished + 1 :].count("read") == 8


def test_results_are_copied_within_the_call_unless_a_reference(
    loop: tuple[DeviceLoop, StandInClock, Channel],
) -> None:
    worker, clock, oracle = loop
    mapping = worker.arenas[0]
    mapping.calls = [lambda: "answer"] * 2
    placed = (ReturnedTensor(address=1, num_bytes=2, strides=(1,)),)
    worker._materialise = lambda *_arguments: (clock.did.append("copy"), placed)[1]
    for at_once in (True, False):
        worker.kernel.copied_under_the_clock = at_once  # type: ignore[misc] # a stand-in
        clock.did.clear()
        worker.run(RunBlock(arena=0, slots=(0, 1), nonce=9, flush_bytes=64))
        kinds = [oracle.receive(FromWorker, timeout_s=1) for _ in range(3)]
        done = kinds[2]
        assert isinstance(done, OutputsReady)
        assert done.tensors == placed * 2
        last_call = len(clock.did) - clock.did[::-1].index("call 64")
        copies = [position for position, what in enumerate(clock.did) if what == "copy"]
        assert len(copies) == 2
        assert (copies[0] < last_call) is at_once
