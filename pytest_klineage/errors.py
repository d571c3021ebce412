"""The exception tree: misuse, and faults of the harness. A bad kernel is a verdict, not an exception.

KlineageError
├── UsageError              the caller named something that does not exist; the message lists what does
│   ├── UnknownName         an unknown platform, operator, dtype, reference, surface, policy or method
│   └── BadRecord           a record that does not decode, or that has another schema version
├── MissingDependency       an optional package, compiler or device is absent; the message has the remedy
├── Waiting                 what was asked for elsewhere has not come yet; the same command goes on later
│   ├── WaitsForVerdict     a judgement was asked for in a folder, and no judge has answered
│   └── WaitsForReply       a prompt lies in a folder, and its reply is not there yet
├── DeviceOutOfMemory       a case's inputs and answers do not fit into the GPU
└── HarnessError            the judge's own machinery failed: a trusted worker died or broke the protocol
    ├── WorkerDied          a trusted worker process ended
    ├── DeadlineExceeded    a trusted worker did not answer in time
    └── StoreError          the run store cannot be written or read
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KlineageError(Exception):
    """Base of every exception that this package raises on purpose."""


class UsageError(KlineageError):
    """The caller asked for something that cannot be; the message says what can."""


class UnknownName(UsageError):
    """A name that is not registered. The message lists the valid names and the nearest one."""

    def __init__(self, kind: str, name: object, valid: Iterable[str]) -> None:
        self.kind, self.name, self.valid = kind, name, sorted(valid)
        near = get_close_matches(str(name), self.valid, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {str(name)!r}.{hint} Valid: {', '.join(self.valid) or '(none)'}.")


class BadRecord(UsageError):
    """A record could not be decoded, or its schema version is not the one this version reads."""


class MissingDependency(KlineageError):
    """Something optional is not installed. `remedy` is the command that would fix it."""

    _LINK = " is missing. Install it with: "

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"{what}{self._LINK}{remedy}")

    @classmethod
    def parsed(cls, message: str) -> MissingDependency:
        """The same error from its message, which is what another process sends of it."""
        what, _, remedy = message.partition(cls._LINK)
        return cls(what, remedy)


class Waiting(KlineageError):
    """What was asked for elsewhere has not come yet. `where` says where it is expected; nothing has failed.

    Loops let it through without recording an end: the same command goes on from there when the answer is there.
    """

    def __init__(self, where: str, message: str) -> None:
        self.where = where
        super().__init__(message)


class WaitsForVerdict(Waiting):
    """A judgement was asked for at `where`, and has no reply. `request` is its digest, where there is one."""

    def __init__(self, where: str, message: str, request: str = "") -> None:
        self.request = request
        super().__init__(where, message)


class WaitsForReply(Waiting):
    """A prompt lies in the folder `where`, and has no reply."""


class DeviceOutOfMemory(KlineageError):
    """The oracle's inputs and answers for a case do not fit into the memory of the GPU."""


class HarnessError(KlineageError):
    """The judge's own machinery failed; no verdict about the kernel follows from it."""


class WorkerDied(HarnessError):
    """A trusted worker process ended while the judge still needed it. `killed`: by the system, most likely for memory,
    which is no doing of what it evaluated."""

    def __init__(self, message: str, *, killed: bool = False) -> None:
        self.killed = killed
        super().__init__(message)


class DeadlineExceeded(HarnessError):
    """A trusted worker did not answer within its deadline."""


class StoreError(HarnessError):
    """The run store cannot be written or read."""
