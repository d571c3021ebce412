"""What the experiment decides by is what stands in experiment.toml. No kernel is judged, no model is asked.

pytest suites/skill_effect/test_frozen.py                  cards and first prompts are the frozen ones
pytest suites/skill_effect/test_frozen.py --publish        freezes them; before the first measured round only
"""

from __future__ import annotations

import msgspec
import pytest
from design import FILE, MARK, Design, frozen_part
from running import frozen_now


def test_cards_and_prompts_are_the_frozen_ones(design: Design, pytestconfig: pytest.Config) -> None:
    """A changed card, contract, root or word in a prompt ends the experiment, or comes before it."""
    if pytestconfig.getoption("--publish"):
        today = frozen_now(msgspec.structs.replace(design, frozen=None))
        FILE.write_text(FILE.read_text().partition(MARK)[0] + frozen_part(today))
        return
    assert design.frozen == frozen_now(design)


def test_no_card_is_of_a_targets_own_problem(design: Design) -> None:
    """Contaminated cards are in no arm."""
    for name in design.targets:
        case = design.case(name)
        for arm in design.arms:
            own = [card.name for card in design.cards(name, arm)
                   if any((at.operator, at.shape) == (case.operator, case.shape) for at in card.origins)]  # fmt: skip
            assert not own
