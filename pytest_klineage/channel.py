"""Framed messages between judge and workers: length-prefixed JSON over a socket, with file descriptors beside it.

Nothing here unpickles, and every frame is bounded: a peer that sends rubbish costs an exception, not memory.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgspec

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_FDS = 4


class ChannelClosed(ConnectionError):
    """The peer closed its end, usually because its process ended."""


class BadFrame(ValueError):
    """The peer sent something that is not one of the expected messages."""


class Channel:
    """One end of a stream socket that carries msgspec structs.

    `max_frame_bytes` bounds what the peer may send; a longer frame raises BadFrame before it is read.
    """

    def __init__(self, sock: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.sock = sock
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._encoder = msgspec.json.Encoder()

    @classmethod
    def from_fd(cls, fd: int, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> Channel:
        return cls(socket.socket(fileno=fd), max_frame_bytes=max_frame_bytes)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        """Close this end, with the descriptors that came and were not taken."""
        for fd in self._fds:
            socket.close(fd)
        self._fds.clear()
        self.sock.close()

    def send(self, message: Any, fds: list[int] | None = None) -> None:
        """Send one message. Raises ChannelClosed if the peer is gone."""
        payload = self._encoder.encode(message)
        frame = HEADER.pack(len(payload)) + payload
        self.sock.settimeout(None)
        try:
            if fds:
                sent = socket.send_fds(self.sock, [frame], fds)
                frame = frame[sent:]
            if frame:
                self.sock.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, kind: Any, *, timeout_s: float | None) -> Any:
        """The next message, decoded as `kind` (a struct or a tagged union).

        Raises TimeoutError, ChannelClosed at end of stream, BadFrame on rubbish.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(HEADER.size, deadline)
        (length,) = HEADER.unpack_from(self._buffer)
        if length > self.max_frame_bytes:
            raise BadFrame(f"a frame of {length} bytes; at most {self.max_frame_bytes} are read")
        self._fill(HEADER.size + length, deadline)
        payload = bytes(self._buffer[HEADER.size : HEADER.size + length])
        del self._buffer[: HEADER.size + length]
        try:
            return msgspec.json.decode(payload, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"{error}; frame begins {payload[:80]!r}") from error

    def take_fd(self) -> int:
        """The oldest file descriptor that came with the messages received so far."""
        if not self._fds:
            raise BadFrame("a file descriptor was expected beside the message")
        return self._fds.pop(0)

    def _fill(self, size: int, deadline: float | None) -> None:
        while len(self._buffer) < size:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("no message within the deadline")
                self.sock.settimeout(left)
            else:
                self.sock.settimeout(None)
            try:
                data, fds, _flags, _address = socket.recv_fds(self.sock, 1 << 16, MAX_FDS)
            except ConnectionResetError as error:
                raise ChannelClosed(str(error)) from error
            self._fds.extend(fds)
            if len(self._fds) > MAX_FDS:
                raise BadFrame(f"more than {MAX_FDS} unexpected file descriptors came")
            if not data:
                raise ChannelClosed("the peer closed the channel")
            self._buffer += data
