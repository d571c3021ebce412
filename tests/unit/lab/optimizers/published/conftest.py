"""A model that answers by rules, a judge that reads the speedup in a kernel's text, and a task for both."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.session import Method, OptimizationResult, optimize
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import (
    Code,
    Interval,
    KernelCase,
    KernelSource,
    Reason,
    SourceFile,
    Surface,
    Timing,
    Usage,
    Verdict,
)

CASE = KernelCase(operator="topk", shape={"rows": 4, "columns": 64, "k": 8}, dtype="fp32", reference="torch")
INSTRUCTIONS = "# Contract: keep to it\n"


def kernel(text: str, flags: tuple[str, ...] = ()) -> KernelSource:
    return KernelSource(
        surface=Surface.CPP, files=(SourceFile("kernel.cpp", text),), entry="run", flags=flags, label="naive"
    )


@pytest.fixture
def make_kernel() -> Callable[..., KernelSource]:
    """A C++ kernel from its text."""
    return kernel


def verdict_on(source: KernelSource, code: Code, speedup: float | None) -> Verdict:
    timing = None
    if speedup is not None:
        timing = Timing(
            policy="paired", reference_ms=1.0, candidate_ms=1 / speedup, speedup=Interval(speedup, speedup, speedup),
            reference_samples_ms=(1.0,), candidate_samples_ms=(1 / speedup,), warmup=1, flush_bytes=0, statistic="none",
        )  # fmt: skip
    return Verdict(
        case=CASE, status=code.status, reasons=(Reason(code=code, message=f"it is {code.value}"),), timing=timing,
        source_digest=source.digest, judged_at="2026-01-01T00:00:00Z",
    )  # fmt: skip


@dataclass
class Judge:
    """Finds "speed 1.25" in a kernel, or a reason code; anything else does not compile."""

    judged: list[str] = field(default_factory=list)

    def __call__(self, case: KernelCase, source: KernelSource) -> Verdict:
        text = source.files[0].text
        self.judged.append(text)
        if speed := re.search(r"speed (\d+(?:\.\d+)?)", text):
            return verdict_on(source, Code.SLOWER_THAN_REQUIRED, float(speed[1]))
        code = next((code for code in Code if code.value in text), Code.COMPILE)
        return verdict_on(source, code, None)


@pytest.fixture
def judge() -> Judge:
    return Judge()


@dataclass
class Author:
    """A backend: `write` makes a reply's text of what was asked and of the call's number."""

    write: Callable[[Conversation, int], str]
    cost_usd: float = 0.01
    worst_usd: float = 0.02
    name: str = "author"
    model: str = "toy"
    resumable: bool = False
    asked: list[Conversation] = field(default_factory=list)

    def begin(self) -> None:
        pass

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        return self.worst_usd

    def counted_worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        return self.worst_usd

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        self.asked.append(conversation)
        usage = Usage(model=self.model, input_tokens=10, output_tokens=5, cost_usd=self.cost_usd)
        return Reply(text=self.write(conversation, call), usage=usage)


@pytest.fixture
def author() -> type[Author]:
    return Author


@pytest.fixture
def task() -> Task:
    return Task(
        case=CASE, platform="cpu", surface=Surface.CPP, root=kernel("// speed 0.5\n"), instructions=INSTRUCTIONS
    )


@dataclass
class MethodRunner:
    """Runs a method on the task, again or as a resumption, and keeps the last trajectory's path."""

    folder: Path
    task: Task
    judge: Judge

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def run(
        self, method: Method, backend: object, *, name: str = "run", limit_usd: float = 10.0, steps: int = 1000,
        resume: bool = False, task: Task | None = None,
    ) -> OptimizationResult:  # fmt: skip
        path = self.path(name)
        if resume:
            session = Session.resume(path, backend, limit_usd=limit_usd)  # type: ignore[arg-type]
        else:
            session = Session.begin(path, backend, limit_usd=limit_usd, name="t")  # type: ignore[arg-type]
        with session:
            return optimize(task or self.task, method, session, self.judge, max_steps=steps, rejudge=False)


@pytest.fixture
def runner(tmp_path: Path, task: Task, judge: Judge) -> MethodRunner:
    return MethodRunner(tmp_path, task, judge)
