"""Steps that an author wrote: judged, brought back by a model, and taken up into the lineage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import UsageError, WaitsForVerdict
from pytest_klineage.lab.induction.derive import derive, without_header
from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.library.lineages import KEPT, load_lineage, problems_of, save_lineage
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.records import (
    Category,
    KernelCase,
    KernelSource,
    Lineage,
    LineageState,
    StateFile,
    Status,
    Surface,
    Termination,
    Transition,
    Verdict,
)
from pytest_klineage.records.edits import diff_edit

Words = dict[str, Any]
HEADER = "// Adds nothing: plain loops.\n// Risks: slow.\n"
CONTRACT = "The contract."


@pytest.fixture
def stages(tmp_path: Path, small_case: KernelCase, words: Words) -> Path:
    """naive -> blocked -> parallel, as an author wrote them, with a header above the first."""
    texts = {"naive": HEADER + words["naive"], "blocked": words["blocked"], "parallel": words["expert"]}
    sources = [msgspec.structs.replace(words["kernel"](text), label=name) for name, text in texts.items()]
    states = tuple(
        LineageState(
            name=source.label, files=(StateFile("kernel.cpp", f"{index:02d}-{source.label}.cpp"),), entry="run",
            flags=source.flags, source_digest=source.digest,
        )
        for index, source in enumerate(sources)
    )  # fmt: skip
    categories = (Category.CACHE_BLOCK, Category.BLOCK_PARALLEL)
    steps = tuple(
        Transition(
            category=category, locus="run", intent="It makes it fast.", before=before.digest, after=after.digest,
            forward=diff_edit({"kernel.cpp": before.files[0].text}, {"kernel.cpp": after.files[0].text}),
        )
        for category, before, after in zip(categories, sources, sources[1:], strict=False)
    )  # fmt: skip
    lineage = Lineage(
        operator="gemm", platform="cpu", surface=Surface.CPP, case=small_case, states=states, transitions=steps,
        termination=Termination.HAND_MADE, termination_reason="written by hand",
    )  # fmt: skip
    return save_lineage(tmp_path / "stages", lineage, sources).directory


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Session]:
    """Begins or resumes the session of one step."""

    def make(backend: Any, *, resume: bool = False) -> Session:
        path = tmp_path / "step.jsonl"
        if resume:
            return Session.resume(path, backend, note=False)
        return Session.begin(path, backend, limit_usd=10.0, name="step", settings={})

    return make


def test_a_step_is_judged_and_brought_back(
    stages: Path, session: Callable[..., Session], real_judge: Judge, words: Words
) -> None:
    backend = words["scripted"](words["whole"](words["blocked"].replace("32", "16")))
    with session(backend) as one:
        found = derive(stages, 0, one, real_judge, contract=CONTRACT)
    assert found.verdict.source_digest == load_lineage(stages).sources[0].digest
    stored = load_lineage(stages)
    assert problems_of(stored) == []
    step, other = stored.lineage.transitions
    assert step.effect is not None
    assert step.rederived is not None
    assert step.forward_verdict is not None
    assert step.forward_verdict.source_digest == step.rederived.source_digest
    assert other.effect is None
    assert sorted(path.name for path in (stages / KEPT).iterdir()) == ["01.jsonl", "01.verdicts.jsonl"]


def test_a_model_is_not_shown_the_header_or_the_next_state(
    stages: Path, session: Callable[..., Session], real_judge: Judge, words: Words
) -> None:
    backend = words["scripted"](words["whole"](words["blocked"]))
    with session(backend) as one:
        derive(stages, 0, one, real_judge, contract=CONTRACT)
    shown = "\n".join(str(message) for message in backend.asked)
    assert "plain loops" not in shown
    assert "j0 += 32" not in shown
    assert "sum += (double)" in shown


def test_refused_attempts_are_kept_where_none_succeeds(
    stages: Path, session: Callable[..., Session], real_judge: Judge, words: Words
) -> None:
    wrong = words["whole"](words["naive"].replace("sum = 0.0", "sum = 1.0"))
    with session(words["scripted"](wrong, "no kernel", wrong)) as one:
        found = derive(stages, 0, one, real_judge, contract=CONTRACT)
    assert found.forward.source is None
    step = load_lineage(stages).lineage.transitions[0]
    assert (step.effect is None, step.forward_verdict, len(step.rejected)) == (False, None, 3)
    assert step.rejected[0].verdict is not None
    assert step.rejected[0].verdict.status is Status.WRONG_VALUE


def test_verdict_and_reply_are_asked_for_in_one_turn(
    stages: Path, session: Callable[..., Session], real_judge: Judge, words: Words
) -> None:
    asked: list[str] = []

    def later(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        asked.append(source.digest)
        raise WaitsForVerdict("folder", "not yet")

    backend = words["scripted"](words["whole"](words["blocked"]))
    with session(backend) as one, pytest.raises(WaitsForVerdict):
        derive(stages, 0, one, later, contract=CONTRACT)
    assert len(backend.asked) == 1
    assert len(asked) == 2
    assert load_lineage(stages).lineage.transitions[0].effect is None
    with session(words["scripted"](), resume=True) as one:
        derive(stages, 0, one, real_judge, contract=CONTRACT)
    assert load_lineage(stages).lineage.transitions[0].effect is not None


def test_a_state_that_is_not_right_here_ends_the_step(
    stages: Path, session: Callable[..., Session], real_judge: Judge, words: Words
) -> None:
    def broken(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        verdict = real_judge(case, source, against)
        return msgspec.structs.replace(verdict, status=Status.TIMEOUT)

    backend = words["scripted"](*[words["whole"](words["blocked"])] * 3)
    with session(backend) as one, pytest.raises(UsageError, match="naive is not right here"):
        derive(stages, 0, one, broken, contract=CONTRACT)
    assert not (stages / KEPT).exists()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("// a\n// b\n\n#include <x>\n// c\n", "#include <x>\n// c\n"),
        ("#include <x>\n", "#include <x>\n"),
        ("// all\n", ""),
    ],
)
def test_a_header_ends_with_the_first_line_of_code(text: str, left: str, words: Words) -> None:
    assert without_header(words["kernel"](text)).files[0].text == left
