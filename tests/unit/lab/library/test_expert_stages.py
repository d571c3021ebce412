"""The stages of an expert as kernels: by name, with the platforms that they can be built for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.errors import UnknownName
from pytest_klineage.lab.library.experts import Expert, find_experts, read_expert
from pytest_klineage.records import PLATFORMS, Surface

TOML = """
[kernel]
operator = "gemm"
platform = "sm90"
surface = "cuda"

[variants.naive]
files = ["stages/00-naive.cu"]
platforms = ["sm90", "sm120"]

[variants.expert]
files = ["expert.cu"]

[[stages]]
file = "stages/00-naive.cu"
adds = "naive"
platforms = ["sm90", "sm120"]

[[stages]]
file = "stages/01-wgmma.cu"
adds = "wgmma"
"""


@pytest.fixture
def expert(tmp_path: Path) -> Expert:
    """An expert with two stages on disk."""
    folder = tmp_path / "gemm" / "sm90-cuda"
    (folder / "stages").mkdir(parents=True)
    (folder / "expert.toml").write_text(TOML)
    (folder / "stages" / "01-wgmma.cu").write_text("// wgmma")
    return read_expert(folder / "expert.toml")


def test_a_stage_is_a_source_with_its_own_name(expert: Expert) -> None:
    source = expert.stage_source("01-wgmma")
    assert (source.surface, source.entry, source.label) == (Surface.CUDA, "run", "01-wgmma")
    assert [(file.name, file.text) for file in source.files] == [("01-wgmma.cu", "// wgmma")]
    with pytest.raises(UnknownName, match=r"'01-wgma'. Did you mean '01-wgmma'\?"):
        expert.stage_source("01-wgma")


def test_platforms_are_the_folders_unless_more_are_named(expert: Expert) -> None:
    assert expert.platforms_of(expert.stage("00-naive")) == ("sm90", "sm120")
    assert expert.platforms_of(expert.stage("01-wgmma")) == ("sm90",)
    assert expert.platforms_of(expert.variants["naive"]) == ("sm90", "sm120")
    assert expert.platforms_of(expert.variants["expert"]) == ("sm90",)


def test_what_is_shipped_names_platforms_that_there_are(pytestconfig: pytest.Config) -> None:
    for found in find_experts(pytestconfig.rootpath / "experts"):
        for kernel in (*found.variants.values(), *found.stages):
            assert set(found.platforms_of(kernel)) <= set(PLATFORMS)
            assert found.platform in found.platforms_of(kernel)
