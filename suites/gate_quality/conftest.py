"""Where the gate-quality tables go: results/runs/ by default, results/ with --publish. Nothing is measured here."""

from __future__ import annotations

import datetime
import gzip
import platform
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.gate.host.cpu import processor_name, usable_cores
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.records import KernelSource
from pytest_klineage.results.packed import packed

ROOT = Path(__file__).resolve().parents[2]
MOST_PLAIN = 2**18
"""Bytes of raw records above which they are compressed."""

Publish = Callable[[str, str, list[msgspec.Struct]], None]


def write_lines(path: Path, data: bytes) -> None:
    """The raw records, compressed where they are many; a file of the other form goes."""
    many = len(data) > MOST_PLAIN
    target, other = (packed(path), path) if many else (path, packed(path))
    target.write_bytes(gzip.compress(data, mtime=0) if many else data)
    other.unlink(missing_ok=True)


@pytest.fixture
def expert_source() -> Callable[[str], KernelSource]:
    """The expert kernel of an operator on the CPU."""

    def read(operator: str) -> KernelSource:
        found = {expert.operator: expert for expert in find_experts(ROOT / "experts", "cpu")}
        return found[operator].source("expert")

    return read


@pytest.fixture
def measured_here() -> str:
    """Machine, Python and date, for tables that are made of no verdicts."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return f"{processor_name()}, {usable_cores()} cores, Python {platform.python_version()}, {now}"


@pytest.fixture
def publish(request: pytest.FixtureRequest) -> Publish:
    """Writes one table (Markdown) and the raw records behind it (JSON lines), and shows the table past the capture."""
    base = ROOT / "results" if request.config.getoption("--publish") else ROOT / "results" / "runs"
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(name: str, table: str, records: list[msgspec.Struct]) -> None:
        folder = base / "gate_quality"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(table.rstrip() + "\n")
        write_lines(folder / f"{name}.jsonl", b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"\n{table}")

    return write
