"""A model that answers from a list, a judge that reads its verdict from a kernel's first line, and small tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.operators import make_case
from pytest_klineage.records import (
    CardScope,
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Code,
    Context,
    Effect,
    Interval,
    KernelCase,
    KernelSource,
    Precondition,
    PreconditionClass,
    Reason,
    Risk,
    SkillCard,
    SourceFile,
    StopReason,
    Surface,
    Timing,
    Usage,
    Verdict,
)

CASE = make_case("gemm", (16, 16, 16), "fp32", "torch", at_least=0.01)


@dataclass
class Scripted:
    """A model that says what it is given to say, and remembers what it was asked."""

    script: list[str | Reply | BaseException]
    cost_usd: float = 0.01
    name: str = "scripted"
    model: str = "toy"
    resumable: bool = False
    asked: list[Conversation] = field(default_factory=list)

    def begin(self) -> None:
        pass

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        return self.cost_usd

    def counted_worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        return self.cost_usd

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        self.asked.append(conversation)
        answer = self.script.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Reply):
            return answer
        return Reply(text=answer, usage=Usage(model=self.model, cost_usd=self.cost_usd), stop_reason=StopReason.END)


@dataclass
class FakeJudge:
    """Judges by a kernel's first line, "// <reason code> [<speedup>]"."""

    judged: list[str] = field(default_factory=list)
    before: Callable[[], None] | None = None

    def __call__(self, case: KernelCase, source: KernelSource) -> Verdict:
        if self.before is not None:
            self.before()
        text = source.files[0].text
        self.judged.append(text.partition("\n")[0])
        _, code, *speed = text.partition("\n")[0].split()
        timing = None
        if speed:
            factor = float(speed[0])
            timing = Timing(
                policy="paired", reference_ms=factor, candidate_ms=1.0,
                speedup=Interval(factor, factor * 0.95, factor * 1.05),
                reference_samples_ms=(factor, factor), candidate_samples_ms=(1.0, 1.0), warmup=1, flush_bytes=0,
                statistic="pretended",
            )  # fmt: skip
        return Verdict(
            case=case, status=Code(code).status, reasons=(Reason(code=Code(code), message="pretended"),),
            source_digest=source.digest, timing=timing, judged_at=f"2026-01-01T00:00:{len(self.judged):02d}Z",
        )  # fmt: skip


def kernel(line: str) -> KernelSource:
    """A kernel of which the fake judge says `line`."""
    return KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", f"// {line}\n"),), entry="run")


def whole(line: str, head: str = "PLAN: go on") -> str:
    """A reply with a whole file of which the fake judge says `line`."""
    return f"{head}\n\n```cpp\n// {line}\n```\n"


def make_card(
    name: str, *, prior: tuple[Category, ...] = (), category: Category = Category.SIMD, **more: Any
) -> SkillCard:
    origin = Context(
        operator="conv2d", shape={"N": 1}, dtype="fp32", surface=Surface.CPP, platform="cpu", prior=prior
    )  # fmt: skip
    given: dict[str, Any] = {
        "name": name, "status": CardStatus.ADMITTED, "category": category, "intent": f"the intent of {name}",
        "anchor": f"the anchor of {name}",
        "carrier": Carrier(kind=CarrierKind.SNIPPET, language="cpp", text=f"carrier_of({name});\n```\nnot the end\n"),
        "preconditions": (
            Precondition(kind=PreconditionClass.LAYOUT, condition=f"the condition of {name}", reason="alignment"),
        ),
        "effect": Effect(summary=f"the effect of {name}", speedup=Interval(2.0, 1.9, 2.1)),
        "risks": (Risk(text=f"the risk of {name}"),), "scope": CardScope(operators=("conv2d",)),
        "origins": (origin,),
    }  # fmt: skip
    return SkillCard(**(given | more))


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def judge() -> FakeJudge:
    return FakeJudge()


@pytest.fixture
def card() -> Callable[..., SkillCard]:
    return make_card


@pytest.fixture
def says() -> Callable[..., str]:
    return whole


@pytest.fixture
def task() -> Task:
    return Task(
        case=CASE, platform="cpu", surface=Surface.CPP, root=kernel("slower.than_required 0.5"), instructions="contract"
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trajectory.jsonl"


@pytest.fixture
def begin(path: Path) -> Iterator[Callable[..., Session]]:
    """Begins a session in `path`, or resumes it; closes it before the next one."""
    with ExitStack() as stack:

        def begin(backend: Any, *, limit_usd: float = 1.0, at: Path = path, resume: bool = False) -> Session:
            stack.close()
            if resume:
                return stack.enter_context(Session.resume(at, backend))
            return stack.enter_context(Session.begin(at, backend, limit_usd=limit_usd, name="test"))

        yield begin
