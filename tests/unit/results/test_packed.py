"""Files of lines that are kept compressed are read, found and gone on with by their plain names."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pytest_klineage.results.packed import is_there, line_files, packed, read_packed, unpack


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of lines of which only the compressed one is there."""
    path = tmp_path / "run" / "topk-1.jsonl"
    path.parent.mkdir()
    packed(path).write_bytes(gzip.compress(b"{}\n"))
    return path


def test_a_compressed_file_is_read_by_its_plain_name(lines: Path) -> None:
    assert (is_there(lines), read_packed(lines)) == (True, b"{}\n")
    lines.write_bytes(b"newer")
    assert read_packed(lines) == b"newer"


def test_without_either_nothing_is_there(tmp_path: Path) -> None:
    assert not is_there(tmp_path / "a.jsonl")
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        read_packed(tmp_path / "a.jsonl")


def test_files_are_found_once_and_by_plain_names(lines: Path) -> None:
    other = lines.with_name("conv2d-1.jsonl")
    other.write_bytes(b"")
    lines.write_bytes(b"")
    assert list(line_files(lines.parents[1])) == [other, lines]
    assert list(line_files(lines.parents[1], "*")) == []
    assert list(line_files(lines.parents[1] / "nowhere")) == []


def test_what_is_gone_on_with_is_unpacked(lines: Path) -> None:
    unpack(lines)
    assert lines.read_bytes() == b"{}\n"
    lines.write_bytes(b"more")
    unpack(lines)
    assert lines.read_bytes() == b"more"
