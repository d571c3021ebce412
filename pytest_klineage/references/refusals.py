"""What it means that a library refuses a case: the exception that says so, and what distinguishes it from a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_klineage.errors import UsageError

if TYPE_CHECKING:
    from pytest_klineage.records import KernelCase

REFUSALS = (RuntimeError, ValueError, AssertionError)
"""What libraries raise for what they do not take. An assertion that fails is a library's: this package has none."""
ABOUT_CASES = (
    "not support", "unsupported", "not implemented", "not available", "no available kernel", "no kernel",
    "only support", "can only", "must be", "must have", "must come",
)  # fmt: skip
"""Words, in lower case, of what a library says when it does not take a case. Anything else it says is a failure."""
FAULTS = (
    "cuda error", "cuda_error", "error [cuda]", "out of memory", "allocate memory", "_alloc_failed",
    "_execution_failed", "_not_initialized", "driver", "compiler", "nvcc", "nvrtc", "ptxas", "ninja",
)  # fmt: skip
"""Words, in lower case, that make it one all the same: a device, memory, a driver or a build is the cause."""
NOT_SUPPORTED = "_not_supported"
"""How the status of cuBLAS and cuDNN ends that is a refusal, although PyTorch calls it a CUDA error."""
CANNOT_RUN = "the reference "
"""How every sentence begins that a reference says of its own limits."""
FRAME = '\n  File "'
NAMES = frozenset({*(kind.__name__ for kind in REFUSALS), "NotImplementedError"})


class UnsupportedCase(UsageError):
    """A reference does not take a case: its limits say so beforehand, or the library itself when it was tried."""

    @classmethod
    def of(cls, name: str, case: KernelCase, platform: str, why: str) -> UnsupportedCase:
        """The error as its reader gets it: which reference, which case, where, and what the library said."""
        return cls(f"{CANNOT_RUN}{name} cannot run {case.id} on {platform}: {why}")


def refuses(said: str) -> bool:
    """Whether what a library said is about the case, and not about the machine that it was tried on."""
    text = said.lower()
    if NOT_SUPPORTED in text:
        return True
    return any(word in text for word in ABOUT_CASES) and not any(fault in text for fault in FAULTS)


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
