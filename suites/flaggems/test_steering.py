"""The points of the arm `card` are what the rule makes of the library's cards. No kernel is judged, no model is asked.

pytest suites/flaggems/test_steering.py                  points/card.toml is what the cards of skills/ say
pytest suites/flaggems/test_steering.py --publish        writes it; before the first sweep only
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from arms import CARD_POINTS
from rows import ROWS
from steering import as_toml, steered
from written import retrieved, same_problem


def test_the_points_are_those_that_the_cards_say(
    pytestconfig: pytest.Config, write_line: Callable[[str], None]
) -> None:
    """A changed card, rule or grid changes the points: sweep again, or keep to the commit that was measured."""
    found = [points for row in ROWS if (points := steered(row, retrieved(row))) is not None]
    for row in ROWS:
        if same_problem(row):
            write_line(f"{row.name('sm90')}: its cards were lifted from the same problem")
    if pytestconfig.getoption("--publish"):
        CARD_POINTS.parent.mkdir(exist_ok=True)
        CARD_POINTS.write_text(as_toml(found))
        return
    assert CARD_POINTS.read_text() == as_toml(found)
