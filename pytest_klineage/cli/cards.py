"""`pytest-klineage cards`: list, show, lint and diff cards, in at most 100 columns; `lift` and `admit` write them."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_klineage.cli.console import FAILED, OK, Commands, add_group, say, say_all, say_table, write_to
from pytest_klineage.cli.making import add_lift_and_admit
from pytest_klineage.errors import UsageError
from pytest_klineage.report.text import WIDTH, counted, shortened, wrapped

if TYPE_CHECKING:
    from pytest_klineage.lab.library.lint import LintFinding
    from pytest_klineage.records import Lineage, SkillCard

SKILLS, EXPERTS = Path("skills"), Path("experts")
EXIT_CODES = """\
exit codes:
  0  done; for lift and admit: every card was made, or admitted; for lint: nothing is wrong;
     for diff: the cards are the same
  1  for lift and admit: some were not; for lint: a card has errors (or warnings, where they count);
     for diff: the cards differ
  2  the command line, or what it names, is not valid
  8  for lift and admit: a prompt waits for its reply; the same command goes on
"""
HEADERS = ("card", "status", "category", "effect", "verified on")


def add_cards(commands: Commands) -> None:
    """Add the command `cards` with its own commands."""
    actions = add_group(commands, "cards", "list, show, lift, admit, lint and compare skill cards", EXIT_CODES)
    listing = actions.add_parser("list", help="one line for every card")
    listing.add_argument("--status", choices=("candidate", "admitted", "retired"), help="only cards of this status")
    listing.set_defaults(command=run_list)

    show = actions.add_parser("show", help="a card as people read it, or as a prompt or a program gets it")
    show.add_argument("name", metavar="NAME", help="a card's name")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--prompt", action="store_true", help="the nine fields as they go into a prompt")
    form.add_argument("--trials", action="store_true", help="its verification log: what was tried where, how it ended")
    form.add_argument("--json", action="store_true", help="the record")
    show.set_defaults(command=run_show)

    lint = actions.add_parser("lint", help="say what is wrong with cards")
    lint.add_argument("names", metavar="NAME", nargs="*", help="names of cards; all of them without any")
    lint.add_argument("--strict", action="store_true", help="warnings make the command fail, too")
    lint.add_argument(
        "--update-effects", action="store_true", help="first take the speedups of steps that were timed again"
    )
    lint.add_argument(
        "--experts",
        metavar="DIR",
        type=Path,
        action="append",
        help="where lineages are; repeatable, for outlines of others' kernels; default: experts",
    )
    lint.set_defaults(command=run_lint)

    add_lift_and_admit(actions, SKILLS)
    diff = actions.add_parser("diff", help="what differs between two cards")
    diff.add_argument("one", metavar="CARD", help="a card's name, its folder, or a card.json")
    diff.add_argument("other", metavar="CARD", help="the same")
    diff.set_defaults(command=run_diff)
    for action in (listing, show, lint, diff):
        action.add_argument(
            "--skills", metavar="DIR", type=Path, default=SKILLS, help="where the cards are; default: skills"
        )


def run_list(arguments: argparse.Namespace) -> int:
    """`cards list`."""
    from pytest_klineage.lab.library.cards import find_cards

    every = find_cards(_folder(arguments.skills))
    cards = [card for card in every if arguments.status in (None, card.status.value)]
    if cards:
        say_table(HEADERS, [_row(card) for card in cards])
        say()
    admitted = sum(card.status.value == "admitted" for card in cards)
    say(f"{counted(len(cards), 'card')}, {admitted} admitted")
    return OK


def run_show(arguments: argparse.Namespace) -> int:
    """`cards show`."""
    from pytest_klineage.lab.library.cards import find_card
    from pytest_klineage.lab.library.rendering import prompt_text, skill_markdown
    from pytest_klineage.results.storage import record_json

    card = find_card(_folder(arguments.skills), arguments.name)
    if arguments.json:
        write_to(None, record_json(card).decode())
    elif arguments.prompt:
        write_to(None, prompt_text(card))
    elif arguments.trials:
        say_all(_trial_lines(card))
    else:
        say_all(_wrapped_markdown(skill_markdown(card)))
    return OK


def run_lint(arguments: argparse.Namespace) -> int:
    """`cards lint`."""
    from pytest_klineage.lab.library.cards import card_folders, readable_cards
    from pytest_klineage.lab.library.lineages import find_all
    from pytest_klineage.lab.library.lint import known_lineages, lint_folder

    skills = _folder(arguments.skills)
    folders = [_card_folder(skills, name) for name in arguments.names] or card_folders(skills)
    lineages = known_lineages(folder for root in arguments.experts or [EXPERTS] for folder in find_all(root))
    if arguments.update_effects:
        _update_effects(skills, lineages)
    others = readable_cards(skills)
    findings = [finding for folder in folders for finding in lint_folder(folder, lineages, others)]
    say_all(line for finding in findings for line in _finding_lines(finding))
    warnings = sum(finding.warning for finding in findings)
    errors = len(findings) - warnings
    say(f"{counted(len(folders), 'card')}: {counted(errors, 'error')}, {counted(warnings, 'warning')}")
    return FAILED if errors or (arguments.strict and warnings) else OK


def _update_effects(skills: Path, lineages: Mapping[str, Lineage]) -> None:
    """Write the cards again whose step was timed again since they were lifted."""
    from pytest_klineage.lab.library.cards import find_cards, write_card
    from pytest_klineage.lab.library.lint import with_effect_of_step
    from pytest_klineage.lab.library.rendering import speedup_text

    for card in find_cards(skills):
        timed = with_effect_of_step(card, lineages)
        if timed != card:
            write_card(skills, timed)
            say(f"{card.name}: {speedup_text(card.effect.speedup)}, now {speedup_text(timed.effect.speedup)}")


def run_diff(arguments: argparse.Namespace) -> int:
    """`cards diff`."""
    from pytest_klineage.results.storage import record_json

    one, other = (_card_at(arguments.skills, name) for name in (arguments.one, arguments.other))
    lines = list(
        difflib.unified_diff(
            record_json(one).decode().splitlines(), record_json(other).decode().splitlines(),
            arguments.one, arguments.other, lineterm="",
        )
    )  # fmt: skip
    say_all(part for line in lines for part in _wrapped(line, "    "))
    return FAILED if lines else OK


def _row(card: SkillCard) -> list[str]:
    from pytest_klineage.lab.library.rendering import speedup_text

    where = dict.fromkeys(f"{at.operator}/{at.platform}-{at.surface.value}" for at in card.verified)
    effect = speedup_text(card.effect.speedup) if card.effect.speedup is not None else "-"
    return [
        shortened(card.name, 30), card.status.value, card.category.value, effect, shortened(", ".join(where), 22)
    ]  # fmt: skip


def _trial_lines(card: SkillCard) -> Iterable[str]:
    """The card's state in a line, then every trial with its place, its outcome, its figures and its note."""
    from pytest_klineage.lab.library.rendering import context_text, speedup_text

    won = f"{len(card.successes)} held out and won"
    yield f"{card.name}: {card.status.value}, {counted(len(card.log), 'trial')}, {won}"
    for number, trial in enumerate(card.log, start=1):
        code = f" ({trial.code.value})" if trial.code is not None else ""
        where = f"{context_text(trial.context)}{'' if trial.held_out else ', not held out'}"
        yield from _wrapped(f"{number:3d}. {trial.outcome.value}{code} on {where}", "     ")
        facts = [speedup_text(trial.speedup) if trial.speedup is not None else "", trial.tried_at, trial.method]
        facts += [trial.source_digest[:12], "imported" if trial.imported else f"rule: {trial.rule.value}"]
        for text in ("; ".join(fact for fact in facts if fact), trial.note):
            yield from (_wrapped(f"     {text}", "     ") if text else ())


