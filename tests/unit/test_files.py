"""Files that appear whole: what is beside them goes, whether it took their name or not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_klineage.files import written_beside


def test_what_is_written_beside_takes_the_name(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(b"before")
    with written_beside(path, b"after", synced=True) as name:
        assert path.read_bytes() == b"before"
        os.replace(name, path)
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_what_takes_no_name_goes(tmp_path: Path) -> None:
    with written_beside(tmp_path / "whole", b"unwanted") as name:
        assert Path(name).read_bytes() == b"unwanted"
    with pytest.raises(OSError, match="broken off"), written_beside(tmp_path / "whole", b"half"):
        raise OSError("broken off")
    assert list(tmp_path.iterdir()) == []
