"""Lifting from hand-made lineages of GPU kernels: joined over operators, spans, prompts. No model is asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.lab.induction.lift_card import card_of
from pytest_klineage.lab.induction.lift_checks import findings_about
from pytest_klineage.lab.induction.lift_groups import (
    NOT_TIMED,
    Site,
    group_of,
    grouped,
    sites_of,
    spans_of,
    timed_sites,
)
from pytest_klineage.lab.induction.lift_hypothesis import Hypothesis, RiskNote
from pytest_klineage.lab.induction.lift_prompt import request_text, system_prompt
from pytest_klineage.lab.induction.span import time_span
from pytest_klineage.lab.library.lineages import StoredLineage, all_problems_of, find_all, load_lineage
from pytest_klineage.lab.library.lint import lint_card
from pytest_klineage.records import (
    Carrier,
    CarrierKind,
    Category,
    Interval,
    KernelCase,
    KernelSource,
    Precondition,
    PreconditionClass,
    Verdict,
)
from pytest_klineage.results.spans import SPANS_FILE, keep_span

EXPERTS = Path(__file__).parents[4] / "experts"


def stages(operator: str, effects: Mapping[int, float], directory: Path) -> StoredLineage:
    """A shipped hand-made lineage with these effects by step number, from 1, and no others."""
    stored = load_lineage(EXPERTS / operator / "sm90-cuda" / "stages")
    steps = tuple(
        msgspec.structs.replace(step, effect=interval(effects[number]) if number in effects else None)
        for number, step in enumerate(stored.lineage.transitions, start=1)
    )
    lineage = msgspec.structs.replace(stored.lineage, transitions=steps).sealed()
    return msgspec.structs.replace(stored, lineage=lineage, directory=directory)


def interval(estimate: float) -> Interval:
    return Interval(estimate, estimate - 0.004, estimate + 0.004)


def groups_of(*lineages: StoredLineage) -> dict[str, list[str]]:
    return {group.name: [site.position for site in group.sites] for group in grouped(timed_sites(lineages))[0]}


@pytest.fixture
def spanned(tmp_path: Path) -> StoredLineage:
    """GEMM, whose multicast (12) shows no effect alone, before the TMA store (13), which pays."""
    return stages("gemm", {12: 0.998, 13: 1.1}, tmp_path)


@pytest.fixture
def timed(spanned: StoredLineage) -> Site:
    """The span of both, timed by a judge who returns the verdict of a state."""
    (span,) = spans_of(spanned)

    def judge(case: KernelCase, source: KernelSource, against: KernelSource | None) -> Verdict:
        assert (source, against) == (spanned.sources[11], spanned.sources[13])
        verdict = spanned.lineage.states[11].verdict
        assert verdict is not None
        return verdict

    keep_span(spanned.directory, time_span(span, judge))
    (again,) = spans_of(spanned)
    return again


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_mechanism_joins_operators(tmp_path: Path) -> None:
    found = groups_of(stages("gemm", {7: 1.09}, tmp_path), stages("fmha", {5: 1.29}, tmp_path))
    assert found == {"sm90-cuda-wgmma": ["fmha/sm90-cuda step 5", "gemm/sm90-cuda step 7"]}


def test_an_operator_joins_with_its_strongest_step(tmp_path: Path) -> None:
    conv, gemm = stages("conv2d", {1: 1.2, 8: 2.5}, tmp_path), stages("gemm", {1: 1.9}, tmp_path)
    found = groups_of(conv, gemm)
    assert found.pop("sm90-cuda-tile-stage") == ["conv2d/sm90-cuda step 8", "gemm/sm90-cuda step 1"]
    assert list(found.values()) == [["conv2d/sm90-cuda step 1"]]


def test_what_is_no_mechanism_is_not_joined(tmp_path: Path) -> None:
    found = groups_of(stages("fmha", {12: 1.14}, tmp_path), stages("conv2d", {13: 1.14}, tmp_path))
    assert sorted(found.values()) == [["conv2d/sm90-cuda step 13"], ["fmha/sm90-cuda step 12"]]


def test_groups_of_cpus_are_what_they_are_without_gpus() -> None:
    every = [load_lineage(folder) for folder in find_all(EXPERTS)]
    cpus = [stored for stored in every if stored.lineage.platform == "cpu"]
    found = [group for group in grouped(timed_sites(every))[0] if not group.on_gpu]
    assert found
    assert found == grouped(timed_sites(cpus))[0]


def test_a_step_that_was_not_judged_is_left_out(tmp_path: Path) -> None:
    groups, left = grouped(sites_of([stages("gemm", {}, tmp_path)]))
    assert groups == []
    assert {each.reason for each in left} == {"its effect was not measured"}


def test_a_group_is_found_again_by_its_steps(tmp_path: Path, timed: Site, spanned: StoredLineage) -> None:
    fewer = [spanned, stages("fmha", {11: 1.07}, tmp_path / "fmha")]
    more = [*fewer, stages("conv2d", {11: 1.25}, tmp_path / "conv2d")]
    groups, _ = grouped(timed_sites(fewer))
    assert len(groups) == 2
    for group in groups:
        assert group_of(group.name, group.cited, timed_sites(more)) == group
    assert group_of("gone", f"{groups[0].cited} {'1' * 64}", timed_sites(more)) is None


# --- spans ------------------------------------------------------------------------------------------------------------


def test_a_span_that_was_not_timed_is_left_out(spanned: StoredLineage) -> None:
    groups, left = grouped(timed_sites([spanned]))
    assert [group.name for group in groups] == ["sm90-cuda-tma-store"]
    assert ("gemm/sm90-cuda steps 12 to 13", NOT_TIMED) in [(each.site.position, each.reason) for each in left]


def test_a_span_begins_with_all_steps_that_lose(tmp_path: Path) -> None:
    stored = stages("conv2d", {3: 1.9, 4: 0.94, 5: 0.99, 6: 0.97, 7: 1.01, 8: 2.5, 9: 0.99}, tmp_path)
    assert [span.position for span in spans_of(stored)] == ["conv2d/sm90-cuda steps 4 to 8"]


def test_a_span_ends_at_a_step_that_was_not_judged(tmp_path: Path) -> None:
    assert spans_of(stages("gemm", {11: 0.99, 13: 1.1}, tmp_path)) == []


def test_a_timed_span_is_a_group_with_its_own_effect(timed: Site, spanned: StoredLineage) -> None:
    assert all_problems_of(spanned) == []
    verdict = spanned.lineage.states[11].verdict
    assert timed.effect is not None
    assert verdict is not None
    assert verdict.timing is not None
    assert timed.effect.estimate == pytest.approx(1 / verdict.timing.speedup.estimate)
    names = groups_of(spanned)
    assert list(names.values()) == [["gemm/sm90-cuda step 13"], ["gemm/sm90-cuda steps 12 to 13"]]


def test_a_span_of_other_steps_is_a_problem(timed: Site, spanned: StoredLineage) -> None:
    path = spanned.directory / SPANS_FILE
    path.write_text(path.read_text().replace(timed.span[0], timed.span[1], 1))
    assert "no neighbours" in "".join(all_problems_of(spanned))


def test_a_span_of_another_kernel_is_a_problem(timed: Site, spanned: StoredLineage) -> None:
    path = spanned.directory / SPANS_FILE
    path.write_text(path.read_text().replace(timed.before.digest, "0" * 64))
    assert f"a verdict is about {12 * '0'}, not about {timed.before.digest[:12]}" in "".join(all_problems_of(spanned))


# --- cards and prompts ------------------------------------------------------------------------------------------------


def hypothesis(condition: str = "Operands are shared by multicast.") -> Hypothesis:
    return Hypothesis(
        name="tile results", intent="Results leave by bulk stores.", anchor="Stores of accumulators by threads.",
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="cuda", text="tma_store_3d(map, tile, m, n);"),
        preconditions=tuple(Precondition(kind=kind, condition=condition, reason="r") for kind in PreconditionClass),
        effect="Stores are whole lines.", risks=(RiskNote(text="A tile is overwritten while it is read."),),
    )  # fmt: skip


def test_a_card_of_a_span_states_the_effect_over_it(timed: Site, spanned: StoredLineage) -> None:
    (group,) = (group for group in grouped(timed_sites([spanned]))[0] if "span" in group.name)
    card = card_of(group, hypothesis())
    assert card.effect.speedup == timed.effect
    assert card.effect.span == tuple(item.transition for item in card.evidence) == timed.span
    assert (card.effect.device, card.scope.platforms) == ("NVIDIA H200", ("sm90",))
    assert Category.MULTICAST not in card.origins[0].prior
    assert "tma_store" in card.scope.capabilities
    assert lint_card(card, {spanned.lineage.name: spanned.lineage}) == []
    assert findings_about(group, hypothesis(), card) == []


def test_a_card_of_a_span_names_the_earlier_steps(timed: Site, spanned: StoredLineage) -> None:
    (group,) = (group for group in grouped(timed_sites([spanned]))[0] if "span" in group.name)
    silent = hypothesis("Nothing.")
    assert ["multicast" in each.text for each in findings_about(group, silent, card_of(group, silent))] == [True]


def test_a_gpu_prompt_shows_lines_that_change(tmp_path: Path) -> None:
    stored = stages("gemm", {7: 1.09}, tmp_path)
    (group,), _ = grouped(timed_sites([stored]))
    text = request_text(group)
    assert "deleted file" not in text
    assert "rename" not in text
    assert "Predicted" not in text
    assert f"goes wrong, says its author: {stored.lineage.transitions[6].risks[0]}" in text
    diff = text.partition("```diff\n")[2].partition("\n```")[0].split("\n")
    assert sum(line.startswith(" ") for line in diff) > 10


def test_advice_is_that_of_the_platform() -> None:
    assert "For CPUs" in system_prompt()
    gpu = system_prompt(on_gpu=True)
    assert "For CPUs" not in gpu
    assert "4,500 bytes" in gpu
