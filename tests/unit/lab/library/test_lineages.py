"""Lineages on disk: what is written is read back, and whatever was changed since is named with its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.lab.library.lineages import (
    LINEAGE_FILE,
    BrokenLineage,
    StoredLineage,
    find_lineages,
    load_lineage,
    problems_of,
    save_lineage,
    state_of,
    verify_lineage,
    with_files,
)
from pytest_klineage.records import (
    Category,
    Check,
    Code,
    Edit,
    EditKind,
    KernelSource,
    Lineage,
    Machine,
    Rederivation,
    SourceFile,
    Transition,
)
from pytest_klineage.records.edits import diff_edit
from pytest_klineage.results.storage import record_json

MakeLineage = Callable[[], tuple[Lineage, tuple[KernelSource, ...]]]
Make = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "experts" / "gemm" / "cpu-cpp" / "lineage"


@pytest.fixture
def saved(folder: Path, make_lineage: MakeLineage) -> StoredLineage:
    return save_lineage(folder, *make_lineage())


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> StoredLineage:
    """The lineage after somebody edited lineage.json by hand."""
    path = folder / LINEAGE_FILE
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return load_lineage(folder)


def test_what_is_saved_is_loaded(saved: StoredLineage, folder: Path) -> None:
    loaded = load_lineage(folder)
    assert loaded.lineage == saved.lineage
    assert [source.digest for source in loaded.sources] == [source.digest for source in saved.sources]
    verify_lineage(loaded)


def test_files_are_named_by_place_and_name(saved: StoredLineage, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["00-naive.cpp", "lineage.json"]
    assert (folder / "00-naive.cpp").read_text() == saved.sources[0].files[0].text
    assert [state.files[0].path for state in saved.lineage.states] == [
        "00-naive.cpp", "01-tile-stage.cpp", "02-simd.cpp",
    ]  # fmt: skip


def test_samples_are_one_line_each(saved: StoredLineage, folder: Path) -> None:
    lines = (folder / LINEAGE_FILE).read_text().splitlines()
    assert sum('"reference_samples_ms":[1.0,1.01]' in line for line in lines) >= len(saved.sources)
    assert json.loads("\n".join(lines)) == json.loads(record_json(saved.lineage))


def test_the_same_lineage_is_the_same_bytes(saved: StoredLineage, folder: Path, make_lineage: MakeLineage) -> None:
    before = (folder / LINEAGE_FILE).read_bytes()
    save_lineage(folder, *make_lineage())
    assert (folder / LINEAGE_FILE).read_bytes() == before


def test_lineages_are_found_below_experts(saved: StoredLineage, folder: Path) -> None:
    assert find_lineages(folder.parents[2]) == [folder]


def test_further_files_of_a_state_lie_beside_it(make_source: Make, make_verdict: Make, folder: Path) -> None:
    source = make_source("x\r\n", **{"tile.h": "y"})
    state = state_of(3, "Wide Tile!", source, make_verdict(source))
    assert [file.path for file in state.files] == ["03-wide-tile.cpp", "03-wide-tile.tile.h"]


def test_bytes_are_kept_as_they_are(
    folder: Path, make_lineage: MakeLineage, make_source: Make, make_verdict: Make
) -> None:
    lineage, _ = make_lineage()
    source = make_source("int a;\r\nint b;\x0c\n\tno end", **{"ü.h": ""})
    single = msgspec.structs.replace(
        lineage, states=(state_of(0, "only", source, make_verdict(source)),), transitions=()
    )
    save_lineage(folder, single, [source])
    assert load_lineage(folder).sources[0].digest == source.digest
    assert (folder / "00-only.cpp").read_bytes() == b"int a;\r\nint b;\x0c\n\tno end"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4, unique=True))
def test_any_chain_of_texts_survives_the_disk(
    texts: list[str], tmp_path: Path, make_lineage: MakeLineage, make_source: Make, make_step: Make,
    make_verdict: Make,
) -> None:  # fmt: skip
    sources = [make_source(text) for text in texts]
    states = tuple(state_of(index, f"s{index}", source, make_verdict(source)) for index, source in enumerate(sources))
    steps = tuple(make_step(*pair, Category.FUSION) for pair in pairwise(sources))
    lineage = msgspec.structs.replace(make_lineage()[0], states=states, transitions=steps)
    stored = save_lineage(tmp_path / "lineage", lineage, sources)
    loaded = load_lineage(tmp_path / "lineage")
    assert loaded.lineage == stored.lineage
    assert problems_of(loaded) == []


def test_files_of_an_earlier_lineage_are_removed(saved: StoredLineage, folder: Path, make_lineage: MakeLineage) -> None:
    lineage, sources = make_lineage()
    (folder / "notes.txt").write_text("not ours")
    (folder / "02-simd.cpp").write_text("written by an earlier version")
    shorter = msgspec.structs.replace(lineage, states=lineage.states[:2], transitions=lineage.transitions[:1])
    save_lineage(folder, shorter, sources[:2])
    assert sorted(path.name for path in folder.iterdir()) == ["00-naive.cpp", "lineage.json", "notes.txt"]


def test_infinities_are_stored_as_the_largest_double(
    folder: Path, make_lineage: MakeLineage, make_verdict: Make
) -> None:
    lineage, sources = make_lineage()
    check = Check(input_distribution="spikes", output="c", error=float("inf"), bound=1.0, passed=False)
    refused = msgspec.structs.replace(
        lineage.transitions[0].rejected[0], verdict=make_verdict(sources[0], Code.MISMATCH, checks=(check,))
    )
    save_lineage(folder, msgspec.structs.replace(lineage, rejected=(refused,)), sources)
    loaded = load_lineage(folder)
    verify_lineage(loaded)
    verdict = loaded.lineage.rejected[0].verdict
    assert verdict is not None
    assert verdict.checks[0].error > 1e308


# --- what was changed is found ----------------------------------------------------------------------------------------


def test_a_changed_file_is_named(saved: StoredLineage, folder: Path) -> None:
    path = folder / "00-naive.cpp"
    path.write_text(f"{path.read_text()}// more\n")
    problems = problems_of(load_lineage(folder))
    assert any(problem.startswith("00-naive.cpp: its digest is") for problem in problems)
    assert any(problem.startswith("01-tile-stage.cpp: its digest is") for problem in problems)
    with pytest.raises(BrokenLineage, match=r"lineage: 00-naive\.cpp"):
        verify_lineage(load_lineage(folder))


def test_an_edit_that_no_longer_fits_is_named(saved: StoredLineage, folder: Path) -> None:
    (folder / "00-naive.cpp").write_text("int other;\n")
    with pytest.raises(BrokenLineage, match=r"lineage\.json: transition 1: the forward edit does not apply"):
        load_lineage(folder)


def test_a_missing_file_is_named(saved: StoredLineage, folder: Path) -> None:
    (folder / "00-naive.cpp").unlink()
    with pytest.raises(BrokenLineage, match=r"00-naive\.cpp cannot be read"):
        load_lineage(folder)


def test_a_file_that_is_no_text_is_named(saved: StoredLineage, folder: Path) -> None:
    (folder / "00-naive.cpp").write_bytes(b"\xff\xfe")
    with pytest.raises(BrokenLineage, match=r"00-naive\.cpp is not UTF-8"):
        load_lineage(folder)


@pytest.mark.parametrize(
    ("index", "field", "value"),
    [(0, "locus", "elsewhere"), (0, "intent", ""), (1, "effect", None), (0, "rejected", []), (1, "category", "mma")],
)
def test_a_changed_step_breaks_the_chain_where_it_is(
    saved: StoredLineage, folder: Path, index: int, field: str, value: object
) -> None:
    changed = edited(folder, lambda data: data["transitions"][index].__setitem__(field, value))
    assert any(f"the chain of digests breaks at transition {index + 1}" in text for text in problems_of(changed))


def test_a_resealed_step_breaks_later_ones(saved: StoredLineage, folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["transitions"][1]["locus"] = "elsewhere"

    forged = edited(folder, change)
    again = forged.lineage.sealed()

    def with_own_digest(data: dict[str, Any]) -> None:
        data["transitions"][1]["digest"] = again.transitions[1].digest

    problems = problems_of(edited(folder, with_own_digest))
    assert any("breaks at transition 1" in text for text in problems)


@pytest.mark.parametrize("field", ["termination_reason", "provenance", "rejected"])
def test_a_changed_end_is_found(saved: StoredLineage, folder: Path, field: str) -> None:
    value: Any = {"termination_reason": "other", "provenance": {}, "rejected": []}[field]
    if field == "rejected":
        value = json.loads((folder / LINEAGE_FILE).read_text())["transitions"][0]["rejected"]
    changed = edited(folder, lambda data: data.__setitem__(field, value))
    says = "lineage.json: its digest is not that of its content: states, rejections or the end were changed"
    assert problems_of(changed) == [says]


def test_a_changed_verdict_is_found(saved: StoredLineage, folder: Path) -> None:
    def faster(data: dict[str, Any]) -> None:
        data["states"][1]["verdict"]["timing"]["candidate_samples_ms"][0] = 0.1

    assert any("its digest is not" in problem for problem in problems_of(edited(folder, faster)))


def replaced(stored: StoredLineage, index: int, **fields: Any) -> list[str]:
    """Problems of the lineage with other fields in one transition."""
    steps = list(stored.lineage.transitions)
    steps[index] = msgspec.structs.replace(steps[index], **fields)
    lineage = msgspec.structs.replace(stored.lineage, transitions=tuple(steps)).sealed()
    return problems_of(msgspec.structs.replace(stored, lineage=lineage))


def test_a_step_between_other_states_is_found(saved: StoredLineage) -> None:
    assert replaced(saved, 0, after="0" * 64) == [
        "lineage.json: transition 1 (tile_stage): it does not lead from 'naive' to 'tile stage'",
        "lineage.json: transition 1 (tile_stage): the verdict of the forward edit is about another source "
        f"({saved.sources[1].digest[:12]} instead of 000000000000)",
    ]


def test_an_edit_that_does_not_apply_is_found(saved: StoredLineage) -> None:
    step: Transition = saved.lineage.transitions[0]
    problems = replaced(saved, 0, forward=step.backward)
    assert any("the forward edit does not apply: kernel.cpp, line 2" in problem for problem in problems)


def test_a_verdict_about_another_kernel_is_found(saved: StoredLineage, make_verdict: Make) -> None:
    other = make_verdict(saved.sources[0])
    problems = replaced(saved, 1, forward_verdict=other)
    assert any("the verdict of the forward edit is about another source" in problem for problem in problems)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"machine": Machine(platform="sm90", device="GPU")}, "is from sm90, the lineage from cpu"),
        ({"status": Code.MISMATCH.status}, "is wrong_value: only right kernels are states"),
    ],
)
def test_a_verdict_that_does_not_carry_the_state_is_found(
    saved: StoredLineage, make_verdict: Make, fields: dict[str, Any], says: str
) -> None:
    problems = replaced(saved, 1, forward_verdict=make_verdict(saved.sources[2], **fields))
    assert any(says in problem for problem in problems)


def test_a_verdict_on_another_case_is_found(saved: StoredLineage, make_verdict: Make) -> None:
    case = saved.lineage.case.at_shape({"M": 1, "N": 1, "K": 1})
    problems = replaced(saved, 1, forward_verdict=make_verdict(saved.sources[2], case=case))
    assert any("is about gemm-1x1x1-fp32, the lineage about gemm-64x64x64-fp32" in text for text in problems)


def test_a_rederived_kernel_may_have_another_text(saved: StoredLineage, make_source: Make, make_verdict: Make) -> None:
    other = make_source(saved.sources[2].files[0].text.replace("vector(1)", "vector( 1 )"))
    before, after = ({f.name: f.text for f in source.files} for source in (saved.sources[1], other))
    rederived = Rederivation(edit=diff_edit(before, after), source_digest=other.digest)
    assert replaced(saved, 1, rederived=rederived, forward_verdict=make_verdict(other)) == []
    assert replaced(saved, 1, rederived=rederived) != []
    wrong = msgspec.structs.replace(rederived, source_digest="1" * 64)
    problems = replaced(saved, 1, rederived=wrong, forward_verdict=make_verdict(other))
    assert any("the re-derived edit gives" in problem for problem in problems)
    broken = msgspec.structs.replace(rederived, edit=Edit(kind=EditKind.UNIFIED_DIFF, diff="nonsense"))
    problems = replaced(saved, 1, rederived=broken, forward_verdict=make_verdict(other))
    assert any("the re-derived edit does not apply" in problem for problem in problems)


def test_states_and_transitions_must_match_in_number(saved: StoredLineage) -> None:
    lineage = msgspec.structs.replace(saved.lineage, transitions=saved.lineage.transitions[:1])
    problems = problems_of(msgspec.structs.replace(saved, lineage=lineage))
    assert problems == ["lineage.json: 3 states (3 sources) do not fit 1 transitions"]


def test_a_lineage_of_another_operator_than_its_case_is_found(saved: StoredLineage) -> None:
    lineage = msgspec.structs.replace(saved.lineage, operator="topk").sealed()
    problems = problems_of(msgspec.structs.replace(saved, lineage=lineage))
    assert problems == ["lineage.json: the lineage is of topk, its case of gemm"]


@pytest.mark.parametrize("path", ["../kernel.cpp", "/etc/passwd", "lineage.json", ".hidden"])
def test_a_path_that_leads_elsewhere_is_refused(saved: StoredLineage, folder: Path, path: str) -> None:
    with pytest.raises(BrokenLineage, match="is not the plain name"):
        edited(folder, lambda data: data["states"][0]["files"][0].__setitem__("path", path))


def test_two_states_in_one_file_are_found(saved: StoredLineage, folder: Path) -> None:
    changed = edited(folder, lambda data: data["states"][2]["files"][0].__setitem__("path", "01-tile-stage.cpp"))
    assert "lineage.json: two states share the file 01-tile-stage.cpp" in problems_of(changed)


def test_a_broken_lineage_is_not_written(folder: Path, make_lineage: MakeLineage) -> None:
    lineage, sources = make_lineage()
    with pytest.raises(BrokenLineage):
        save_lineage(folder, lineage, sources[::-1])
    assert not folder.exists()


def test_where_no_lineage_is_the_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lineage\.json cannot be read"):
        load_lineage(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", r"lineage\.json: not a valid Lineage"), ('{"schema_version": 99}', r"lineage\.json: .*schema version 99")],
)
def test_a_record_that_does_not_decode_is_named(folder: Path, text: str, says: str) -> None:
    folder.mkdir(parents=True)
    (folder / LINEAGE_FILE).write_text(text)
    with pytest.raises(BadRecord, match=says):
        load_lineage(folder)


def test_a_source_with_other_files_keeps_their_order(make_source: Make) -> None:
    source = make_source("a", **{"z.h": "z", "b.h": "b"})
    changed = with_files(source, {"new.h": "n", "b.h": "B", "kernel.cpp": "A"})
    assert changed.files == (SourceFile("kernel.cpp", "A"), SourceFile("b.h", "B"), SourceFile("new.h", "n"))
