"""How long it takes to make every table, figure and page again from what is committed, without PyTorch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("results", "experts", "skills")
LIMIT_S = 30.0
CODE = """\
import sys
sys.modules["torch"] = None  # an import of torch would fail
from pytest_klineage.cli.main import main
sys.exit(main(["report", *sys.argv[1:]]))
"""


class ReportTime(msgspec.Struct, frozen=True, kw_only=True):
    """Raw figures: wall seconds of the whole command, and what it wrote."""

    seconds: float
    sources: tuple[str, ...]
    figures: int
    page_bytes: int


def test_report_time(tmp_path: Path, publish: Callable[[str, str, list[ReportTime]], None], measured_here: str) -> None:
    """All tables and figures from committed results take at most 30 s."""
    sources = tuple(name for name in SOURCES if (ROOT / name).is_dir())
    page, figures = tmp_path / "report.html", tmp_path / "figures"
    arguments = [*sources, "--paper", "--html", str(page), "--markdown", str(tmp_path / "report.md"), "--figures",
                 str(figures)]  # fmt: skip
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=ROOT, check=True, timeout=10 * LIMIT_S)
    found = ReportTime(
        seconds=time.perf_counter() - start, sources=sources, figures=len(list(figures.glob("*.svg"))),
        page_bytes=page.stat().st_size,
    )  # fmt: skip
    lines = [
        "# What a report costs\n",
        f"{measured_here}. Everything from {', '.join(sources)}, without PyTorch, in a fresh process.\n",
        "| what | measured | target |",
        "|---|---|---|",
        f"| HTML, Markdown and {found.figures} figures as SVG and PNG | {found.seconds:.1f} s | {LIMIT_S:.0f} s |",
        f"| size of the page | {found.page_bytes / 1e6:.2f} MB | |",
    ]
    publish("report_time", "\n".join(lines) + "\n\nRaw figures: `report_time.jsonl`.", [found])
    assert found.seconds <= LIMIT_S
    assert found.figures
