"""A model that answers from a list, a quick gate, and a small expert with two optimizations over the naive kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.lab.induction.lineage_store import induce, trajectory_settings
from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.induction.walk import WalkOrigin, WalkSettings
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.operators import make_case
from pytest_klineage.records import (
    Code,
    Interval,
    KernelCase,
    KernelSource,
    Reason,
    SourceFile,
    Status,
    StopReason,
    Surface,
    Timing,
    Usage,
    Verdict,
)

HEAD = """\
#include "klineage.h"
#include <algorithm>

extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const int64_t M = c.shape[0], N = c.shape[1], K = a.shape[1];
    const float *A = (const float *)a.data, *B = (const float *)b.data;
    float *C = (float *)c.data;
"""
PLAIN = """\
    for (int64_t i = 0; i < M; ++i)
        for (int64_t j = 0; j < N; ++j) {
            double sum = 0.0;
            for (int64_t p = 0; p < K; ++p) sum += (double)A[i * K + p] * B[p * N + j];
            C[i * N + j] = (float)sum;
        }
"""
BLOCKED = """\
    for (int64_t j0 = 0; j0 < N; j0 += 32)
        for (int64_t i = 0; i < M; ++i)
            for (int64_t j = j0; j < std::min<int64_t>(j0 + 32, N); ++j) {
                double sum = 0.0;
                for (int64_t p = 0; p < K; ++p) sum += (double)A[i * K + p] * B[p * N + j];
                C[i * N + j] = (float)sum;
            }
