"""Whose work is it: classes of the kernels that a device executed, and what follows for a kernel that leans on others.

Pure functions. The names are those under which the device's own tracing lists what it executes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from pytest_klineage.records import Code, Reason
from pytest_klineage.records.messages import Profiled

FOREIGN_SHARE = 0.10
"""Device time that may be a library's or the framework's before the work counts as theirs."""
HIDDEN_SHARE, HIDDEN_NS = 0.25, 4_000
"""Device time beyond the calls' own events before it counts as hidden: a share of it, and so much per call."""
WATCHED_SHARE, WATCHED_MS = 2.0, 0.02
"""How much slower a call may be while it is traced: so many times, or by so much, whichever is longer."""
SHOWN = 3


class Owner(StrEnum):
    """Who wrote a kernel that was executed."""

    OWN = "own"
    VENDOR = "vendor"
    FRAMEWORK = "framework"


FRAMEWORK = re.compile(
    r"\bat::|\bc10::|\bat_cuda_detail::|\btorch::|\bcaffe2::|pytorch_|_pytorch|\bgatherTopK\b|\bsbtopk\b|\bmbtopk\b"
)
VENDOR = re.compile(
    r"cublas|nvjet|cudnn|\bsm\d+_xmma|_xmma_|implicit_gemm|implicit_convolve"
    r"|\b(?:ampere|volta|turing|hopper)_\w*_\d+x\d+"
    r"|flashinfer|flash_fwd|\bflash::|FlashAttnFwd|\bcudnn_|nchwToNhwc|nhwcToNchw|cufft|cusolver|cusparse"
    r"|^(?:void )?thrust::"
    r"|\bcask_|gemmk1|gemv2|splitKreduce|dot_kernel<|\bfla_|flag_gems|chunk_gated_delta|chunk_fwd_kernel",
    re.I,
)
CUTLASS = re.compile(r"\bcutlass::(Kernel|device_kernel|gemm::kernel)")
COPY = re.compile(r"^(Memcpy|Memset)|\bat::native::FillFunctor<")
"""Copies and fills, which compute nothing."""


def owner_of(name: str, *, own_symbols: Iterable[str] = ()) -> Owner:
    """Who wrote the kernel of this name.

    `own_symbols` are functions that the candidate's own build has produced. They tell a template of CUTLASS that the
    candidate has instantiated from one in a library. Kernels of a CUDA source whose own names look like a vendor's are
    built under other names (stages/build.py).
    """
    if COPY.search(name):
        return Owner.OWN
    if FRAMEWORK.search(name):
        return Owner.FRAMEWORK
    if VENDOR.search(name) or (CUTLASS.search(name) and function_of(name) not in own_symbols):
        return Owner.VENDOR
    return Owner.OWN


def foreign_part(name: str) -> str:
    """What of a name is a vendor's or the framework's; the whole name where nothing is."""
    found = FRAMEWORK.search(name) or VENDOR.search(name) or CUTLASS.search(name)
    return found.group() if found else name


def function_of(name: str) -> str:
    """The function's own name: without its result, namespaces, template arguments and parameters."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", plain, maxsplit=1)[0].rpartition("::")[2].strip()


def foreign_reason(profiled: Profiled, *, own_symbols: Iterable[str] = ()) -> Reason | None:
    """A reason when kernels of a library or of the framework do the work."""
    own_symbols = tuple(own_symbols)
    total = sum(kernel.total_ns for kernel in profiled.kernels)
    for owner, code in ((Owner.VENDOR, Code.WRAPPER_LIBRARY), (Owner.FRAMEWORK, Code.WRAPPER_FRAMEWORK)):
        theirs = [kernel for kernel in profiled.kernels if owner_of(kernel.name, own_symbols=own_symbols) is owner]
        share = sum(kernel.total_ns for kernel in theirs) / total if total else 0.0
        if share > FOREIGN_SHARE:
            names = ", ".join(short(kernel.name) for kernel in theirs[:SHOWN])
            whose = "a vendor library" if owner is Owner.VENDOR else "the framework"
            message = (
                f"{100 * share:.0f} % of the device's time went to kernels of {whose}, known by name: {names}. A "
                f"kernel of your own must not have {foreign_part(theirs[0].name)!r} in its name: rename it"
            )
            return Reason(code=code, message=message, evidence={"share": share, "kernels": len(theirs)})
    return None


def watched_reason(profiled: Profiled, timed_ms: float) -> Reason | None:
    """A reason when kernels take much longer once they are watched: then what was timed was something else.

    Only the kernels' own time counts: tracing puts microseconds between the kernels of a call.
    """
    per_call_ms = profiled.busy_ns / 1e6 / profiled.calls
    if per_call_ms <= max(WATCHED_SHARE * timed_ms, timed_ms + WATCHED_MS):
        return None
    message = (
        f"a call's kernels take {1e3 * per_call_ms:.1f} us while they are traced, {1e3 * timed_ms:.1f} us when timed"
    )
    return Reason(code=Code.CLOCK, message=message, evidence={"traced_ms": per_call_ms, "timed_ms": timed_ms})


def hidden_reason(profiled: Profiled) -> Reason | None:
    """A reason when the device executed no kernel, or worked longer than the calls took by their own events."""
    if profiled.busy_ns == 0 or all(COPY.search(kernel.name) for kernel in profiled.kernels):
        return Reason(
            code=Code.NO_DEVICE_WORK, message=f"the device executed no kernel during {profiled.calls} traced calls"
        )
    hidden = profiled.busy_ns - profiled.claimed_ns
    if hidden <= max(HIDDEN_SHARE * profiled.claimed_ns, HIDDEN_NS * profiled.calls):
        return None
    message = (
        f"the device worked {profiled.busy_ns / 1e3 / profiled.calls:.1f} us per call, the calls' own events say "
        f"{profiled.claimed_ns / 1e3 / profiled.calls:.1f} us"
    )
    evidence = {"busy_ns": profiled.busy_ns, "claimed_ns": profiled.claimed_ns, "calls": profiled.calls}
    return Reason(code=Code.CLOCK, message=message, evidence=dict(evidence))


def short(name: str, limit: int = 60) -> str:
    """A kernel's name without its arguments, bounded."""
    text = name.removeprefix("void ").partition("(")[0]
    return text if len(text) <= limit else text[:limit] + "..."
