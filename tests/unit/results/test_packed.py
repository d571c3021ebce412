"""Files of lines that are kept compressed are read, found and gone on with by their plain names."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import BadRecord
from pytest_klineage.results.packed import (
    append_line,
    is_there,
    line_files,
    packed,
    read_lines,
    read_packed,
    unpack,
)


class Row(msgspec.Struct):
    number: int


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


def test_a_line_that_was_cut_short_is_left_out_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    append_line(path, Row(1))
    with path.open("ab") as file:
        file.write(b'{"num')
    assert read_lines(path, Row) == [Row(1)]
    append_line(path, Row(2))
    assert path.read_bytes() == b'{"number":1}\n{"number":2}\n'
    path.write_bytes(b'{"num')
    assert read_lines(path, Row) == []
    append_line(path, Row(3))
    assert read_lines(path, Row) == [Row(3)]


def test_any_other_line_that_does_not_decode_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"num\n{"number":2}\n')
    with pytest.raises(BadRecord, match=r"rows\.jsonl"):
        read_lines(tmp_path / "rows.jsonl", Row)


def test_a_packed_file_is_added_to(lines: Path) -> None:
    packed(lines).write_bytes(gzip.compress(b'{"number":1}\n'))
    append_line(lines, Row(2))
    assert read_lines(lines, Row) == [Row(1), Row(2)]
