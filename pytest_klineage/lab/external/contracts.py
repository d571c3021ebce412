"""The plain JSON contract of the evaluation server: what is submitted and answered. HTTP is served elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.external.evaluating import Evaluator, Step, Target
from pytest_klineage.lab.external.refusals import Refusal, Refused
from pytest_klineage.records import KernelSource, SourceFile, Surface, to_plain

MAIN_NAMES = {Surface.CPP: "kernel.cpp", Surface.CUDA: "kernel.cu"}
LARGEST_SOURCE = 4 * 1024 * 1024


class GivenFile(msgspec.Struct, frozen=True):
    """One file of a submission."""

    name: str
    text: str


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/judge. `source` is one file's text, or `files` are all of them, the main one first."""

    source: str = ""
    files: tuple[GivenFile, ...] = ()
    entry: str = ""
    flags: tuple[str, ...] | None = None
    case: str = ""
    """The case's id; empty for the run's."""
    note: str = ""
    """What tables show beside the step."""


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars of a run."""

    spent_usd: float
    limit_usd: float
    remaining_usd: float


def submission(data: bytes) -> Submission:
    """The body of a request. Raises Refused."""
    if len(data) > LARGEST_SOURCE:
        raise Refused(Refusal.TOO_LARGE, f"a submission has {LARGEST_SOURCE} bytes at most")
    try:
        return msgspec.json.decode(data, type=Submission)
    except msgspec.ValidationError as error:
        raise Refused(Refusal.INVALID, f'{error}; send {{"source": "..."}}, or "files" with name and text') from error
    except msgspec.DecodeError as error:
        raise Refused(Refusal.NOT_JSON, f"the body is not JSON: {error}") from error


def source_of(given: Submission, target: Target) -> KernelSource:
    """The kernel of a submission. Raises Refused when there is none, or when it is for another case."""
    if given.case and given.case != target.case.id:
        raise Refused(Refusal.WRONG_CASE, f"this run is about {target.case.id}, not about {given.case!r:.120}")
    if bool(given.source.strip()) == bool(given.files):
        raise Refused(Refusal.INVALID, 'a submission has either "source" or "files", and it is not empty')
    main = MAIN_NAMES.get(target.surface, "kernel.py")
    try:
        files = tuple(SourceFile(file.name, file.text) for file in given.files) or (SourceFile(main, given.source),)
    except UsageError as error:
        raise Refused(Refusal.INVALID, str(error)) from error
    return KernelSource(
        surface=target.surface, files=files, entry=given.entry or target.entry,
        flags=target.flags if given.flags is None else given.flags, label=given.note[:80],
    )  # fmt: skip


def task_reply(target: Target, evaluator: Evaluator, spent: Spent) -> dict[str, Any]:
    """What GET /v1/task answers."""
    return {
        "case": target.case.id, "operator": target.case.operator, "shape": target.case.shape,
        "dtype": target.case.dtype, "options": target.case.options, "platform": target.platform,
        "surface": target.surface.value, "entry": target.entry, "flags": list(target.flags),
        "instructions": target.instructions,
        "root": [{"name": file.name, "text": file.text} for file in target.root.files] if target.root else [],
        **state(evaluator, spent),
    }  # fmt: skip


def step_reply(step: Step, evaluator: Evaluator, spent: Spent) -> dict[str, Any]:
    """What POST /v1/judge answers."""
    told = step.told
    interval = told.timing.speedup if told.timing is not None and told.scored else None
    return {
        "step": step.number, "status": told.status.value, "code": told.code.value, "ok": told.ok,
        "scored": told.scored, "speedup": interval.estimate if interval else None,
        "interval": [interval.low, interval.high] if interval else None,
        "reference_ms": told.timing.reference_ms if told.timing and interval else None,
        "candidate_ms": told.timing.candidate_ms if told.timing and interval else None,
        "is_best": step.is_best, "repeats": step.repeats, "feedback": step.feedback,
        "verdict": to_plain(told), **state(evaluator, spent),
    }  # fmt: skip


def state(evaluator: Evaluator, spent: Spent) -> dict[str, Any]:
    """How far the run is."""
    return {
        "best_speedup": evaluator.best_speedup, "steps_left": evaluator.steps_left,
        "spent_usd": spent.spent_usd, "limit_usd": spent.limit_usd, "remaining_usd": spent.remaining_usd,
    }  # fmt: skip


def refusal_reply(refused: Refused) -> dict[str, Any]:
    """The body of an error of the evaluation server."""
    return {"error": {"code": refused.refusal.value, "message": str(refused)}}
