"""From committed lineages to candidate cards, one test per group of transitions.

With a language model every group that has no card yet is lifted, and what was said is kept in <skills>/lifts. With
--klineage-llm=replay the kept conversations are held to the cards that they have made.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Not after the package's imports: it lies beside this file.
from shelf import begun_of, noted, verified_lineages  # isort: skip

from pytest_klineage.errors import KlineageError
from pytest_klineage.lab.induction.lift import LIFTED, NOT_LIFTED, lift
from pytest_klineage.lab.induction.lift_groups import Group, grouped, sites_of
from pytest_klineage.lab.library.cards import find_cards, write_card
from pytest_klineage.lab.llm import Session
from pytest_klineage.lab.plugin import Models
from pytest_klineage.records import CardStatus, SkillCard

LIFTS = "lifts"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every group, and one for every kept conversation."""
    config = metafunc.config
    if "group" in metafunc.fixturenames:
        groups, _ = grouped(sites_of(verified_lineages(config.getoption("--admission-experts"))))
        metafunc.parametrize("group", groups, ids=[group.name for group in groups])
    if "kept" in metafunc.fixturenames:
        kept = sorted((config.getoption("--admission-skills") / LIFTS).glob("*.jsonl"))
        metafunc.parametrize("kept", kept, ids=[path.stem for path in kept])


def test_lift(
    group: Group,
    skills: Path,
    klineage_models: Models,
    needs: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """A model makes a candidate card of the group, and every check of what it wrote passes."""
    needs("model")
    cards = find_cards(skills) if skills.is_dir() else []
    if (known := card_of(group, cards)) is not None:
        pytest.skip(f"lifted already: {known.name}; remove its folder to lift it anew")
    session = klineage_models.session(f"lift/{group.name}", settings={"group": group.name})
    done = lift(group, session, taken={card.name for card in cards})
    say(f"{done.told} (${session.budget.spent_usd:.2f})")
    session.close()
    keep(session, skills / LIFTS, group.name)
    if done.card is None:
        pytest.fail(done.told, pytrace=False)
    write_card(skills, claimed(skills, done.card))


def test_replayed_lift(
    kept: Path, skills: Path, lineages: list[object], needs: Callable[[str], None],
    replaying: Callable[[Path], Session],
) -> None:  # fmt: skip
    """What was said still makes the very card that is kept, or still makes none."""
    needs("replay")
    groups, _ = grouped(sites_of(lineages))  # type: ignore[arg-type]
    name = begun_of(kept).settings["group"]
    group = next((group for group in groups if group.name == name), None)
    if group is None:
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
        assert as_lifted(done.card) in [as_lifted(card) for card in find_cards(skills)]


def is_followed(kept: Path, group: str) -> bool:
    """Whether a later conversation about the group is kept as well."""
    names = [path.stem for path in kept.parent.glob(f"{group}*.jsonl")]
    return kept.stem == group and any(name != group for name in names)


def card_of(group: Group, cards: Iterable[SkillCard]) -> SkillCard | None:
    """The card that was lifted from these transitions."""
    cited = {site.transition.digest for site in group.sites}
    return next((card for card in cards if cited & {item.transition for item in card.evidence}), None)


def claimed(skills: Path, card: SkillCard) -> SkillCard:
    """The card under a name whose folder is new: groups may be lifted side by side."""
    numbers = itertools.count(1)
    while (skills / (name := numbered(card.name, next(numbers)))).exists():
        pass
    (skills / name).mkdir(parents=True)
    return msgspec.structs.replace(card, name=name)


def numbered(name: str, number: int) -> str:
    """The name, or from the second on the name with its number."""
    return name if number == 1 else f"{name}-{number}"


def as_lifted(card: SkillCard) -> SkillCard:
    """The card as it was before anything was tried with it, whatever number its name has got."""
    return msgspec.structs.replace(card, name="card", status=CardStatus.CANDIDATE, log=())


def keep(session: Session, folder: Path, name: str) -> None:
    """Copy the conversation to where it is committed; earlier ones of the group stay."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{name}*.jsonl"))) + 1
    shutil.copyfile(session.trajectory.path, folder / f"{numbered(name, number)}.jsonl")
