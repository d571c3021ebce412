"""A lineage, a card, an admission, each in one call: what the suites' sessions and the commands both do."""

from __future__ import annotations

import itertools
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError, Waiting, WaitsForVerdict
from pytest_klineage.gate.host.cpu import flags_here
from pytest_klineage.lab.induction.admit import REPAIRS, Compare, basis, problem_with, roundtrip, settled
from pytest_klineage.lab.induction.admit_store import read_trial, save_trial, trial_folders, tried
from pytest_klineage.lab.induction.admit_targets import TRIALS, AdmissionTarget, Shapes, targets_for
from pytest_klineage.lab.induction.derive import unnamed
from pytest_klineage.lab.induction.lift import Lift, lift
from pytest_klineage.lab.induction.lift_groups import Group
from pytest_klineage.lab.induction.lineage_store import induce, trajectory_settings
from pytest_klineage.lab.induction.verdicts import Judge, VerdictFile
from pytest_klineage.lab.induction.walk import WalkOrigin, WalkSettings
from pytest_klineage.lab.library.cards import find_cards, read_card, untried, with_trials, write_card
from pytest_klineage.lab.library.experts import Expert
from pytest_klineage.lab.library.lineages import (
    FOLDER,
    HAND_MADE,
    LINEAGE_FILE,
    StoredLineage,
    find_all,
    load_lineage,
    verify_lineage,
)
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.instructions import instructions_for
from pytest_klineage.lab.plugin import Models
from pytest_klineage.operators import paper_case
from pytest_klineage.records import CardStatus, KernelCase, KernelSource, SkillCard, Verdict

LIFTS = "lifts"
"""Folder beside the cards that keeps the conversations of lifting."""
INSTRUCTION_SETS = (
    "avx2", "fma", "avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_vnni", "avx512_bf16", "amx_tile",
)  # fmt: skip
"""Words of /proc/cpuinfo that a writer of CPU kernels asks for."""
Report = Callable[[str], None]


def verified_lineages(experts: Path) -> list[StoredLineage]:
    """Every lineage below a folder, walked or hand-made. Raises BrokenLineage for one that does not hold together."""
    found = [load_lineage(folder) for folder in find_all(experts)]
    for stored in found:
        verify_lineage(stored)
    return found


def expert_name(expert: Expert) -> str:
    """How trajectories and tests call an expert's folder, such as gemm-cpu-cpp."""
    return f"{expert.operator}-{expert.platform}-{expert.surface.value}"


def walk_origin(expert: Expert, platform: str, machine: str) -> WalkOrigin:
    """Where an expert's walk begins, at the paper's case. `machine` is a line for the contract.

    Where an author's lineage ends at a kernel of that case alone, it is that one, without the header and the name that
    say its techniques: an expert of many shapes has more code than they need.
    """
    case, hand_made = paper_case(expert.operator, "cpu" if platform == "cpu" else "gpu"), expert.directory / HAND_MADE
    source = expert.source("expert")
    if (hand_made / LINEAGE_FILE).exists() and (stored := load_lineage(hand_made)).lineage.case.id == case.id:
        source = unnamed(stored.sources[-1])
    contract = instructions_for(
        case, source.surface, platform, source.entry, source.flags, machine=machine,
        reference="another kernel for the same case",
    )  # fmt: skip
    name = f"{expert.operator}/{expert.platform}-{expert.surface.value}"
    return WalkOrigin(case=case, platform=platform, source=source, contract=contract, name=name)


def make_lineage(
    origin: WalkOrigin, expert: Expert, models: Models, judge: Judge, report: Report, kept: Path | None = None
) -> StoredLineage:
    """Walk backward from an expert; keep in `kept`, else beside it, what was validated. Raises what `induce` raises."""
    settings = trajectory_settings(origin, WalkSettings())
    session = models.session(f"lineage/{expert_name(expert)}", settings=settings)
    return induce(origin, session, judge, kept or expert.directory / FOLDER, report=report)


def lift_group(group: Group, skills: Path, models: Models) -> Lift:
    """Ask a model for the card of a group; write the card, and the conversation in any case.

    One about a kernel of others has that kernel's text, and stays where the trajectories are.
    """
    taken = {card.name for card in _cards(skills)}
    session = models.session(f"lift/{group.name}", settings={"group": group.name, "steps": group.cited})
    done = lift(group, session, taken=taken)
    session.close()
    if not any(site.lineage.source for site in group.sites):
        _keep(session, skills / LIFTS, group.name)
    if done.card is not None:
        write_card(skills, _claimed(skills, done.card))
    return done


def card_of(group: Group, skills: Path) -> SkillCard | None:
    """The card that was lifted from a group's transitions, or from its very span, if there is one that still holds."""
    spans = {site.span for site in group.sites if len(site.span) > 1}
    cited = {site.transition.digest for site in group.sites}

    def is_of(card: SkillCard) -> bool:
        if spans or len(card.effect.span) > 1:
            return card.effect.span in spans
        return bool(cited & {item.transition for item in card.evidence})

    return next((card for card in _cards(skills) if card.status is not CardStatus.RETIRED and is_of(card)), None)


