"""From committed lineages to candidate cards, one test per group of transitions.

With a language model every group that has no card yet is lifted, and what was said is kept in <skills>/lifts. With
--klineage-llm=replay the kept conversations are held to the cards that they have made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fixtures import begun_of, noted

from pytest_klineage.errors import KlineageError
from pytest_klineage.lab.induction.lift import LIFTED, NOT_LIFTED, lift
from pytest_klineage.lab.induction.lift_groups import Group, group_of, grouped, sites_of, timed_sites
from pytest_klineage.lab.induction.lift_prompt import no_longer_holds
from pytest_klineage.lab.library.cards import find_cards
from pytest_klineage.lab.library.lineages import StoredLineage
from pytest_klineage.lab.library.lint import with_effect_of_step
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.making import LIFTS, card_of, lift_group, verified_lineages
from pytest_klineage.lab.plugin import Models
from pytest_klineage.records import CardStatus, Lineage, SkillCard


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every group, and one for every kept conversation."""
    config = metafunc.config
    if "group" in metafunc.fixturenames:
        groups, _ = grouped(timed_sites(verified_lineages(config.getoption("--admission-experts"))))
        metafunc.parametrize("group", groups, ids=[group.name for group in groups])
    if "kept" in metafunc.fixturenames:
        kept = sorted((config.getoption("--admission-skills") / LIFTS).glob("*.jsonl"))
        metafunc.parametrize("kept", kept, ids=[path.stem for path in kept])


def test_lift(
    group: Group,
    skills: Path,
    klineage_models: Models,
    needs: Callable[[str], None],
    write_line: Callable[[str], None],
) -> None:
    """A model makes a candidate card of the group, and every check of what it wrote passes."""
    needs("model")
    if (known := card_of(group, skills)) is not None:
        pytest.skip(f"lifted already: {known.name}; retire it, or remove its folder, to lift it again")
    done = lift_group(group, skills, klineage_models)
    write_line(done.summary)
    if done.card is None:
        pytest.fail(done.summary, pytrace=False)


def test_replayed_lift(
    kept: Path, skills: Path, lineages: list[StoredLineage], timed: dict[str, Lineage], needs: Callable[[str], None],
    replaying: Callable[[Path], Session],
) -> None:  # fmt: skip
    """What was said still makes the very card that is kept, of steps that still hold; or it still makes none.

    The card shows what its step was last timed at, the conversation what was known then.
    """
    needs("replay")
    settings = begun_of(kept).settings
    name, cited = settings["group"], settings.get("steps", "")
    sites = timed_sites(lineages)
    if cited:
        group = group_of(name, cited, sites)
    else:  # such a conversation spoke of the walk's own figures
        group = next((group for group in grouped(sites_of(lineages))[0] if group.name == name), None)
    now = group_of(name, group.cited, sites) if group is not None else None
    if group is None or now is None:
        pytest.fail(f"no lineage has the transitions of {name} any more: lift the new ones", pytrace=False)
    end = noted(kept, LIFTED, NOT_LIFTED)
    if end is None:
        pytest.skip("the conversation was not brought to its end")
    if end.topic == NOT_LIFTED and is_followed(kept, name):
        pytest.skip("a later conversation of the group has made the card; what stood in the way may be gone")
    try:
        done = lift(group, replaying(kept))
    except KlineageError as error:
        pytest.fail(str(error), pytrace=False)
    assert (done.card is not None) == (end.topic == LIFTED)
    if done.card is not None:
        made = as_lifted(with_effect_of_step(done.card, timed))
        stored = [card for card in find_cards(skills) if as_lifted(card) == made]
        assert stored, f"{done.card.name} is another card than is kept"
        if why := no_longer_holds(group, now):
            held = [card.name for card in stored if card.status is not CardStatus.RETIRED]
            assert not held, f"{why}: retire {', '.join(held)}, and lift what pays again"


def is_followed(kept: Path, group: str) -> bool:
    """Whether a later conversation about the group is kept as well."""
    names = [path.stem for path in kept.parent.glob(f"{group}*.jsonl")]
    return kept.stem == group and any(name != group for name in names)


def as_lifted(card: SkillCard) -> SkillCard:
    """The card as it was before anything was tried with it, whatever number its name has got.

    The digests of its lineages are those of that day: a lineage that gains a step afterwards has another one.
    """
    provenance = {name: said for name, said in card.provenance.items() if not name.startswith("lineage ")}
    return msgspec.structs.replace(card, name="card", status=CardStatus.CANDIDATE, log=(), provenance=provenance)