"""
PRAGMA = "#pragma omp parallel for\n"
TAIL = "    return 0;\n}\n"
NAIVE_TEXT, BLOCKED_TEXT, EXPERT_TEXT = HEAD + PLAIN + TAIL, HEAD + BLOCKED + TAIL, HEAD + PRAGMA + BLOCKED + TAIL


class Scripted:
    """A model that says what it is given to say, and keeps what it was asked."""

    name = "scripted"
    model = "toy"
    resumable = False

    def __init__(self, *script: Any, cost_usd: float = 0.01) -> None:
        self.script, self.cost_usd = list(script), cost_usd
        self.asked: list[Conversation] = []

    def begin(self) -> None:
        """Nothing is kept."""

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
        return said(answer, self.cost_usd)


def said(text: str, cost_usd: float = 0.01, stop_reason: StopReason = StopReason.END) -> Reply:
    usage = Usage(model="toy", input_tokens=10, output_tokens=2, cost_usd=cost_usd)
    return Reply(text=text, usage=usage, stop_reason=stop_reason, model="toy")


def kernel(text: str, name: str = "kernel.cpp") -> KernelSource:
    flags = ("-O2", "-fopenmp")
    return KernelSource(surface=Surface.CPP, files=(SourceFile(name, text),), entry="run", flags=flags)


def proposal(category: str, text: str, *, intent: str = "It makes it fast.", locus: str = "run") -> str:
    fields = json.dumps({"category": category, "locus": locus, "intent": intent})
    return f"Here it is.\n\n```json\n{fields}\n```\n\n```cpp\n{text}```\n"


def whole(text: str) -> str:
    return f"```cpp\n{text}```\n"


def edit(search: str, replace: str) -> str:
    return f"<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n"


DONE = '{"done": true, "reason": "plain loops"}'
NOTHING_LEFT = '{"remaining": []}'


@pytest.fixture(scope="session")
def words() -> dict[str, Any]:
    """What tests put replies together from."""
    return {
        "naive": NAIVE_TEXT, "blocked": BLOCKED_TEXT, "expert": EXPERT_TEXT, "plain": PLAIN, "pragma": PRAGMA,
        "blocked_loops": BLOCKED, "done": DONE, "nothing_left": NOTHING_LEFT, "proposal": proposal, "whole": whole,
        "edit": edit, "said": said, "kernel": kernel, "scripted": Scripted,
    }  # fmt: skip


@pytest.fixture
def good(words: dict[str, Any]) -> list[str]:
    """A whole walk: threads, blocking, done, and an audit that agrees."""
    return [
        words["proposal"]("block_parallel", words["blocked"]),
        words["whole"](words["expert"]),
        words["proposal"]("cache_block", words["naive"]),
        words["whole"](words["blocked"].replace("32", "16")),
        words["done"],
        words["nothing_left"],
    ]


@pytest.fixture(scope="session")
def small_case() -> KernelCase:
    return make_case("gemm", (48, 64, 32), "fp32", "torch")


@pytest.fixture(scope="session")
def real_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """The gate itself, in a hurry, which judges nothing twice: a kernel that was judged has that verdict again."""
    cache = tmp_path_factory.mktemp("cache")
    settings = GateSettings(
        time_limit_s=0.1, precision=0.9, busy_limit=1.0, spread_limit=1e6, seeds=1, threads=1, flush_bytes=1 << 20,
        cache_dir=cache,
    )  # fmt: skip
    with Gate("cpu", settings) as gate:
        known: dict[tuple[str, str], Verdict] = {}

        def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
            key = source.digest, against.digest if against is not None else ""
            if key not in known:
                known[key] = lenient(gate.judge(case, source, reference_source=against))
            return known[key]

        yield judge


@pytest.fixture(scope="session")
def judge() -> Judge:
    """Says of these kernels what the gate says, without running them: who begins a sum at 1 is wrong."""

    def say(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        wrong = "sum = 1.0" in source.files[0].text
        code = Code.MISMATCH if wrong else Code.ACCEPTED_MEETS_TARGET
        timing = Timing(
            policy="paired", reference_ms=1.0, candidate_ms=1.0, speedup=Interval(1.0, 0.99, 1.02),
            reference_samples_ms=(1.0,), candidate_samples_ms=(1.0,), warmup=1, flush_bytes=0, statistic="pretended",
        )  # fmt: skip
        return Verdict(
            case=case, status=code.status, reasons=(Reason(code=code, message="pretended"),), label=source.label,
            source_digest=source.digest, timing=None if wrong else timing, surface=source.surface.value,
        )  # fmt: skip

    return say


def lenient(verdict: Verdict) -> Verdict:
    """The verdict with a speedup of one: tests on tiny kernels and a busy machine are not about speed."""
    if verdict.timing is None:
        return verdict
    same = msgspec.structs.replace(verdict.timing, speedup=Interval(1.0, 0.99, 1.01))
    if verdict.code is Code.INCONCLUSIVE_FEW:  # a slow machine has no time for more
        reasons = (Reason(code=Code.ACCEPTED_SAME, message="of few pairs"),)
        verdict = msgspec.structs.replace(verdict, status=Status.ACCEPTED, reasons=reasons)
    return msgspec.structs.replace(verdict, timing=same)


@pytest.fixture
def origin(small_case: KernelCase) -> WalkOrigin:
    return WalkOrigin(
        case=small_case, platform="cpu", source=kernel(EXPERT_TEXT), contract="The contract.", name="gemm/cpu-cpp"
    )


@pytest.fixture
def begin(tmp_path: Path, origin: WalkOrigin) -> Callable[..., Session]:
    """Begins a session for a walk with a model that answers from a list."""

    def make(backend: Scripted, *, limit_usd: float = 10.0, settings: WalkSettings | None = None) -> Session:
        return Session.begin(
            tmp_path / "walk.jsonl", backend, limit_usd=limit_usd, name="walk",
            settings=trajectory_settings(origin, settings or WalkSettings()),
        )  # fmt: skip

    return make


@pytest.fixture
def walk(
    tmp_path: Path, origin: WalkOrigin, begin: Callable[..., Session], judge: Judge, words: dict[str, Any]
) -> Callable[..., tuple[StoredLineage, Any]]:
    """Walks with these replies; gives what was kept, and the model with what it was asked."""

    def run(*script: Any, limit_usd: float = 10.0, settings: WalkSettings | None = None) -> tuple[StoredLineage, Any]:
        backend = words["scripted"](*script)
        with begin(backend, limit_usd=limit_usd, settings=settings) as session:
            return induce(origin, session, judge, tmp_path / "lineage"), backend

    return run
