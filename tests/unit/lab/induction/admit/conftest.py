"""A gate on small cases, a card with its target, and a trial of it with scripted replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from admission_trials import (
    BY_ROW,
    SHAPES,
    Scripted,
    card_of,
    lineage_of,
)

from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.lab.induction.admit import Compare, Roundtrip, roundtrip
from pytest_klineage.lab.induction.admit_targets import AdmissionTarget, targets_for
from pytest_klineage.lab.induction.verdicts import VerdictFile
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.records import (
    Code,
    Interval,
    KernelCase,
    KernelSource,
    Reason,
    SkillCard,
    Verdict,
)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    cache = tmp_path_factory.mktemp("cache")
    settings = GateSettings(
        time_limit_s=0.3, precision=0.3, busy_limit=1.0, spread_limit=1e6, seeds=1, flush_bytes=1 << 20, cache_dir=cache
    )
    with Gate("cpu", settings) as gate:
        yield gate


@pytest.fixture
def judge(gate: Gate) -> Compare:
    """The real gate on building and on what is right; how fast a right kernel is follows from its loops alone."""

    def compare(case: KernelCase, source: KernelSource, against: KernelSource) -> Verdict:
        verdict = gate.judge(case, source, reference_source=against)
        if verdict.timing is None or not verdict.scored:
            return verdict
        faster = BY_ROW in source.files[0].text
        speedup = Interval(5.0, 4.8, 5.2) if faster else Interval(1.0, 0.98, 1.02)
        code = Code.ACCEPTED_FASTER if faster else Code.SLOWER_THAN_REQUIRED
        timing = msgspec.structs.replace(verdict.timing, speedup=speedup)
        reasons = (Reason(code=code, message=f"required {case.at_least:g}x"),)
        return msgspec.structs.replace(verdict, status=code.status, reasons=reasons, timing=timing)

    return compare


@pytest.fixture
def stored() -> StoredLineage:
    return lineage_of("gemm", (64, 64, 64))


@pytest.fixture
def card(stored: StoredLineage) -> SkillCard:
    return card_of(stored)


@pytest.fixture
def target(card: SkillCard, stored: StoredLineage) -> AdmissionTarget:
    """At another shape, what a model made of the step before the card's own."""
    return next(found for found in targets_for(card, [stored], SHAPES) if found.case.shape["M"] == 96)


Run = Callable[..., Roundtrip]


@pytest.fixture
def run(judge: Compare, tmp_path: Path, card: SkillCard, target: AdmissionTarget) -> Iterator[Run]:
    """A trial with scripted replies; session, backend and verdicts are left at `run`."""
    sessions: list[Session] = []

    def tried_once(*script: Any, limit_usd: float = 10.0, **options: Any) -> Roundtrip:
        path = tmp_path / "trial.jsonl"
        file = VerdictFile(tmp_path / "verdicts.jsonl")
        backend = Scripted(list(script))
        session = (
            Session.resume(path, backend)
            if path.exists()
            else Session.begin(path, backend, limit_usd=limit_usd, name="trial")
        )
        sessions.append(session)
        tried_once.session, tried_once.backend = session, backend  # type: ignore[attr-defined]
        tried_once.trajectory, tried_once.verdicts = path, file.path  # type: ignore[attr-defined]

        def compare(case: KernelCase, source: KernelSource, against: KernelSource) -> Verdict:
            verdict = judge(case, source, against)
            file.append(verdict)
            return verdict

        given = {"compare": compare, "card": card, "target": target} | options
        return roundtrip(given.pop("card"), given.pop("target"), session, given.pop("compare"), **given)

    yield tried_once
    for session in sessions:
        session.close()