def read_shapes(path: Path, platform: str) -> Shapes:
    """Shapes to try cards at on a platform, by operator, from a table such as suites/admission/targets.toml.

    Raises UsageError for a file that cannot be read.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a table of shapes: {error}") from error
    return {name: [tuple(shape) for shape in shapes] for name, shapes in table.get(platform, {}).items()}


def open_targets(
    folder: Path, lineages: Sequence[StoredLineage], shapes: Mapping[str, Sequence[tuple[int, ...]]], platform: str
) -> list[AdmissionTarget]:
    """Where a card can still be tried on this platform; none by a rule whose trials are all made."""
    trials = [read_trial(path) for path in trial_folders(folder)]
    done, made = tried(trials), Counter(trial.target.rule for trial in trials)
    found = targets_for(read_card(folder), lineages, shapes)
    return [
        target for target in found
        if target.name not in done and target.platform == platform and made[target.rule] < TRIALS[target.rule]
    ]  # fmt: skip


def admit_card(
    folder: Path, targets: Iterable[AdmissionTarget], lineages: list[StoredLineage], models: Models, compare: Compare,
    machine: str, report: Report, *, repairs: int = REPAIRS, quickly: Compare | None = None,
) -> list[str]:  # fmt: skip
    """Try a card on open targets, as often as each rule says; all trials go forward together. Returns how each ended.

    quickly: judges a state that only has to be right there; `compare` when it is None.
    Every trial is stored beside the card and written into its log. Raises Waiting once every trial has got as far as
    it gets, and KlineageError for what else ends a trial without an outcome: resume the trajectory then.
    """
    left = Counter(TRIALS) - Counter(read_trial(path).target.rule for path in trial_folders(folder))
    attempts, waits = list[str](), list[Waiting]()
    for target in targets:
        if not left[target.rule]:
            continue
        try:
            done = _attempt(folder, target, lineages, models, compare, machine, report, repairs, quickly or compare)
        except Waiting as waiting:
            waits.append(waiting)
        else:
            if done is None:
                continue
            attempts.append(done)
            report(done)
        left[target.rule] -= 1
    if waits:
        raise waits[0]
    return attempts


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets of this CPU for a contract, where the system says so."""
    return tuple(name for name in INSTRUCTION_SETS if name in flags_here())


def _attempt(
    folder: Path, target: AdmissionTarget, lineages: list[StoredLineage], models: Models, compare: Compare,
    machine: str, report: Report, repairs: int, quickly: Compare,
) -> str | None:  # fmt: skip
    """One trial: held, stored, and written into the card's log. Returns how it ended, None for a target of no use.

    The verdict on the state and the first prompt are asked for in one turn; so is the verdict on the model's kernel,
    where what is expected of it is known.
    """
    card = untried(read_card(folder))
    verdict: Verdict | None = None
    waits: WaitsForVerdict | None = None
    try:
        verdict = basis(target, compare if target.after is not None else quickly)
    except WaitsForVerdict as waiting:
        waits = waiting
    if verdict is not None:
        if problem := problem_with(target, verdict):
            report(problem)
            return None
        target = settled(target, verdict)
    name = f"admission/{card.name}/{target.name}"
    session = models.session(name, settings={"card": card.name, "target": target.name, "repairs": str(repairs)})
    verdicts = VerdictFile(models.path(name).with_suffix(".verdicts.jsonl"))

    def judged(case: KernelCase, source: KernelSource, against: KernelSource) -> Verdict:
        if waits is not None and target.expected is None:
            raise waits
        found = compare(case, source, against)
        if waits is not None:
            raise waits
        verdicts.append(found)
        return found

    done = roundtrip(card, target, session, judged, repairs=repairs, machine=machine)
    if waits is not None:
        raise waits
    session.close()
    if done.trial is None:
        return f"{done.message}; go on with --klineage-resume={name}"
    save_trial(
        folder, card.name, done, trajectory=session.trajectory.path, verdicts=verdicts.path, basis=verdict,
        lineages=lineages,
    )  # fmt: skip
    write_card(folder.parent, with_trials(read_card(folder), [done.trial]))
    return f"{done.message} (${done.spent_usd:.2f})"


def _cards(skills: Path) -> list[SkillCard]:
    return find_cards(skills) if skills.is_dir() else []


def _claimed(skills: Path, card: SkillCard) -> SkillCard:
    """The card under a name whose folder is new: groups may be lifted side by side."""
    for number in itertools.count(1):
        name = _numbered(card.name, number)
        if not (skills / name).exists():
            (skills / name).mkdir(parents=True)
            return msgspec.structs.replace(card, name=name)
    raise AssertionError("numbers do not end")


def _numbered(name: str, number: int) -> str:
    """The name, or from the second on the name with its number."""
    return name if number == 1 else f"{name}-{number}"


def _keep(session: Session, folder: Path, name: str) -> None:
    """Copy the conversation to where it is committed; earlier ones of the group stay."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{name}*.jsonl"))) + 1
    shutil.copyfile(session.trajectory.path, folder / f"{_numbered(name, number)}.jsonl")
