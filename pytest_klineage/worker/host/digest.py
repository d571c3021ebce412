"""What a worker's answer says about its outputs, so that nothing can be computed once it is on its way.

The worker need not be trusted for it: who does not have the outputs cannot know their digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from pytest_klineage.records import Placement, Slot

WHOLE_BYTES, PIECES = 1 << 14, 16
"""An output of more bytes is read in so many pieces of as many bytes in all: 16 KiB take some 20 us, which lie between
the two clocks of both sides."""
STEP, START = 6364136223846793005, 1442695040888963407
"""Of a linear congruential generator modulo 2^64 (Knuth, MMIX)."""


def output_digest(memory: memoryview, slot: Slot, nonce: int) -> str:
    """Digest of a slot's outputs as they lie in memory now; of large ones, of pieces that `nonce` decides.

    Outputs cannot be chosen for a digest: a sum of bits could be met by changing some of them within the tolerance.
    """
    found = hashlib.blake2b(digest_size=16)
    for placement in slot.outputs:
        for start, end in pieces(placement, nonce):
            found.update(memory[start:end])
    return found.hexdigest()


def pieces(placement: Placement, nonce: int) -> Iterator[tuple[int, int]]:
    """Where they begin and end."""
    if placement.num_bytes <= WHOLE_BYTES:
        yield placement.offset, placement.offset + placement.num_bytes
        return
    size = WHOLE_BYTES // PIECES
    for _ in range(PIECES):
        nonce = (nonce * STEP + START) % (1 << 64)
        # The upper bits: the lower ones of such a generator repeat soon.
        start = placement.offset + (nonce >> 16) % (placement.num_bytes - size + 1)
        yield start, start + size
