"""Files that appear whole: what is beside them goes, whether it took their name or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_klineage.executors.batch import write_whole
from pytest_klineage.files import written_beside
from pytest_klineage.results.storage import write_atomically
from pytest_klineage.surfaces.artifacts import _replace


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Sets the umask for the time of a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def test_what_is_written_beside_takes_the_name(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(b"before")
    with written_beside(path, b"after", synced=True) as name:
        assert path.read_bytes() == b"before"
        os.replace(name, path)
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("mask", "own"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_the_umask_decides_who_reads_unless_all_do(
    tmp_path: Path, umask: Callable[[int], int], mask: int, own: int
) -> None:
    umask(mask)
    for shared, rights in ((False, own), (True, 0o644)):
        with written_beside(tmp_path / "whole", b"", shared=shared) as name:
            assert Path(name).stat().st_mode & 0o777 == rights


def test_a_file_system_that_keeps_no_rights_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, mode: int) -> None:
        raise PermissionError(name)

    monkeypatch.setattr(os, "chmod", refuse)
    with written_beside(tmp_path / "whole", b"there", shared=True) as name:
        assert Path(name).read_bytes() == b"there"


@pytest.mark.parametrize(("write", "rights"), [(write_atomically, 0o600), (write_whole, 0o644), (_replace, 0o644)])
def test_requests_and_artifacts_alone_are_for_all(
    tmp_path: Path, umask: Callable[[int], int], write: Callable[[Path, bytes], None], rights: int
) -> None:
    """Others' judges read them; results, cards and baselines are the user's own."""
    umask(0o077)
    write(tmp_path / "file", b"content")
    assert (tmp_path / "file").stat().st_mode & 0o777 == rights


def test_what_takes_no_name_goes(tmp_path: Path) -> None:
    with written_beside(tmp_path / "whole", b"unwanted") as name:
        assert Path(name).read_bytes() == b"unwanted"
    with pytest.raises(OSError, match="broken off"), written_beside(tmp_path / "whole", b"half"):
        raise OSError("broken off")
    assert list(tmp_path.iterdir()) == []
