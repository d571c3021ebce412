"""What the site has beyond the pages: the HTML report of the published records, and the long tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files
from tables import with_site_tables

from pytest_klineage import __version__
from pytest_klineage.report.assemble import assemble
from pytest_klineage.report.collect import collect
from pytest_klineage.report.html import html_report

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]
PUBLISHED = ("results", "experts", "skills")
"""Folders with the records that the report is about."""

EXECUTED = re.compile(r"^```console run exit=\d+$", re.M)
"""How the pages mark commands that tests run; Markdown knows no such option of a block."""

CELL = re.compile(r"<td[^>]*>.*?</td>", re.S)
"""A cell of a table."""


def on_page_markdown(markdown: str, **_: object) -> str:
    """Show executed examples as plain console blocks, and the tables that stand on the site alone."""
    return EXECUTED.sub("```console", with_site_tables(markdown))


def on_page_content(html: str, **_: object) -> str:
    """Show a bar in a table's code as a bar: Markdown's tables need it escaped, and the site's renderer keeps that."""
    return CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add report.html to the site."""
    report = assemble(collect([ROOT / name for name in PUBLISHED]), beside_paper=True)
    files.append(File.generated(config, "report.html", content=html_report(report, __version__)))
    return files
