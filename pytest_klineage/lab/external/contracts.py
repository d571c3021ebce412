"""The plain JSON contract of the evaluation server: what is submitted and answered."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.external.evaluating import EvaluationTarget, Evaluator, SubmissionStep
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.lab.llm.prices import Budget
from pytest_klineage.lab.optimizers.proposal import MAIN_FILES
from pytest_klineage.records import KernelSource, SourceFile, to_plain

T = TypeVar("T")
LARGEST_SOURCE = 4 * 1024 * 1024


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/judge. `source` is one file's text, or `files` are all of them, the main one first."""

    source: str = ""
    files: tuple[SourceFile, ...] = ()
    entry: str = ""
    flags: tuple[str, ...] | None = None
    case: str = ""
    """The case's id; empty for the run's."""
    note: str = ""
    """What tables show beside the step."""


def submission(data: bytes) -> Submission:
    """The body of a request. Raises Refused."""
    if len(data) > LARGEST_SOURCE:
        raise Refused(Refusal.TOO_LARGE, f"a submission has {LARGEST_SOURCE} bytes at most")
    return decoded(data, Submission, 'send {"source": "..."}, or "files" with name and text')


def decoded(data: bytes, kind: type[T], contract: str) -> T:
    """A body as the record it has to be; `contract` says what that is. Raises Refused."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.ValidationError, UsageError) as error:
        raise Refused(Refusal.INVALID, f"{error}; {contract}") from error
    except msgspec.DecodeError as error:
        raise Refused(Refusal.NOT_JSON, f"the body is not JSON: {error}") from error


def source_of(given: Submission, target: EvaluationTarget) -> KernelSource:
    """The kernel of a submission. Raises Refused without one, or when it is for another case."""
    if given.case and given.case != target.case.id:
        raise Refused(Refusal.WRONG_CASE, f"this run is about {target.case.id}, not about {given.case!r:.120}")
    if bool(given.source.strip()) == bool(given.files):
        raise Refused(Refusal.INVALID, 'a submission has either "source" or "files", and it is not empty')
    files = given.files or (SourceFile(MAIN_FILES.get(target.surface, "kernel.py"), given.source),)
    return KernelSource(
        surface=target.surface, files=files, entry=given.entry or target.entry,
        flags=target.flags if given.flags is None else given.flags, label=given.note[:80],
    )  # fmt: skip


def task_reply(target: EvaluationTarget, evaluator: Evaluator, budget: Budget) -> dict[str, Any]:
    """What GET /v1/task answers."""
    return {
        "case": target.case.id, "operator": target.case.operator, "shape": target.case.shape,
        "dtype": target.case.dtype, "options": target.case.options, "platform": target.platform,
        "surface": target.surface.value, "entry": target.entry, "flags": list(target.flags),
        "instructions": target.instructions,
        "root": [{"name": file.name, "text": file.text} for file in target.root.files] if target.root else [],
        **state(evaluator, budget),
    }  # fmt: skip


def step_reply(step: SubmissionStep, evaluator: Evaluator, budget: Budget) -> dict[str, Any]:
    """What POST /v1/judge answers."""
    shown = step.shown
    interval = shown.timing.speedup if shown.timing is not None and shown.scored else None
    return {
        "step": step.number, "status": shown.status.value, "code": shown.code.value, "ok": shown.ok,
        "scored": shown.scored, "speedup": interval.estimate if interval else None,
        "interval": [interval.low, interval.high] if interval else None,
        "reference_ms": shown.timing.reference_ms if shown.timing and interval else None,
        "candidate_ms": shown.timing.candidate_ms if shown.timing and interval else None,
        "is_best": step.is_best, "repeats": step.repeats, "feedback": step.feedback,
        "verdict": to_plain(shown), **state(evaluator, budget),
    }  # fmt: skip


def state(evaluator: Evaluator, budget: Budget) -> dict[str, Any]:
    """How far the run is."""
    return {
        "best_speedup": evaluator.best_speedup, "steps_left": evaluator.steps_left,
        "spent_usd": budget.spent_usd, "limit_usd": budget.limit_usd, "remaining_usd": budget.remaining_usd,
    }  # fmt: skip


def refusal_reply(refused: Refused) -> dict[str, Any]:
    """The body of an error of the evaluation server."""
    return {"error": {"code": refused.refusal.value, "message": str(refused)}}
