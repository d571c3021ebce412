"""How the calling thread computes: rounding, denormal numbers and exceptions, as the processor's registers say.

Read by C99's `fegetenv`, since no instruction is within Python's reach. Flags of past exceptions are left out.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Callable

from pytest_klineage.records.messages import FLOAT_CONTROL

WORDS = struct.Struct("<8I")
"""As much of a C library's `fenv_t` as is looked at."""
MASKS: dict[str, dict[int, tuple[int, ...]]] = {
    # SSE's MXCSR is the last word of glibc's fenv_t, the x87 control word its first.
    "x86_64": {7: (0x6000, 0x8040, 0x1F80, 0), 0: (0x0C00, 0, 0x003F, 0x0300)},
    # FPCR: RMode; FZ, FZ16, AH and FIZ; the traps that are enabled.
    "aarch64": {0: (0x00C00000, 0x01080003, 0x9F00, 0)},
}
"""By machine and word of `fenv_t`, the bits for each of `records.messages.FLOAT_CONTROL`."""


class FloatControl:
    """What the thread that makes this is set to, and what is different later; on other machines nothing ever is."""

    def __init__(self) -> None:
        self._masks = MASKS.get(platform.machine(), {})
        self._environment = ctypes.create_string_buffer(2 * WORDS.size)
        self._before = self._now()

    def changed(self) -> int:
        """What has changed: bit i for the i-th of FLOAT_CONTROL."""
        found, now = 0, self._now()
        for word, masks in self._masks.items():
            differing = now[word] ^ self._before[word]
            found |= sum(1 << i for i, mask in enumerate(masks) if differing & mask)
        return found

    def keep(self, name: str) -> bool:
        """Take one of FLOAT_CONTROL for what it was from the start. Returns whether it had changed."""
        bit = FLOAT_CONTROL.index(name)
        if not self.changed() >> bit & 1:
            return False
        before = list(self._before)
        for word, masks in self._masks.items():
            before[word] ^= masks[bit] & (before[word] ^ self._now()[word])
        self._before = tuple(before)
        return True

    def _now(self) -> tuple[int, ...]:
        if READ is None or READ(self._environment):
            return (0,) * 8
        return WORDS.unpack_from(self._environment)


def reader() -> Callable[..., int] | None:
    """C's `fegetenv`; None in a process without it. Keeps the interpreter's lock, so that no other thread comes in."""
    found: Callable[..., int] | None = getattr(ctypes.PyDLL(None), "fegetenv", None)
    return found


READ = reader()
"""Looked up before any candidate is there."""
