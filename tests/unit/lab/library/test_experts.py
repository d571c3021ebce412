"""Expert kernels on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.experts import find_experts, read_expert
from pytest_klineage.records import Surface

GOOD = """
[kernel]
operator = "gemm"
platform = "cpu"
surface = "cpp"

[variants.expert]
files = ["expert.cpp", "tiles.h"]
flags = ["-O3", "-fopenmp"]
techniques = ["register tiles"]

[variants.naive]
files = ["naive.cpp"]
entry = "naive_gemm"
label = "three loops"

[contract]
shapes = "any"

[provenance]
licence = "Apache-2.0"
"""


def write(root: Path, text: str, folder: str = "gemm/cpu-cpp") -> Path:
    directory = root / folder
    directory.mkdir(parents=True)
    for name in ("expert.cpp", "tiles.h", "naive.cpp"):
        (directory / name).write_text(f"// {name}\n")
    path = directory / "expert.toml"
    path.write_text(text)
    return path


def test_an_expert_has_variants_with_sources(tmp_path: Path) -> None:
    expert = read_expert(write(tmp_path, GOOD))
    assert (expert.operator, expert.platform, expert.surface) == ("gemm", "cpu", Surface.CPP)
    assert list(expert.variants) == ["expert", "naive"]
    source = expert.source("expert")
    assert [file.name for file in source.files] == ["expert.cpp", "tiles.h"]
    assert (source.entry, source.flags, source.label) == ("run", ("-O3", "-fopenmp"), "expert")
    naive = expert.source("naive")
    assert (naive.entry, naive.flags, naive.label) == ("naive_gemm", (), "three loops")
    assert expert.provenance == {"licence": "Apache-2.0"}


def test_an_unknown_variant_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Valid: expert, naive"):
        read_expert(write(tmp_path, GOOD)).source("exprt")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    (path.parent / "tiles.h").unlink()
    with pytest.raises(UsageError, match=r"tiles\.h cannot be read"):
        read_expert(path).source("expert")


def test_experts_are_found_in_order_and_by_platform(tmp_path: Path) -> None:
    for operator, platform in (("topk", "cpu"), ("gemm", "sm90"), ("gemm", "cpu")):
        text = GOOD.replace('"gemm"', f'"{operator}"').replace('platform = "cpu"', f'platform = "{platform}"')
        write(tmp_path, text, f"{operator}/{platform}-cpp")
    assert [(found.operator, found.platform) for found in find_experts(tmp_path)] == [
        ("gemm", "cpu"), ("gemm", "sm90"), ("topk", "cpu"),
    ]  # fmt: skip
    assert [found.operator for found in find_experts(tmp_path, "cpu")] == ["gemm", "topk"]
    assert find_experts(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('surface = "cpp"', 'surface = "fortran"', r"Invalid enum value 'fortran'.*surface"),
        ('operator = "gemm"', "", "missing required field `operator`"),
        ("[variants.naive]", "[varaints.naive]", "unknown field `varaints`"),
        ("techniques", "tecniques", "unknown field `tecniques`"),
        ('files = ["naive.cpp"]', "files = []", "variants.naive has no files"),
        ('files = ["naive.cpp"]', 'files = ["../naive.cpp"]', "must lie in the expert's own folder"),
        ('platform = "cpu"', 'platform = "sm90"', "the folder's name must say the same"),
        ("[kernel]", "[kernel", "is not TOML"),
    ],
)
def test_a_malformed_file_says_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(UsageError, match=message) as caught:
        read_expert(path)
    assert str(path) in str(caught.value)


def test_a_file_without_variants_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.partition("[variants")[0] + "[variants]\n")
    with pytest.raises(UsageError, match="no \\[variants"):
        read_expert(path)


def test_the_shipped_cpu_kernels_are_complete(pytestconfig: pytest.Config) -> None:
    experts = find_experts(pytestconfig.rootpath / "experts", "cpu")
    assert [found.operator for found in experts] == ["conv2d", "fmha", "gdn", "gemm", "topk"]
    for found in experts:
        assert set(found.variants) >= {"expert", "naive"}
        assert found.variants["expert"].techniques
        assert found.provenance
        for name in found.variants:
            assert found.source(name).files[0].text
