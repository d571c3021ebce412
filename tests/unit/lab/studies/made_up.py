"""Chains that no model made: verdicts, shots and trajectories for the tests of the analysis."""

from __future__ import annotations

from pytest_klineage.lab.optimizers.recording import VERDICT_TOPIC, VerdictMessage
from pytest_klineage.lab.optimizers.session import MALFORMED_TOPIC, STEP_TOPIC
from pytest_klineage.lab.studies.chains import Chain, Shot
from pytest_klineage.records import (
    Answered,
    Begun,
    Code,
    Event,
    Interval,
    Judged,
    KernelCase,
    Noted,
    Reason,
    StopReason,
    Surface,
    Timing,
    Usage,
    Verdict,
    to_json,
)

CASE = KernelCase(operator="gemm", shape={"M": 8, "N": 8, "K": 8}, dtype="fp32", reference="torch")


def verdict(said: float | Code, digest: str = "0" * 64, label: str = "") -> Verdict:
    """A right kernel with that speedup, or one that is refused for a reason."""
    code = said if isinstance(said, Code) else Code.ACCEPTED_FASTER
    timing = None
    if not isinstance(said, Code):
        timing = Timing(
            policy="paired", reference_ms=1.0, candidate_ms=1 / said, speedup=Interval(said, said, said, 0.95),
            reference_samples_ms=(1.0,), candidate_samples_ms=(1 / said,), warmup=1, flush_bytes=0, statistic="made up",
        )  # fmt: skip
    return Verdict(
        case=CASE, status=code.status, reasons=(Reason(code=code, message="made up"),), surface=Surface.CPP,
        source_digest=digest, timing=timing, label=label,
    )  # fmt: skip


def chain(arm: str, target: str, repeat: int, *shots: float | Code | None, case: str = "") -> Chain:
    """A chain whose shots have these speedups, reasons, or no kernel; each took 100 tokens and 10 cents."""
    made = tuple(
        Shot(verdict=None if one is None else verdict(one), tokens=100 * number, usd=0.1 * number)
        for number, one in enumerate(shots, 1)
    )
    return Chain(arm=arm, target=target, repeat=repeat, shots=made, case=case or target)


def judged(call: int, said: float | Code) -> list[Event]:
    """What a trajectory has of a kernel that a call brought; call 0 is the root."""
    digest = f"{call:064d}"
    message = VerdictMessage(verdict=verdict(said, digest), feedback="made up")
    note = Noted(topic=VERDICT_TOPIC, text=to_json(message).decode())
    return [note, Judged(source_digest=digest, code=message.verdict.code, verdict="", call=call)]


def answered(call: int) -> Answered:
    """A reply of 30 tokens to 70."""
    usage = Usage(model="made up", input_tokens=70, output_tokens=30, cost_usd=0.5)
    return Answered(call=call, text="", stop_reason=StopReason.END, model="made up", usage=usage)


def malformed(step: int) -> Noted:
    """A reply without a kernel."""
    return Noted(topic=MALFORMED_TOPIC, text=f"step {step}: no kernel")


def again(step: int, earlier: int) -> Noted:
    """A reply with the kernel of an earlier step."""
    return Noted(topic=STEP_TOPIC, text=f"step {step}: the same kernel as step {earlier}, not judged again")


def begun(**settings: str) -> Begun:
    """How a trajectory begins."""
    return Begun(name="made up", backend="exchange", model="made up", budget_usd=1.0, settings=settings)
