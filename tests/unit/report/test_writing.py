"""A report as HTML, Markdown and figure files: escaping, completeness, the same bytes every time, remedies."""

from __future__ import annotations

import builtins
import html
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from report_sample import HOSTILE

from pytest_klineage.errors import MissingDependency, StoreError
from pytest_klineage.report.assemble import assemble
from pytest_klineage.report.collect import collect
from pytest_klineage.report.document import Cell, Column, Report, Section, Table
from pytest_klineage.report.figures import draw
from pytest_klineage.report.html import html_report, script_safe
from pytest_klineage.report.markdown import escaped, markdown_document

HOSTILE_TABLE = Table(HOSTILE, (Column(HOSTILE), Column("b")), ((Cell(HOSTILE, HOSTILE), Cell("2", 2.0)),))
HOSTILE_REPORT = Report("t", (), (Section("s", "s", tables=(HOSTILE_TABLE,)),), sources=(HOSTILE,))


class Elements(HTMLParser):
    """Names of elements and attributes, and the text of the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.fixture(scope="module")
def report(everything: Path) -> Report:
    return assemble(collect([everything]), beside_paper=True)


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return html_report(report, "1.0")


def test_recorded_text_is_no_markup(page: str) -> None:
    for text in (page, html_report(HOSTILE_REPORT, "1.0")):
        elements = Elements(text)
        assert elements.tags.count("script") == 2
        assert "img" not in elements.tags
        assert not [name for name in elements.attributes if name.startswith("on") or name == "style"]


def test_recorded_text_is_shown_as_it_was(page: str) -> None:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    plain = msgspec.json.decode(data[1])
    shown = [block["text"] for detail in plain["details"] for block in detail["blocks"]]
    assert any(HOSTILE in block for block in shown)


def test_every_figure_is_in_the_page_and_leads_to_details(report: Report, page: str, tmp_path: Path) -> None:
    figures = [figure for section in report.sections for figure in section.figures]
    tags = Elements(page).tags
    assert tags.count("figure") == tags.count("svg") == len(figures)
    charts = "".join(re.findall(r'<div class="chart".*?</svg>', page, re.S))
    shown = {point.detail for figure in figures for point in figure.points if point.detail}
    assert set(re.findall(r'data-detail="([^"]*)"', charts)) == {html.escape(detail) for detail in shown}
    assert "<style" not in charts
    assert html_report(report, "1.0", draw(figures, tmp_path)) == page


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_data_cannot_end_its_element() -> None:
    text = script_safe({"a": "</script><!-- & \u2028\u2029"})
    assert not re.search(r"[<>&\u2028\u2029]", text)
    assert msgspec.json.decode(text) == {"a": "</script><!-- & \u2028\u2029"}


def test_the_same_records_are_the_same_page(report: Report, page: str, everything: Path) -> None:
    again = assemble(collect([everything]), beside_paper=True)
    assert html_report(again, "1.0") == page
    assert markdown_document(again) == markdown_document(report)


def test_markdown_has_every_table_and_escapes(report: Report) -> None:
    text = markdown_document(report, {"speedups": "figures/speedups.svg"})
    for section in report.sections:
        assert f"## {section.title}" in text
        assert all(escaped(table.title) in text for table in section.tables)
    assert "![Speedup over the reference, Test CPU @ 3 GHz](figures/speedups.svg)" in text
    hostile = markdown_document(HOSTILE_REPORT)
    assert not re.search(r"(?<!\\)[<`*]|(?<!\\)\[", hostile.replace("**", ""))
    rows = [line for line in hostile.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}


def test_figures_are_files_of_both_kinds(report: Report, tmp_path: Path) -> None:
    figures = [section.figures[0] for section in report.sections if section.figures]
    written = draw(figures, tmp_path / "new" / "folder")
    assert set(written) == {figure.key for figure in figures}
    for path in written.values():
        text = path.read_text()
        assert text.startswith("<?xml")
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "11.20x" in written["speedups"].read_text()
    before = written["speedups"].read_bytes()
    assert draw(figures, tmp_path / "again")["speedups"].read_bytes() == before


def test_figures_do_not_read_names_as_formulas(report: Report, tmp_path: Path) -> None:
    figure = next(section.figures[0] for section in report.sections if section.key == "cost")
    import dataclasses

    written = draw([dataclasses.replace(figure, title=r"costs $\nothing{ of $5")], tmp_path)
    assert r"costs $\nothing{ of $5" in written[figure.key].read_text()


def test_a_folder_that_cannot_be_written_is_named(report: Report, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        draw(report.sections[0].figures, tmp_path / "file" / "below")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependency, match=r"pip install 'pytest-klineage\[report\]'"):
        html_report(report, "1.0") if package == "jinja2" else draw((), tmp_path)
