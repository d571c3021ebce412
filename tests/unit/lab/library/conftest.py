"""Lineages and cards to test with: small, whole, and made in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_klineage.lab.library.lineages import state_of
from pytest_klineage.records import (
    CardScope,
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Code,
    Context,
    Effect,
    Evidence,
    Interval,
    KernelCase,
    KernelSource,
    Lineage,
    Precondition,
    PreconditionClass,
    Reason,
    Rejection,
    Risk,
    SkillCard,
    SourceFile,
    Surface,
    Termination,
    Timing,
    Transition,
    Trial,
    TrialOutcome,
    Verdict,
)
from pytest_klineage.records.edits import diff_edit

CASE = KernelCase(operator="gemm", shape={"M": 64, "N": 64, "K": 64}, dtype="fp32", reference="torch")
TEXTS = (
    "int run() {\n    return 1;\n}\n",
    "int run() {\n    int tile[4];\n    return 1;\n}\n",
    "int run() {\n    int tile[4];\n    return vector(1);\n}\n",
)
NAMES = ("naive", "tile stage", "simd")
STEPS = (Category.TILE_STAGE, Category.SIMD)


def verdict_of(source: KernelSource, code: Code = Code.SLOWER_THAN_REQUIRED, **fields: Any) -> Verdict:
    timing = Timing(
        policy="paired", reference_ms=1.0, candidate_ms=2.0, speedup=Interval(0.5, 0.49, 0.51),
        reference_samples_ms=(1.0, 1.01), candidate_samples_ms=(2.0, 2.02), warmup=3, flush_bytes=0, statistic="",
    )  # fmt: skip
    given: dict[str, Any] = {
        "case": CASE, "status": code.status, "reasons": (Reason(code=code, message="as it was"),),
        "source_digest": source.digest, "timing": timing,
    }  # fmt: skip
    return Verdict(**(given | fields))


def source_of(text: str, **more: str) -> KernelSource:
    files = (SourceFile("kernel.cpp", text), *(SourceFile(name, body) for name, body in more.items()))
    return KernelSource(surface=Surface.CPP, files=files, entry="run", flags=("-O3",))


def step_between(before: KernelSource, after: KernelSource, category: Category, **fields: Any) -> Transition:
    old, new = ({file.name: file.text for file in source.files} for source in (before, after))
    given: dict[str, Any] = {
        "category": category, "locus": "run", "intent": f"adds {category.value}", "before": before.digest,
        "after": after.digest, "backward": diff_edit(new, old), "forward": diff_edit(old, new),
        "forward_verdict": verdict_of(after), "effect": Interval(1.5, 1.4, 1.6),
    }  # fmt: skip
    return Transition(**(given | fields))


def whole_lineage() -> tuple[Lineage, tuple[KernelSource, ...]]:
    sources = tuple(source_of(text) for text in TEXTS)
    states = tuple(
        state_of(index, name, source, verdict_of(source))
        for index, (name, source) in enumerate(zip(NAMES, sources, strict=True))
    )
    refused = Rejection(
        forward=False, category=Category.TILE_STAGE, locus="run", intent="removes the tile and its use",
        reason="the result differs", verdict=verdict_of(sources[0], Code.MISMATCH),
    )  # fmt: skip
    first = step_between(sources[0], sources[1], STEPS[0], rejected=(refused,))
    second = step_between(sources[1], sources[2], STEPS[1])
    lineage = Lineage(
        operator="gemm", platform="cpu", surface=Surface.CPP, case=CASE, states=states, transitions=(first, second),
        termination=Termination.NAIVE_REACHED, termination_reason="nothing is left",
        provenance={"expert": "gemm/cpu-cpp"},
    )  # fmt: skip
    return lineage, sources


def whole_card(lineage: Lineage | None = None, **fields: Any) -> SkillCard:
    sealed = (lineage or whole_lineage()[0]).sealed()
    origin = Context(
        operator="gemm", shape=dict(CASE.shape), dtype="fp32", surface=Surface.CPP, platform="cpu",
        prior=(Category.TILE_STAGE,),
    )  # fmt: skip
    elsewhere = Context(
        operator="gemm", shape={"M": 96, "N": 96, "K": 96}, dtype="fp32", surface=Surface.CPP, platform="cpu",
        prior=(Category.TILE_STAGE,),
    )  # fmt: skip
    digest = sealed.transitions[1].digest
    given: dict[str, Any] = {
        "name": "gemm-simd",
        "status": CardStatus.ADMITTED,
        "category": Category.SIMD,
        "intent": "Compute several neighbouring results by one vector instruction.",
        "anchor": "an innermost loop over contiguous results",
        "carrier": Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="for (...) c[j] += a * b[j];\n"),
        "preconditions": tuple(
            Precondition(kind=kind, condition=f"{kind.value} as it is.", reason="nothing needs more")
            for kind in PreconditionClass
        ),
        "settings": {"width": "8"},
        "effect": Effect(summary="Fewer instructions.", speedup=Interval(1.5, 1.4, 1.6), span=(digest,), case=CASE.id),
        "evidence": (Evidence("gemm/cpu-cpp", digest),),
        "risks": (Risk(text="sums in another order", code=Code.MISMATCH, evidence=digest),),
        "scope": CardScope(
            operators=("gemm",), dtypes=("fp32",), surfaces=("cpp",), platforms=("cpu",), capabilities=("simd",)
        ),
        "origins": (origin,),
        "log": (
            Trial(context=elsewhere, outcome=TrialOutcome.REJECTED, held_out=True, code=Code.MISMATCH),
            Trial(context=elsewhere, outcome=TrialOutcome.SUCCESS, held_out=True, code=Code.ACCEPTED_FASTER),
        ),
        "provenance": {"lineage": sealed.digest},
    }
    return SkillCard(**(given | fields))


@pytest.fixture(scope="session")
def make_lineage() -> Callable[[], tuple[Lineage, tuple[KernelSource, ...]]]:
    """A lineage of three states and its sources, not sealed."""
    return whole_lineage


@pytest.fixture(scope="session")
def make_card() -> Callable[..., SkillCard]:
    """A card that nothing is wrong with; keyword arguments replace fields."""
    return whole_card


@pytest.fixture(scope="session")
def make_source() -> Callable[..., KernelSource]:
    """A C++ source of this text; keyword arguments are further files."""
    return source_of


@pytest.fixture(scope="session")
def make_step() -> Callable[..., Transition]:
    """The transition between two sources."""
    return step_between


@pytest.fixture(scope="session")
def make_verdict() -> Callable[..., Verdict]:
    """A verdict about a source."""
    return verdict_of
