"""A verdict in words, for the test that it fails: what was found, the figures, the logs (bounded), the next step."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_klineage.records import Code, Reason, Status, Verdict
from pytest_klineage.report.advice import next_step
from pytest_klineage.report.tables import milliseconds, speedup_text
from pytest_klineage.report.wording import distinct, format_message

LOG_LINES = 30
LOG_COLUMNS = 200


def explain(verdict: Verdict) -> str:
    """Several lines of plain text; the first says what happened to which kernel on which case."""
    name = f"kernel {verdict.label!r}" if verdict.label else "the kernel"
    lines = [f"{name} is not accepted on {verdict.case.id}: {verdict.status.value.replace('_', ' ')}"]
    shown, left = distinct(verdict.reasons)
    for reason in shown:
        lines += _reason(reason)
    if left:
        lines.append(f"  and {left} more")
    if verdict.timing is not None:
        timing = verdict.timing
        lines.append(
            f"  timing: reference {milliseconds(timing.reference_ms)} ms, "
            f"kernel {milliseconds(timing.candidate_ms)} ms, "
            f"speedup {speedup_text(verdict)}, required {verdict.case.at_least:g}x"
        )
    lines.append(f"  next: {next_step(verdict)}")
    if verdict.status is Status.BUILD_ERROR or verdict.code is Code.TIMEOUT_BUILD:
        # Nothing has run yet: the log is the compiler's, and its first error is the one that matters.
        lines += _log("the compiler said", verdict.log or (verdict.build.log if verdict.build else ""), keep_end=False)
    else:
        lines += _log("the kernel printed", verdict.log, keep_end=True)
    return "\n".join(lines)


def _reason(reason: Reason) -> Iterator[str]:
    say = format_message(reason.message)
    yield f"  {reason.code.value}: {say.line}"
    yield from (f"    {line}" for line in say.details)
    if reason.evidence:
        yield "    " + ", ".join(f"{key} = {_figure(value)}" for key, value in reason.evidence.items())


def _figure(value: float | int | str | bool) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _log(title: str, text: str, *, keep_end: bool) -> list[str]:
    """A log's beginning or its end, bounded."""
    lines = [line[:LOG_COLUMNS] for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    left_out = len(lines) - LOG_LINES
    note = [f"    | ... {left_out} more lines"] if left_out > 0 else []
    kept = lines[-LOG_LINES:] if keep_end else lines[:LOG_LINES]
    shown = [f"    | {line}" for line in kept]
    return [f"  {title}:", *(note + shown if keep_end else shown + note)]
