"""Figures on the pages follow from the published records, and intervals in the records from their samples."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from pytest_klineage.cli.main import main
from pytest_klineage.gate.timing.statistics import paired_interval

ROOT = Path(__file__).parents[2]


def _load(path: Path):  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = _load(ROOT / "docs" / "tables.py")
gate_tables = _load(ROOT / "docs" / "gate_tables.py")
WITH_REGIONS = [page for page in tables.PAGES if tables.REGION.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_REGIONS, ids=[page.name for page in WITH_REGIONS])
def test_no_region_is_stale(page: Path) -> None:
    text = page.read_text()
    assert tables.regenerated(text) == text, f"{page.name} is stale: make tables"


def test_every_table_is_on_a_page() -> None:
    used = {found["name"] for page in WITH_REGIONS for found in tables.REGION.finditer(page.read_text())}
    assert used == set(tables.TABLES)


def test_a_changed_figure_is_stale() -> None:
    text = (ROOT / "README.md").read_text()
    changed = text.replace("| `gemm-4096x4096x4096-bf16`", "| `gemm-1x1x1-bf16`", 1)
    assert changed != text
    assert tables.regenerated(changed) == text


def test_the_site_has_the_tables_that_pages_leave_out() -> None:
    pytest.importorskip("mkdocs")
    hooks = _load(ROOT / "docs" / "site_hooks.py")
    shortened = [page for page in WITH_REGIONS if "<!-- site: " in page.read_text()]
    assert shortened
    for page in shortened:
        text = page.read_text()
        names = [found["name"] for found in tables.REGION.finditer(text) if found["kind"] == "site"]
        shown = hooks.on_page_markdown(text)
        for name in names:
            assert tables.TABLES[name]() in shown
            assert tables.TABLES[name]() not in text
        assert "prints it" not in shown


def test_a_table_can_be_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tables.py", "capabilities"])
    tables.main()
    assert capsys.readouterr().out == tables.TABLES["capabilities"]()


def test_measured_facts_names_what_is_there() -> None:
    text = (ROOT / "docs" / "measured-facts.md").read_text().partition("## Where the other tables are")[2]
    first = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    folders = set(re.findall(r"`([\w-]+)`", re.sub(r"\([^)]*\)", "", first)))
    assert {name for name in folders if not (ROOT / "results" / name).is_dir()} == set()


def test_a_region_without_a_table_is_refused() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        tables.regenerated("<!-- table: nonsense -->\n<!-- end -->")


@pytest.mark.parametrize("run", ["main_tier-sm90"])
def test_published_intervals_follow_from_their_samples(run: str) -> None:
    timings = [verdict.timing for verdict in tables.published(run) if verdict.timing is not None]
    assert timings
    for timing in timings:
        again = paired_interval(
            timing.reference_samples_ms, timing.candidate_samples_ms, starts=timing.starts,
            widened="widened" in timing.statistic,
        )  # fmt: skip
        said = timing.speedup
        assert (again.low, again.estimate, again.high) == pytest.approx((said.low, said.estimate, said.high), rel=1e-4)


def _rows(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("run", ["main_tier-sm90", "main_tier-cpu", "stages-sm90"])
def test_published_tables_follow_from_their_records(run: str, tmp_path: Path) -> None:
    folder = ROOT / "results" / run
    main(["report", str(folder / "records.jsonl"), "--markdown", str(tmp_path / "table.md")])
    assert _rows(folder / "table.md")
    assert _rows(tmp_path / "table.md") == _rows(folder / "table.md")


@pytest.mark.parametrize("counts", ["judgements | trials", "trials | judgements"])
def test_detections_are_read_by_their_columns(counts: str) -> None:
    cells = {"trials": "20", "judgements": "45"}
    values = " | ".join(cells[name] for name in counts.split(" | "))
    page = (
        f"# What it finds\n\n| kernel | busy loop | {counts} | found slower | asked |\n|---|---|---|---|---|---|\n"
        f"| gemm | 5 % | 4 | 9 | 1 (25 %) | |\n| **all** | 5 % | {values} | 9 (45 %) | >= 50 % |\n"
    )
    assert gate_tables.detected(page) == {5.0: "9 of 20"}
