"""Where OpenMP's threads of a kernel and its reference run on a CPU. Pure but for the reading of sysfs.

Unbound threads may wake on one processor after a pause and share it for a time slice or two, however many
others are idle. That takes milliseconds, on both sides of a pair, and pulls every ratio towards 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

TOPOLOGY = Path("/sys/devices/system/cpu")
UNBOUND = "none"


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Where OpenMP's threads are bound: by core, by thread, or nowhere."""

    name: str = UNBOUND
    """As records say it: "by core", "by thread" or "none"."""
    places: tuple[tuple[int, ...], ...] = ()
    """Processors of every place, in OpenMP's order."""

    @property
    def environment(self) -> dict[str, str]:
        """What OpenMP's runtimes read; nothing where threads are not bound."""
        if not self.places:
            return {}
        places = ",".join("{" + ",".join(map(str, position)) + "}" for position in self.places)
        return {"OMP_PROC_BIND": "close", "OMP_PLACES": places}

    @property
    def processors(self) -> tuple[int, ...]:
        """All processors of all places, sorted."""
        return tuple(sorted(processor for position in self.places for processor in position))


def binding_of(threads: int, allowed: Iterable[int], siblings: Mapping[int, frozenset[int]]) -> Binding:
    """The binding for so many threads on the `allowed` processors, whose hardware siblings are given.

    Where two allowed processors are of one core, a place is a core: its threads share it either way, and may change
    sides. Else a place is a processor. With fewer threads than processors nothing is bound: a sandboxed worker is then
    kept on a part of them and may not choose among them (`worker/sandbox/containment.py`).
    """
    usable = sorted(set(allowed))
    if threads < len(usable) or not usable:
        return Binding()
    cores = {frozenset(siblings.get(processor, frozenset({processor}))) & frozenset(usable) for processor in usable}
    places = tuple(sorted(tuple(sorted(core)) for core in cores))
    return Binding(name="by core" if any(len(position) > 1 for position in places) else "by thread", places=places)


def binding_here(threads: int) -> Binding:
    """The binding on this machine, within the processors that affinity and cpusets leave to this process."""
    if not hasattr(os, "sched_getaffinity"):
        return Binding()
    allowed = os.sched_getaffinity(0)
    return binding_of(threads, allowed, {processor: siblings_of(processor) for processor in allowed})


def siblings_of(processor: int, topology: Path = TOPOLOGY) -> frozenset[int]:
    """The processors of the same core, by sysfs; the processor alone where that is not known."""
    try:
        return parse_list((topology / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text())
    except (OSError, ValueError):
        return frozenset({processor})


def parse_list(text: str) -> frozenset[int]:
    """Numbers of a list as the system writes it, such as "0-3,8". Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
