"""Hand-made lineages: the states that authors of experts wrote, from naive on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import UnknownName
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.lab.library.lineages import (
    HAND_MADE,
    KEPT,
    StoredLineage,
    find_hand_made,
    load_lineage,
    problems_of,
)
from pytest_klineage.records import PLATFORMS, Edit, EditKind, Surface, Termination
from pytest_klineage.results.spans import SPANS_FILE

EXPERTS = Path(__file__).parents[4] / "experts"
OPERATORS = ("conv2d", "fmha", "gdn", "gdn_cumsum", "gdn_fused_fwd", "gdn_kkt_solve", "gemm", "topk")
NAMES = sorted([*(f"{operator}/sm90-cuda" for operator in OPERATORS), "gemm/sm90-tilelang"])


@pytest.fixture(scope="module", params=NAMES)
def stored(request: pytest.FixtureRequest) -> StoredLineage:
    """One shipped lineage, with every state made from the naive kernel by the edits."""
    return load_lineage(EXPERTS / request.param / HAND_MADE)


def test_every_expert_of_a_gpu_has_one() -> None:
    assert ["/".join(folder.parts[-3:-1]) for folder in find_hand_made(EXPERTS)] == NAMES


def test_edits_give_the_recorded_bytes(stored: StoredLineage) -> None:
    assert problems_of(stored) == []
    assert [source.digest for source in stored.sources] == [state.source_digest for state in stored.lineage.states]


def test_only_the_naive_kernel_is_a_file(stored: StoredLineage) -> None:
    files = sorted(path.name for path in stored.directory.iterdir() if path.name not in (KEPT, SPANS_FILE))
    suffix = {Surface.CUDA: ".cu", Surface.TILELANG: ".py"}[stored.lineage.surface]
    assert files == [f"00-naive{suffix}", "lineage.json"]


def test_it_says_who_wrote_it_and_what_was_judged(stored: StoredLineage) -> None:
    lineage = stored.lineage
    assert lineage.hand_made
    assert not lineage.complete
    assert lineage.provenance["authors"]
    for number, step in enumerate(lineage.transitions, 1):
        brought_back = (stored.directory / KEPT / f"{number:02}.jsonl").is_file()
        assert (step.forward_verdict is not None) == brought_back, f"step {number}"
        assert step.effect is None or brought_back, f"step {number}"
    assert all(step.risks for step in lineage.transitions if lineage.operator.startswith("gdn_"))
    for state in lineage.states:
        assert state.verdict is None or state.verdict.source_digest == state.source_digest


def test_states_are_found_by_name_with_their_platforms() -> None:
    stored = load_lineage(EXPERTS / "gemm" / "sm90-cuda" / HAND_MADE)
    state, source = stored.state("07-wgmma")
    assert (source.files[0].name, source.label) == ("07-wgmma.cu", "07-wgmma")
    assert stored.platforms_of(state) == ("sm90",)
    assert stored.platforms_of(stored.lineage.states[0]) == ("sm90", "sm120")
    with pytest.raises(UnknownName, match=r"Did you mean '07-wgmma'\?"):
        stored.state("07-wgma")


def test_platforms_of_what_is_shipped_are_known(stored: StoredLineage) -> None:
    for state in stored.lineage.states:
        assert stored.lineage.platform in stored.platforms_of(state)
        assert set(stored.platforms_of(state)) <= set(PLATFORMS)
    for expert in find_experts(EXPERTS):
        for variant in expert.variants.values():
            assert expert.platform in expert.platforms_of(variant)
            assert set(expert.platforms_of(variant)) <= set(PLATFORMS)


def test_a_walk_must_have_verdicts(stored: StoredLineage) -> None:
    first, *others = stored.lineage.transitions
    unjudged = msgspec.structs.replace(first, forward_verdict=None)
    walked = msgspec.structs.replace(
        stored.lineage, termination=Termination.NAIVE_REACHED, transitions=(unjudged, *others)
    )
    problems = problems_of(msgspec.structs.replace(stored, lineage=walked))
    assert any("has no backward edit, or no verdict" in problem for problem in problems)


def test_a_changed_edit_is_found(stored: StoredLineage) -> None:
    step = stored.lineage.transitions[0]
    wrong = msgspec.structs.replace(step, forward=Edit(kind=EditKind.UNIFIED_DIFF, diff=""))
    lineage = msgspec.structs.replace(stored.lineage, transitions=(wrong, *stored.lineage.transitions[1:]))
    problems = problems_of(msgspec.structs.replace(stored, lineage=lineage))
    assert any("transition 1" in problem and "does not give the bytes" in problem for problem in problems)
