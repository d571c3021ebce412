"""A walk begins at an author's last state of the paper's case, without what its author said of it, or at the expert."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.lab.library.lineages import HAND_MADE, load_lineage
from pytest_klineage.lab.making import walk_origin

EXPERTS = Path(__file__).parents[4] / "experts"


def expert_of(platform: str) -> Expert:
    return next(
        one for one in find_experts(EXPERTS, platform) if (one.operator, one.surface) == ("fmha", KIND[platform])
    )


KIND = {"sm90": "cuda", "cpu": "cpp"}


def test_a_gpus_walk_begins_at_the_last_state() -> None:
    expert = expert_of("sm90")
    stored = load_lineage(expert.directory / HAND_MADE)
    origin = walk_origin(expert, "sm90", "an H200")
    (last,), (shown,) = stored.sources[-1].files, origin.source.files
    assert origin.case.id == stored.lineage.case.id
    assert shown.name == "kernel.cu"
    assert last.text.endswith(shown.text)
    assert shown.text.startswith("#include")
    assert last.text.startswith("//")


@pytest.mark.parametrize("shape", ["other", "paper"])
def test_a_lineage_of_another_case_is_no_origin(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_klineage.lab import making

    expert, paper = expert_of("sm90"), making.paper_case
    if shape == "other":
        monkeypatch.setattr(
            making, "paper_case", lambda *named: paper(*named).at_shape({"B": 1, "H": 2, "S": 64, "D": 128})
        )
    origin = walk_origin(expert, "sm90", "an H200")
    assert (origin.source.digest == expert.source("expert").digest) == (shape == "other")


def test_a_cpus_walk_begins_at_the_expert() -> None:
    expert = expert_of("cpu")
    assert walk_origin(expert, "cpu", "a CPU").source.digest == expert.source("expert").digest
