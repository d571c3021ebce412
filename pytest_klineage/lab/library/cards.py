"""Cards on disk: skills/<name>/card.json and SKILL.md; reading, writing, finding, and what a trial changes.

card.json is the record, SKILL.md the same card rendered; `lint` compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.lineages import read_json
from pytest_klineage.lab.library.normalise import held_out
from pytest_klineage.lab.library.rendering import NAME, NAME_LIMIT, skill_markdown
from pytest_klineage.records import (
    AdmissionRule,
    CardStatus,
    Category,
    Context,
    Evidence,
    Lineage,
    SkillCard,
    Trial,
)
from pytest_klineage.results.storage import record_json, write_atomically

CARD_FILE = "card.json"
SKILL_FILE = "SKILL.md"


def write_card(skills: Path, card: SkillCard) -> Path:
    """Write both forms of a card to its folder below skills/, and return the folder.

    Raises UsageError for an invalid name, and when writing fails.
    """
    check_name(card.name)
    directory = skills / card.name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / CARD_FILE, record_json(card))
        write_atomically(directory / SKILL_FILE, skill_markdown(card).encode())
    except OSError as error:
        raise UsageError(f"the card {directory} cannot be written: {error.strerror or error}") from error
    return directory


def read_card(directory: Path) -> SkillCard:
    """The card of a folder. Raises UsageError without one, BadRecord with the file's name when it is damaged."""
    return read_json(directory / CARD_FILE, SkillCard)


def card_folders(skills: Path) -> list[Path]:
    """Folders below skills/ that hold either form of a card, sorted by name."""
    return sorted({path.parent for name in (CARD_FILE, SKILL_FILE) for path in skills.glob(f"*/{name}")})


def find_cards(skills: Path) -> list[SkillCard]:
    """All cards below skills/, by name. Raises UsageError or BadRecord for one that cannot be read."""
    return [read_card(folder) for folder in card_folders(skills)]


def readable_cards(skills: Path) -> list[SkillCard]:
    """The cards below skills/ that can be read, by name."""
    found = []
    for folder in card_folders(skills):
        with suppress(UsageError):
            found.append(read_card(folder))
    return found


def find_card(skills: Path, name: str) -> SkillCard:
    """The card of that name. Raises UnknownName, which lists the cards that are there."""
    folders = {folder.name: folder for folder in card_folders(skills)}
    if name not in folders:
        raise UnknownName("card", name, folders)
    return read_card(folders[name])


def origin_of(lineage: Lineage, index: int) -> tuple[Evidence, Context]:
    """What a card that is lifted from transition `index` of a sealed lineage cites, and where that transition is."""
    done = lineage.done_before(index)
    context = Context(
        operator=lineage.operator, shape=dict(lineage.case.shape), dtype=lineage.case.dtype, surface=lineage.surface,
        platform=lineage.platform, prior=tuple(category for category in Category if category in done),
    )  # fmt: skip
    return Evidence(lineage.name, lineage.transitions[index].digest), context


def with_trials(card: SkillCard, trials: Iterable[Trial]) -> SkillCard:
    """The card with more trials in its log: held out or not as its origins say, and admitted by the first success.

    Failed trials are kept. A retired card stays retired.
    """
    judged = [msgspec.structs.replace(trial, held_out=_is_held_out(trial, card)) for trial in trials]
    logged = msgspec.structs.replace(card, log=(*card.log, *judged))
    if logged.status is CardStatus.CANDIDATE and logged.successes:
        return msgspec.structs.replace(logged, status=CardStatus.ADMITTED)
    return logged


def _is_held_out(trial: Trial, card: SkillCard) -> bool:
    """Another language alone says where a card works, and admits none."""
    return trial.rule is not AdmissionRule.LANGUAGE and held_out(trial.context, card.origins)


def untried(card: SkillCard) -> SkillCard:
    """The card as it was before anything was tried with it."""
    return msgspec.structs.replace(card, status=CardStatus.CANDIDATE, log=())


def check_name(name: str) -> None:
    """Raises UsageError unless the name can be that of a card and its folder."""
    if len(name) > NAME_LIMIT or not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a card: lowercase letters, digits and single hyphens, at most {NAME_LIMIT}"
        )
