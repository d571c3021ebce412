"""Where the gate-quality tables go: results/runs/ by default, results/ with --publish. Nothing is measured here."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.gate.host.cpu import processor_name, usable_cores
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.records import KernelSource

ROOT = Path(__file__).resolve().parents[2]

Publish = Callable[[str, str, list[msgspec.Struct]], None]


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
    """Writes one table (Markdown) and the raw records behind it (JSON lines), and shows the table."""
    base = ROOT / "results" if request.config.getoption("--publish") else ROOT / "results" / "runs"
    reporter = request.config.pluginmanager.getplugin("terminalreporter")

    def write(name: str, table: str, records: list[msgspec.Struct]) -> None:
        folder = base / "gate_quality"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(table.rstrip() + "\n")
        (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        reporter.write_line("")
        for line in table.splitlines():
            reporter.write_line(line)

    return write
