"""Built kernels in a folder: found by recipe, refused when they are not what their description says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_klineage import files
from pytest_klineage.records import Build, Code, KernelResources, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import Built, SurfaceFailure, artifacts

CONTENT = b"machine code"
RECIPE = "ab" * 32
KERNEL = KernelResources(name="_Z4gemmv", registers=168, instructions=("mma",))
BUILD = Build(
    digest="cd" * 32, recipe=RECIPE, platform="sm90", toolchain="nvcc 13.0.88", seconds=3.5, kernels=(KERNEL,)
)


def source(text: str = "// gemm") -> KernelSource:
    return KernelSource(surface=Surface.CUDA, files=(SourceFile("gemm.cu", text),), entry="run", label="gemm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of artifacts with one kernel in it."""
    built = artifacts.publish(tmp_path / "cache" / "x", CONTENT, source(), BUILD)
    artifacts.store(tmp_path / "built", built, source())
    return tmp_path / "built"


def test_a_kernel_is_taken_with_all_that_is_known_about_it(folder: Path, tmp_path: Path) -> None:
    taken = artifacts.take(folder, RECIPE, source(), tmp_path / "other")
    assert taken is not None
    assert taken.artifact.read_bytes() == CONTENT
    assert taken.artifact.is_relative_to(tmp_path / "other")
    assert taken.build.artifact == hashlib.sha256(CONTENT).hexdigest()
    assert (taken.build.cached, taken.build.seconds) == (True, 0.0)
    assert (taken.build.toolchain, taken.build.kernels) == (BUILD.toolchain, BUILD.kernels)


def test_another_recipe_is_not_there(folder: Path, tmp_path: Path) -> None:
    assert artifacts.take(folder, "ef" * 32, source(), tmp_path) is None
    assert artifacts.take(tmp_path / "nowhere", RECIPE, source(), tmp_path) is None


def refused(folder: Path, tmp_path: Path, given: KernelSource | None = None) -> str:
    with pytest.raises(SurfaceFailure) as caught:
        artifacts.take(folder, RECIPE, given or source(), tmp_path / "other")
    assert caught.value.code is Code.ARTIFACT
    assert str(folder / RECIPE) in caught.value.message
    return caught.value.message


def test_a_changed_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / RECIPE / artifacts.LIBRARY).write_bytes(CONTENT + b".")
    message = refused(folder, tmp_path)
    assert hashlib.sha256(CONTENT).hexdigest() in message
    assert not (tmp_path / "other").exists()


def test_a_missing_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / RECIPE / artifacts.LIBRARY).unlink()
    assert "kernel.so is missing" in refused(folder, tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema_version": 99}'])
def test_a_damaged_description_is_refused(folder: Path, tmp_path: Path, text: str) -> None:
    (folder / RECIPE / artifacts.DESCRIPTION).write_text(text)
    refused(folder, tmp_path)


def test_another_kernel_under_this_name_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "another kernel" in refused(folder, tmp_path, source("// another"))
    (folder / RECIPE).rename(folder / ("12" * 32))
    with pytest.raises(SurfaceFailure, match="another kernel"):
        artifacts.take(folder, "12" * 32, source(), tmp_path)


def test_the_cache_builds_again_what_is_damaged(tmp_path: Path) -> None:
    directory = tmp_path / "cuda"
    assert artifacts.cached(directory) is None
    artifacts.publish(directory, CONTENT, source(), BUILD)
    hit = artifacts.cached(directory)
    assert hit is not None
    assert hit.build.cached
    (directory / artifacts.LIBRARY).write_bytes(b"cut sh")
    assert artifacts.cached(directory) is None
    artifacts.publish(directory, CONTENT, source(), BUILD)
    assert artifacts.cached(directory) == hit


def test_publishing_leaves_nothing_beside(tmp_path: Path) -> None:
    for _ in range(2):
        artifacts.publish(tmp_path / "x", CONTENT, source(), BUILD)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [artifacts.DESCRIPTION, artifacts.LIBRARY]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    built: Built = artifacts.publish(tmp_path / "x", CONTENT, source(), BUILD)
    (tmp_path / "file").touch()
    with pytest.raises(SurfaceFailure, match="--klineage-artifacts") as caught:
        artifacts.store(tmp_path / "file", built, source())
    assert caught.value.code is Code.BUILD_IO


def test_a_copy_that_may_be_running_stays(folder: Path, tmp_path: Path) -> None:
    """Two judges of one machine take one kernel: replaced, it would be a deleted file in the first one's process."""
    first = artifacts.take(folder, RECIPE, source(), tmp_path / "other")
    assert first is not None
    before = first.artifact.stat().st_ino
    second = artifacts.take(folder, RECIPE, source(), tmp_path / "other")
    assert second == first
    assert first.artifact.stat().st_ino == before
    first.artifact.write_bytes(b"damaged")
    assert artifacts.take(folder, RECIPE, source(), tmp_path / "other") == first
    assert first.artifact.read_bytes() == CONTENT


def test_who_publishes_second_leaves_the_first_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for a file and its link another judge may have written it."""
    inodes: list[int] = []
    monkeypatch.setattr(files, "_hidden", _late(tmp_path / "x" / artifacts.LIBRARY, inodes))
    artifacts.publish(tmp_path / "x", CONTENT, source(), BUILD)
    assert [(tmp_path / "x" / artifacts.LIBRARY).stat().st_ino] == inodes
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [artifacts.DESCRIPTION, artifacts.LIBRARY]


def _late(path: Path, inodes: list[int]) -> Callable[..., tuple[int, str]]:
    """Makes a hidden file after somebody else has published the kernel."""
    make = files._hidden

    def made(folder: Path) -> tuple[int, str]:
        if not path.exists():
            path.write_bytes(CONTENT)
            inodes.append(path.stat().st_ino)
        return make(folder)

    return made