def _finding_lines(finding: LintFinding) -> list[str]:
    kind = "warning" if finding.warning else "error"
    return _wrapped(f"{finding.card}: {kind}: {finding.rule.value}: {finding.message}", "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=False, replace_whitespace=False
    ) or [text]


def _wrapped_markdown(text: str) -> Iterable[str]:
    """Lines of at most 100 columns where they are prose; code stays as it is, since a broken line is other code."""
    fence = ""
    for line in text.splitlines():
        run = line[: len(line) - len(line.lstrip("`"))]
        if len(run) >= 3 and (not fence or run == fence == line):
            fence = "" if fence else run
            yield line
        elif fence or len(line) <= WIDTH:
            yield line
        else:
            yield from wrapped(line, indent="  ")


def _folder(skills: Path) -> Path:
    if not skills.is_dir():
        raise UsageError(f"{skills} is not a folder; say where the cards are with --skills")
    return skills


def _card_folder(skills: Path, name: str) -> Path:
    from pytest_klineage.errors import UnknownName
    from pytest_klineage.lab.library.cards import card_folders

    folders = {folder.name: folder for folder in card_folders(skills)}
    if name not in folders:
        raise UnknownName("card", name, folders)
    return folders[name]


def _card_at(skills: Path, name: str) -> SkillCard:
    """A card by its folder or file where there is one, else by its name."""
    from pytest_klineage.lab.library.cards import CARD_FILE, find_card, read_card

    path = Path(name)
    if path.name == CARD_FILE and path.is_file():
        return read_card(path.parent)
    if (path / CARD_FILE).is_file():
        return read_card(path)
    return find_card(_folder(skills), name)
