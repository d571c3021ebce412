"""Steps timed again: the effects that count, which are refused, and what the file beside a lineage keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import BadRecord
from pytest_klineage.lab.library.lineages import StoredLineage, all_problems_of, read_timed, save_lineage
from pytest_klineage.records import Code, Interval, KernelSource, Lineage, Retimed
from pytest_klineage.report.collect import collect
from pytest_klineage.results.packed import packed
from pytest_klineage.results.retimed import RETIMED_FILE, keep_retimed, read_retimed, refused_effects

Make = Callable[..., Any]
DISTURBED = (Code.INCONCLUSIVE_BUSY, Code.INCONCLUSIVE_UNSTABLE, Code.INCONCLUSIVE_FEW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "experts" / "gemm" / "cpu-cpp" / "lineage"


def saved(folder: Path, made: tuple[Lineage, tuple[KernelSource, ...]], first: Any) -> StoredLineage:
    """The lineage with this verdict on its first state."""
    lineage, sources = made
    states = (msgspec.structs.replace(lineage.states[0], verdict=first), *lineage.states[1:])
    return save_lineage(folder, msgspec.structs.replace(lineage, states=states), sources)


def effects(lineage: Lineage) -> list[float | None]:
    return [step.effect.estimate if step.effect else None for step in lineage.transitions]


def test_a_quiet_timing_is_believed(folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    stored = saved(folder, make_lineage(), make_verdict(make_lineage()[1][0]))
    assert list(refused_effects(stored.lineage, {})) == []
    assert effects(read_timed(folder)) == [1.5, 1.5]


@pytest.mark.parametrize("code", DISTURBED)
def test_a_disturbed_effect_is_refused(code: Code, folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    stored = saved(folder, make_lineage(), make_verdict(make_lineage()[1][0], code))
    (refused,) = refused_effects(stored.lineage, read_retimed(folder))
    assert "transition 1" in refused
    assert code.value in refused
    assert effects(read_timed(folder)) == [None, 1.5]


def test_a_step_timed_again_counts(folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    source = make_lineage()[1][0]
    stored = saved(folder, make_lineage(), make_verdict(source, Code.INCONCLUSIVE_BUSY))
    digest = stored.lineage.transitions[0].digest
    keep_retimed(folder, Retimed(transition=digest, verdict=make_verdict(source)))
    assert all_problems_of(stored) == []
    assert list(refused_effects(stored.lineage, read_retimed(folder))) == []
    assert read_timed(folder).transitions[0].effect == Interval(2.0, 1 / 0.51, 1 / 0.49)
    assert collect([folder]).lineages[0].record == read_timed(folder)


def test_a_better_kernel_gives_the_effect(folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    source = make_lineage()[1][0]
    stored = saved(folder, make_lineage(), make_verdict(source))
    verdict = make_verdict(source)
    faster = msgspec.structs.replace(
        verdict, timing=msgspec.structs.replace(verdict.timing, speedup=Interval(0.25, 0.2, 0.3))
    )
    digest = stored.lineage.transitions[0].digest
    keep_retimed(folder, Retimed(transition=digest, verdict=verdict, better=faster))
    assert effects(read_timed(folder)) == [4.0, 1.5]


@pytest.mark.parametrize("code", DISTURBED)
def test_a_disturbed_second_timing_is_refused(code: Code, folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    source = make_lineage()[1][0]
    stored = saved(folder, make_lineage(), make_verdict(source))
    digest = stored.lineage.transitions[0].digest
    keep_retimed(folder, Retimed(transition=digest, verdict=make_verdict(source, code)))
    (problem,) = all_problems_of(stored)
    assert code.value in problem


def test_a_verdict_on_another_kernel_is_refused(folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    sources = make_lineage()[1]
    stored = saved(folder, make_lineage(), make_verdict(sources[0]))
    digest = stored.lineage.transitions[0].digest
    keep_retimed(folder, Retimed(transition=digest, verdict=make_verdict(sources[2])))
    (problem,) = all_problems_of(stored)
    assert sources[2].digest[:12] in problem


def test_an_unknown_step_is_refused(folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    source = make_lineage()[1][0]
    stored = saved(folder, make_lineage(), make_verdict(source))
    keep_retimed(folder, Retimed(transition="f" * 64, verdict=make_verdict(source)))
    (problem,) = all_problems_of(stored)
    assert "f" * 12 in problem


def test_the_later_line_wins_also_when_packed(folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    import gzip

    source = make_lineage()[1][0]
    folder.mkdir(parents=True)
    keep_retimed(folder, Retimed(transition="a", verdict=make_verdict(source, Code.INCONCLUSIVE_BUSY)))
    path = folder / RETIMED_FILE
    packed(path).write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    keep_retimed(folder, Retimed(transition="a", verdict=make_verdict(source)))
    assert read_retimed(folder)["a"].verdict.code is Code.SLOWER_THAN_REQUIRED


def test_a_damaged_file_is_named(folder: Path, make_lineage: Make, make_verdict: Make) -> None:
    saved(folder, make_lineage(), make_verdict(make_lineage()[1][0]))
    (folder / RETIMED_FILE).write_text("{}\n")
    with pytest.raises(BadRecord, match=RETIMED_FILE):
        read_timed(folder)
    assert collect([folder]).problems
