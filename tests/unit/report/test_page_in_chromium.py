"""The HTML report in a real browser: it shows figures, sorts and opens details by keys; nothing recorded runs in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, browser, chromium_path

from pytest_klineage.report.assemble import assemble
from pytest_klineage.report.collect import collect
from pytest_klineage.report.html import html_report

PROGRAM = chromium_path()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; on Debian: apt-get install chromium")


@pytest.fixture(scope="module")
def page(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "report.html").write_text(html_report(assemble(collect([everything]), beside_paper=True), "1.0"))
    with browser(PROGRAM or "", folder / "profile") as opened:
        opened.path = folder / "report.html"  # type: ignore[attr-defined]  # one tab for all tests
        yield opened


@pytest.fixture
def fresh(page: Page) -> Page:
    page.open(page.path)  # type: ignore[attr-defined]  # set by the fixture above
    return page


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_quiet_offline_and_fits(page: Page, width: int, dark: bool) -> None:
    page.open(page.path, width=width, dark=dark)  # type: ignore[attr-defined]  # set by the fixture above
    assert page.console == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.run("[...document.querySelectorAll('.chart')].every((one) => one.querySelector('svg'))")
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")


def test_no_column_is_cut_on_a_laptops_screen(page: Page) -> None:
    page.open(page.path, width=1200, dark=False)  # type: ignore[attr-defined]  # set by the fixture above
    cut = """[...document.querySelectorAll('section > .scroll')].filter((one) => one.scrollWidth > one.clientWidth)
        .map((one) => one.getAttribute('aria-label'))"""
    assert page.run(cut) == []


def test_nothing_recorded_becomes_markup(fresh: Page) -> None:
    assert fresh.run("document.title") == "Kernels under the gate"
    assert fresh.run("document.images.length + document.querySelectorAll('[onerror]').length") == 0
    assert fresh.run("document.scripts.length") == 2


def test_what_gets_past_an_escape_still_does_not_run(fresh: Page) -> None:
    fresh.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert fresh.run("window.ran") is None
    assert "Content Security Policy" in " ".join(fresh.console)


FIRST = "document.querySelector('table.sortable')"


def test_tables_are_sorted_by_keys(fresh: Page) -> None:
    column = fresh.run(f"[...{FIRST}.tHead.rows[0].cells].findIndex((one) => one.textContent === 'speedup')")
    head = f"{FIRST}.tHead.rows[0].cells[{column}]"
    orders = f"[...{FIRST}.tBodies[0].rows].map((row) => Number(row.cells[{column}].dataset.order))"
    fresh.run(f"{head}.querySelector('button').focus()")
    for wanted, down in (("ascending", False), ("descending", True)):
        fresh.press("Enter")
        assert fresh.run(f"{head}.getAttribute('aria-sort')") == wanted
        values = [value for value in fresh.run(orders) if value is not None]
        assert len(values) == 12
        assert values == sorted(values, reverse=down)
        assert fresh.run(orders)[len(values) :] == [None, None]


def test_points_of_figures_lead_to_what_is_behind_them(fresh: Page) -> None:
    point = "document.querySelector('#figure-speedups .chart [data-detail]')"
    assert fresh.run(f"{point}.querySelector('title').textContent").startswith("klineage on conv2d")
    fresh.run(f"{point}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert fresh.run("document.getElementById('detail').open")
    fresh.press("Escape")
    assert not fresh.run("document.getElementById('detail').open")


def test_figures_have_the_colours_of_the_theme(page: Page) -> None:
    seen = set()
    for dark in (False, True):
        page.open(page.path, dark=dark)  # type: ignore[attr-defined]  # set by the fixture above
        seen.add(page.run("getComputedStyle(document.querySelector('.chart text')).fill"))
    assert len(seen) == 2


def test_a_step_shows_its_reply_and_its_card(fresh: Page) -> None:
    figure = (
        "[...document.querySelectorAll('figure')].find((one) => one.id.includes('topk') && one.id.includes('klineage'))"
    )
    fresh.run(f"[...{figure}.querySelectorAll('button')].find((one) => one.textContent.startsWith('step 5')).click()")
    text = fresh.run("document.getElementById('detail-body').textContent")
    assert "return 5; } </script><script>" in text
    assert "Card cpp-pack-b (admitted)" in text
    assert "data_type: holds (needed)" in text


def test_the_theme_can_be_chosen(fresh: Page) -> None:
    for wanted, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 26)"), ("system", None)):
        fresh.run("document.getElementById('theme').click()")
        assert fresh.run("document.getElementById('theme').textContent") == f"theme: {wanted}"
        if background:
            assert fresh.run("getComputedStyle(document.body).backgroundColor") == background
