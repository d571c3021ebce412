"""`lineage make`, `cards lift` and `cards admit`: a model and the gate make what the other commands show."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_klineage.cli.console import FAILED, OK, Commands, say
from pytest_klineage.cli.gating import add_gate_options, add_options, given, given_settings
from pytest_klineage.errors import UnknownName, Waiting

if TYPE_CHECKING:
    from pytest_klineage.gate import Gate
    from pytest_klineage.lab.library.experts import Expert
    from pytest_klineage.lab.library.lineages import StoredLineage
    from pytest_klineage.lab.plugin import Models

WAITS = 8
NO_SCREEN = ("screen",)


def add_make(actions: Commands, experts: Path) -> None:
    """Add `lineage make`."""
    make = actions.add_parser("make", help="walk an expert backward with a model, each step judged; keeps the lineage")
    make.add_argument("names", metavar="EXPERT", nargs="+", help="its folder's name, such as gemm/cpu-cpp")
    make.add_argument(
        "--experts", metavar="DIR", type=Path, default=experts, help="where experts are; default: experts"
    )
    add_gate_options(make)
    _add_model(make)
    make.set_defaults(command=run_make)


def add_lift_and_admit(actions: Commands, skills: Path) -> None:
    """Add `cards lift` and `cards admit`."""
    lift = actions.add_parser("lift", help="have a model write candidate cards of the transitions that have none")
    lift.add_argument("names", metavar="GROUP", nargs="*", help="groups of transitions; all without a card by default")
    lift.set_defaults(command=run_lift)
    admit = actions.add_parser("admit", help="try candidates on held-out targets, each trial judged and kept")
    admit.add_argument("names", metavar="NAME", nargs="*", help="names of candidates; all of them by default")
    admit.add_argument(
        "--targets", metavar="FILE", type=Path, default=Path("suites/admission/targets.toml"),
        help="shapes to try cards at, by platform and operator; default: suites/admission/targets.toml",
    )  # fmt: skip
    admit.set_defaults(command=run_admit)
    for action in (lift, admit):
        action.add_argument(
            "--skills", metavar="DIR", type=Path, default=skills, help="where cards are; default: skills"
        )
        action.add_argument(
            "--experts", metavar="DIR", type=Path, default=Path("experts"), help="where lineages are; default: experts"
        )
        _add_model(action)
    add_gate_options(admit)


def run_make(arguments: argparse.Namespace) -> int:
    """`lineage make`."""
    from pytest_klineage.lab.induction.verdicts import GateJudge
    from pytest_klineage.lab.library.experts import find_experts
    from pytest_klineage.lab.making import instruction_sets, make_lineage, walk_origin
    from pytest_klineage.lab.optimizers.instructions import machine_text

    def one(expert: Expert, gate: Gate, models: Models) -> bool:
        features = instruction_sets() if gate.platform == "cpu" else ()
        machine = machine_text(gate.machine(), threads=gate.settings.threads, features=features)
        origin = walk_origin(expert, gate.platform, machine)
        lineage = make_lineage(origin, expert, models, GateJudge(gate), say).lineage
        say(f"{lineage.name}: {len(lineage.transitions)} steps, {lineage.termination}: {lineage.termination_reason}")
        return lineage.complete

    with _gate(arguments) as gate, _models(arguments) as models:
        known = {str(expert.directory.relative_to(arguments.experts)): expert
                 for expert in find_experts(arguments.experts, gate.platform)}  # fmt: skip
        chosen = [_named("expert of this platform", name, known) for name in arguments.names]
        return _each(chosen, lambda expert: one(expert, gate, models))


def run_lift(arguments: argparse.Namespace) -> int:
    """`cards lift`."""
    from pytest_klineage.lab.induction.lift_groups import grouped, sites_of, timed_sites
    from pytest_klineage.lab.making import card_of, lift_group, verified_lineages

    # A recorded conversation spoke of the walk's own figures.
    sites = sites_of if given(arguments, "llm") == "replay" else timed_sites
    groups, skipped = grouped(sites(verified_lineages(arguments.experts)))
    known = {group.name: group for group in groups}
    chosen = [_named("group of transitions", name, known) for name in arguments.names]
    for each in skipped if not chosen else ():
        say(f"makes no card: {each.site.position}: {each.reason}")
    todo = chosen or [group for group in groups if card_of(group, arguments.skills) is None]
    with _models(arguments) as models:

        def one(group: Any) -> bool:
            done = lift_group(group, arguments.skills, models)
            say(done.summary)
            return done.card is not None

        return _each(todo, one)


def run_admit(arguments: argparse.Namespace) -> int:
    """`cards admit`."""
    from pytest_klineage.lab.induction.verdicts import GateJudge, judged_in_peace
    from pytest_klineage.lab.library.cards import card_folders, read_card
    from pytest_klineage.lab.making import admit_card, open_targets, read_shapes, verified_lineages
    from pytest_klineage.lab.optimizers.instructions import machine_text
    from pytest_klineage.records import CardStatus

    lineages: list[StoredLineage] = verified_lineages(arguments.experts)
    folders = {folder.name: folder for folder in card_folders(arguments.skills)}
    candidates = [name for name, folder in folders.items() if read_card(folder).status is CardStatus.CANDIDATE]
    chosen = [_named("card", name, folders) for name in arguments.names or candidates]
    with _gate(arguments) as gate, _models(arguments) as models:
        shapes = read_shapes(arguments.targets, gate.platform)
        machine, judge = machine_text(gate.machine(), threads=gate.settings.threads), GateJudge(gate)

        def one(folder: Path) -> bool:
            targets = open_targets(folder, lineages, shapes, gate.platform)
            if not targets:
                say(f"{folder.name}: no target is left to try it on")
            admit_card(
                folder, targets, lineages, models,
                lambda case, source, against: judged_in_peace(judge, case, source, against), machine,
                lambda line: say(f"{folder.name}: {line}"),
            )  # fmt: skip
            return read_card(folder).status is CardStatus.ADMITTED

        return _each(chosen, one)


def _each(items: list[Any], one: Callable[[Any], bool]) -> int:
    """Do it for every item, also after one that waits: WAITS where any does, else FAILED where one came to nothing."""
    done, waits = True, False
    for item in items:
        try:
            done = one(item) and done
        except Waiting as waiting:
            say(f"waits: {waiting}")
            waits = True
    return WAITS if waits else OK if done else FAILED


def _named(kind: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UnknownName(kind, name, known)
    return known[name]


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Those that choose the model."""
    from pytest_klineage.lab.plugin import OPTIONS

    add_options(parser.add_argument_group("the model"), [one for one in OPTIONS if one.name not in NO_SCREEN])


@contextmanager
def _gate(arguments: argparse.Namespace) -> Iterator[Gate]:
    from pytest_klineage.gate import Gate
    from pytest_klineage.gate.host.platforms import resolve_platform

    with Gate(resolve_platform(given(arguments, "platform")), given_settings(arguments)) as gate:
        yield gate


@contextmanager
def _models(arguments: argparse.Namespace) -> Iterator[Models]:
    """Models as the options choose them; trajectories and prompts wait in folders, as with pytest."""
    import tempfile

    from pytest_klineage.lab.plugin import OPTIONS, PATHS, Models

    values = {option.name: given(arguments, option.name) for option in OPTIONS if option.name not in NO_SCREEN}
    settings = {
        name: Path(value).absolute() if name in PATHS else value for name, value in values.items() if value is not None
    }
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(
            settings, trajectories=Path("results/trajectories").absolute(), replays=lambda: Path(scratch),
            in_turns=settings.get("llm") == "exchange",
        )  # fmt: skip
        try:
            yield models
        finally:
            models.close()
