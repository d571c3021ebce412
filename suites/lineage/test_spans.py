"""Spans of the lineages that authors wrote: steps that show no effect alone, timed together with the one that pays.

pytest suites/lineage/test_spans.py --platform sm90 --for 5
pytest suites/lineage/test_spans.py --platform sm90 --for 5 --klineage-executor batch:JUDGE

The effect is neither multiplied from those of the steps nor divided from two timings against a third kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_klineage import KlineageSession
from pytest_klineage.lab.induction.lift_groups import Site, spans_of
from pytest_klineage.lab.induction.retime import Disturbed
from pytest_klineage.lab.induction.span import time_span
from pytest_klineage.lab.induction.verdicts import GateJudge
from pytest_klineage.lab.library.lineages import find_hand_made, load_lineage
from pytest_klineage.lab.library.rendering import speedup_text
from pytest_klineage.plugin.session import SESSION_KEY
from pytest_klineage.results.spans import keep_span

BEGAN = time.monotonic()


class Span(NamedTuple):
    """One span of a lineage."""

    folder: Path
    site: Site


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every span of every lineage that an author wrote for the platform."""
    platform, root = metafunc.config.stash[SESSION_KEY].platform, metafunc.config.getoption("--lineages")
    found = [Span(folder, site) for folder in find_hand_made(root) for site in spans_of(load_lineage(folder))]
    spans = [span for span in found if span.site.lineage.platform == platform]
    metafunc.parametrize("span", spans, ids=[name_of(span.site) for span in spans])


def name_of(site: Site) -> str:
    """Operator, language, and the numbers of the steps."""
    return f"{site.lineage.operator}-{site.lineage.surface.value}-{site.begin + 1:02d}-{site.index + 1:02d}"


def test_span(
    span: Span, klineage_session: KlineageSession, request: pytest.FixtureRequest, write_line: Callable[[str], None]
) -> None:
    """The steps are timed together, and were not disturbed."""
    minutes = request.config.getoption("--for")
    if not minutes:
        pytest.skip("writes beside lineage.json: pass --for MIN")
    if span.site.effect is not None:
        pytest.skip("it was timed already")
    if time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip("time is up; the same command goes on")
    try:
        found = time_span(span.site, GateJudge(klineage_session.gate))
    except Disturbed as error:
        pytest.skip(f"nothing is kept: {error}")
    keep_span(span.folder, found)
    write_line(f"{name_of(span.site)}: {speedup_text(found.effect)}")
