"""What it means that a library refuses a case: the exception that says so, and how it is told from a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_klineage.errors import UsageError

if TYPE_CHECKING:
    from pytest_klineage.records import KernelCase

REFUSALS = (RuntimeError, ValueError, AssertionError)
"""What libraries raise for what they do not take. An assertion that fails is a library's: this package has none."""
FAULTS = (
    "cuda error", "cuda_error", "out of memory", "allocate memory", "_alloc_failed", "_execution_failed",
    "_not_initialized", "driver", "nvcc", "ninja",
)  # fmt: skip
"""Words, in lower case, of the same exceptions where a device, memory, a driver or a build is the cause."""
NOT_SUPPORTED = "_not_supported"
"""How the status of cuBLAS and cuDNN ends that is a refusal, although PyTorch calls it a CUDA error."""
FRAME = '\n  File "'
NAMES = frozenset({*(kind.__name__ for kind in REFUSALS), "NotImplementedError"})


class UnsupportedCase(UsageError):
    """A reference does not take a case: its limits say so beforehand, or the library itself when it was tried."""

    @classmethod
    def of(cls, name: str, case: KernelCase, platform: str, why: str) -> UnsupportedCase:
        """The error as its reader gets it: which reference, which case, where, and what the library said."""
        return cls(f"the reference {name} cannot run {case.id} on {platform}: {why}")


def refuses(said: str) -> bool:
    """Whether what a library said is about the case, and not about the machine that it was tried on."""
    text = said.lower()
    return NOT_SUPPORTED in text or not any(fault in text for fault in FAULTS)


def refusal_in(traceback: str, *, tried: bool) -> str:
    """What a library said when it refused, from the end of a worker's traceback; empty for everything else.

    Where a reference was tried beforehand, refusals are UnsupportedCase and nothing else is one; where it was not, an
    exception of the kinds that libraries raise counts too.
    """
    lines = traceback.rpartition(FRAME)[2].splitlines()[1:]
    while lines and lines[0][:1] in ("", " "):
        lines.pop(0)
    said = "\n".join(lines).strip()
    name, _, why = said.partition(": ")
    if name == f"{UnsupportedCase.__module__}.{UnsupportedCase.__qualname__}":
        return why
    return said if not tried and name in NAMES and refuses(said) else ""
