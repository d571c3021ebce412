"""Framing over a real socket pair: what arrives, what is refused, and what a peer that misbehaves costs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_klineage.channel import HEADER, MAX_FDS, BadFrame, Channel, ChannelClosed


class Note(msgspec.Struct, frozen=True, tag=True):
    text: str
    numbers: tuple[int, ...] = ()


class Other(msgspec.Struct, frozen=True, tag=True):
    value: float


@contextlib.contextmanager
def connected(max_frame_bytes: int = 1 << 20) -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    here, there = Channel(left), Channel(right, max_frame_bytes=max_frame_bytes)
    try:
        yield here, there
    finally:
        here.close()
        there.close()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    with connected() as ends:
        yield ends


Pair = tuple[Channel, Channel]


def frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def receive_all(channel: Channel) -> None:
    while True:
        channel.receive(Note, timeout_s=5)


@settings(max_examples=50)
@given(st.lists(st.builds(Note, st.text(), st.lists(st.integers(0, 1 << 60)).map(tuple)), max_size=5))
def test_messages_arrive_whole_and_in_order(notes: list[Note]) -> None:
    with connected() as (here, there):
        for note in notes:
            here.send(note)
        assert [there.receive(Note, timeout_s=5) for _ in notes] == notes


def test_a_union_is_decoded_by_its_tag(pair: Pair) -> None:
    here, there = pair
    here.send(Other(2.5))
    here.send(Note("x"))
    assert there.receive(Note | Other, timeout_s=5) == Other(2.5)
    assert there.receive(Note | Other, timeout_s=5) == Note("x")


def test_a_frame_longer_than_the_socket_buffer_arrives() -> None:
    note = Note("x" * 3_000_000)
    with connected(1 << 23) as (here, there):
        sender = threading.Thread(target=here.send, args=(note,))
        sender.start()
        assert there.receive(Note, timeout_s=30) == note
        sender.join()


def test_a_frame_may_come_byte_by_byte(pair: Pair) -> None:
    here, there = pair
    for byte in frame(msgspec.json.encode(Note("slow"))):
        here.sock.send(bytes([byte]))
    assert there.receive(Note, timeout_s=5) == Note("slow")


def test_what_came_of_a_frame_is_kept_over_a_timeout(pair: Pair) -> None:
    here, there = pair
    data = frame(msgspec.json.encode(Note("late")))
    here.sock.sendall(data[:7])
    with pytest.raises(TimeoutError):
        there.receive(Note, timeout_s=0.02)
    here.sock.sendall(data[7:])
    assert there.receive(Note, timeout_s=5) == Note("late")


def test_the_longest_frame_is_read_and_one_byte_more_is_not() -> None:
    payload = msgspec.json.encode(Note("x" * 50))
    with connected(len(payload)) as (here, there):
        here.sock.sendall(frame(payload))
        assert there.receive(Note, timeout_s=5) == Note("x" * 50)
        here.send(Note("x" * 51))
        with pytest.raises(BadFrame, match=f"{len(payload) + 1} bytes; at most {len(payload)}"):
            there.receive(Note, timeout_s=5)


def test_an_oversize_frame_is_refused_before_it_is_read(pair: Pair) -> None:
    here, there = pair
    here.sock.sendall(HEADER.pack(0xFFFFFFFF))
    with pytest.raises(BadFrame, match="4294967295 bytes"):
        there.receive(Note, timeout_s=5)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"not json",
        b"\xff\xfe\x00",
        b"null",
        b"[1, 2]",
        b'{"type":"Nobody","text":"x"}',
        b'{"type":"Note"}',
        b'{"type":"Note","text":3}',
        b'{"type":"Note","text":"\xff"}',
        b'{"type":"Note","text":"x","more":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    ],
    ids=["empty", "words", "bytes", "null", "array", "tag", "missing", "type", "utf8", "deep"],
)
def test_rubbish_is_a_bad_frame(pair: Pair, payload: bytes) -> None:
    here, there = pair
    here.sock.sendall(frame(payload))
    with pytest.raises(BadFrame):
        there.receive(Note | Other, timeout_s=5)


@settings(max_examples=100)
@given(st.binary(min_size=4, max_size=60))
def test_random_bytes_never_do_worse_than_an_exception_of_ours(data: bytes) -> None:
    with connected(1000) as (here, there):
        here.sock.sendall(data)
        here.sock.shutdown(socket.SHUT_WR)
        with pytest.raises((BadFrame, ChannelClosed)):
            receive_all(there)


def test_after_rubbish_the_next_frame_is_read(pair: Pair) -> None:
    here, there = pair
    here.sock.sendall(frame(b"rubbish"))
    here.send(Note("good"))
    with pytest.raises(BadFrame, match="frame begins b'rubbish'"):
        there.receive(Note, timeout_s=5)
    assert there.receive(Note, timeout_s=5) == Note("good")


def test_a_closed_peer_is_noticed_when_receiving(pair: Pair) -> None:
    here, there = pair
    here.close()
    with pytest.raises(ChannelClosed):
        there.receive(Note, timeout_s=None)


def test_a_peer_that_closes_inside_a_frame_is_noticed(pair: Pair) -> None:
    here, there = pair
    here.sock.sendall(frame(b'{"type":"Note"}')[:9])
    here.close()
    with pytest.raises(ChannelClosed):
        there.receive(Note, timeout_s=5)


def test_what_was_sent_before_closing_still_arrives(pair: Pair) -> None:
    here, there = pair
    here.send(Note("last words"))
    here.close()
    assert there.receive(Note, timeout_s=5) == Note("last words")


def test_a_closed_peer_is_noticed_when_sending(pair: Pair) -> None:
    here, there = pair
    there.close()
    with pytest.raises(ChannelClosed):
        here.send(Note("anybody?"))


def test_silence_ends_at_the_deadline(pair: Pair) -> None:
    _here, there = pair
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        there.receive(Note, timeout_s=0.05)
    assert time.monotonic() - started >= 0.05


def test_a_trickle_does_not_extend_the_deadline(pair: Pair) -> None:
    here, there = pair
    done = threading.Event()

    def trickle() -> None:
        here.sock.sendall(HEADER.pack(1000))
        while not done.wait(0.005):
            here.sock.sendall(b" ")

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(TimeoutError):
            there.receive(Note, timeout_s=0.1)
    finally:
        done.set()
        sender.join()


def test_a_descriptor_arrives_beside_its_message(pair: Pair) -> None:
    here, there = pair
    read_fd, write_fd = os.pipe()
    here.send(Note("a pipe"), [write_fd])
    os.close(write_fd)
    there.receive(Note, timeout_s=5)
    received = there.take_fd()
    os.write(received, b"hello")
    os.close(received)
    assert os.read(read_fd, 10) == b"hello"
    os.close(read_fd)


def test_descriptors_come_in_the_order_they_were_sent(pair: Pair) -> None:
    here, there = pair
    sent = [os.memfd_create(name) for name in ("first", "second")]
    here.send(Note("two"), sent)
    for fd in sent:
        os.close(fd)
    there.receive(Note, timeout_s=5)
    received = [there.take_fd(), there.take_fd()]
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in received]
    for fd in received:
        os.close(fd)
    assert ["first" in names[0], "second" in names[1]] == [True, True]


def test_a_missing_descriptor_is_a_bad_frame(pair: Pair) -> None:
    here, there = pair
    here.send(Note("no pipe"))
    there.receive(Note, timeout_s=5)
    with pytest.raises(BadFrame, match="a file descriptor was expected"):
        there.take_fd()


def test_unclaimed_descriptors_close_with_the_channel(pair: Pair) -> None:
    here, there = pair
    read_fd, write_fd = os.pipe()
    here.send(Note("a pipe"), [write_fd])
    os.close(write_fd)
    there.receive(Note, timeout_s=5)
    there.close()
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)


def test_a_peer_cannot_fill_the_table_of_descriptors(pair: Pair) -> None:
    here, there = pair
    before = len(os.listdir("/proc/self/fd"))
    here.sock.sendall(HEADER.pack(100))
    for _ in range(20):
        socket.send_fds(here.sock, [b" "], [here.fileno()])
    with pytest.raises(BadFrame, match="file descriptors"):
        there.receive(Note, timeout_s=5)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * MAX_FDS
