"""The whole report from what was read: which sections there are, and what is missing with the command that makes it."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_klineage.report.collect import Material
from pytest_klineage.report.curves import cost_section, lineage_section, step_section
from pytest_klineage.report.details import card_block, reply_block, state_blocks
from pytest_klineage.report.document import Absent, Details, Headline, RecordedText, Report, Section, UnreadableInput
from pytest_klineage.report.outcomes import (
    GENERATED_ONLY,
    RECOVERY,
    Attempt,
    Result,
    attempts,
    beside_a_kernel,
    held_out,
    in_order,
    optimizations,
    results,
    several_languages,
)
from pytest_klineage.report.paper import with_paper
from pytest_klineage.report.paper_sections import (
    GENERATED,
    card_section,
    generated_section,
    held_out_section,
    recovery_section,
)
from pytest_klineage.report.speedups import latency_section, mean_table, records_section, setup_section, speedup_section
from pytest_klineage.report.steps import Optimization
from pytest_klineage.report.text import counted

COMMANDS = {
    "speedups": ("Speedups and latencies (Figure 3, Table 5)", "pytest suites/main_tier --platform cpu"),
    "languages": ("Latency by language (Table 6)", "pytest suites/main_tier --platform sm90"),
    "cost": (
        "Running best over cost and step trajectories (Figures 4 and 6)",
        "pytest suites/head_to_head --platform cpu",
    ),
    "lineages": ("Deoptimization traces (Figure 5)", "pytest-klineage report experts ..., after pytest suites/lineage"),
    "cards": ("Skill cards (Table 8)", "pytest-klineage report skills ..., after pytest suites/admission"),
    "recovery": ("Roundtrip recovery (Table 3)", "pytest suites/ablations/test_roundtrip_recovery.py --platform cpu"),
    "generated-only": ("Generated only (Table 4)", "pytest suites/ablations/test_generated_only.py --platform cpu"),
    "held-out": ("Held-out instances (Tables 7 and 9)", "pytest suites/flaggems --platform sm90"),
}
"""By section: what it shows, and what makes its records."""


SUITES = "suites/"
"""Where the tests of the paper's tables lie; the start of their node ids."""


def assemble(material: Material, *, beside_paper: bool = False) -> Report:
    """Everything that the records tell; `beside_paper` adds the paper's values, labelled with their device."""
    optimized = in_order(optimizations(material))
    every = attempts(material.runs, optimized)
    main = results(one for one in every if not (one.study or held_out(one) or beside_a_kernel(one)))
    details = Details(
        kernels=_kernels(material, optimized), cards={one.name: card_block(one) for one in material.cards}
    )
    sections = [
        *_speedups(main, details),
        *_optimizations(optimized, details),
        *([lineage_section(material.lineages, details)] if material.lineages else []),
        *([card_section(material.cards, details)] if material.cards else []),
        *_paper_sections(every, main, details),
        *([records_section(material.runs, details)] if any(run.records for run in material.runs) else []),
        *_setup(every, material),
    ]
    return Report(
        title="Kernels under the gate",
        summary=_summary(main, material),
        sections=tuple(map(with_paper, sections) if beside_paper else sections),
        absent=tuple(_absent({section.key for section in sections}, main)) if _of_the_paper(material) else (),
        problems=(*material.problems, *_missing_lineages(material)),
        details=tuple(details.found.values()),
        sources=tuple(_sources(material)),
    )


def _speedups(main: Sequence[Result], details: Details) -> list[Section]:
    if not main:
        return []
    return [speedup_section(main, details), latency_section(main)]


def _optimizations(found: Sequence[Optimization], details: Details) -> list[Section]:
    shown = [one for one in found if one.steps]
    return [cost_section(shown, details), step_section(shown, details)] if shown else []


def _kernels(material: Material, optimized: Sequence[Optimization]) -> dict[str, tuple[RecordedText, ...]]:
    """Texts of kernels by source digest: states of lineages, and replies."""
    found: dict[str, tuple[RecordedText, ...]] = {
        step.source_digest: (reply_block(step),) for one in optimized for step in one.steps if step.reply
    }
    for read in material.lineages:
        found |= state_blocks(read)
    return found


def _paper_sections(every: Sequence[Attempt], main: Sequence[Result], details: Details) -> list[Section]:
    recovery = [one for one in every if one.study == RECOVERY]
    sections = [recovery_section(recovery)] if recovery else []
    apart = any(one.study == GENERATED_ONLY for one in every)
    compared = results(one for one in every if one.study) if apart else main
    if any(one.best.method == GENERATED for one in compared):
        sections.append(generated_section(compared))
    instances = results(one for one in every if held_out(one))
    return sections + ([held_out_section(instances, details)] if instances else [])


def _setup(every: Sequence[Attempt], material: Material) -> list[Section]:
    verdicts = [one.verdict for one in every if one.verdict is not None]
    verdicts += [
        state.verdict for read in material.lineages for state in read.record.states[-1:] if state.verdict is not None
    ]
    return [setup_section(verdicts)] if verdicts else []


def _summary(main: Sequence[Result], material: Material) -> tuple[Headline, ...]:
    lines = []
    for device, method, language, mean, coverage, reached in mean_table(main).rows:
        value = "no mean" if mean.order is None else mean.text
        rests_on = f"{coverage.text} scored, {reached.text} at or above 1x; {language.text} on {device.text}"
        lines.append(Headline(value, method.text, rests_on))
    walked = [read.record for read in material.lineages if not read.record.hand_made]
    if walked:
        steps = sum(len(lineage.transitions) for lineage in walked)
        lines.append(Headline(str(steps), "validated steps", f"in {counted(len(walked), 'lineage')}"))
    if material.cards:
        admitted = sum(bool(card.successes) for card in material.cards)
        lines.append(
            Headline(f"{admitted}/{len(material.cards)}", "skill cards", "with a held-out trial that succeeded")
        )
    return tuple(lines)


def _of_the_paper(material: Material) -> bool:
    """Whether the paper's tables are to be expected: not of a user's own runs, which a test outside of suites/ made."""
    if material.trajectories or material.lineages or material.cards:
        return True
    return any(record.nodeid.startswith(SUITES) for run in material.runs for record in run.records)


def _absent(there: set[str], main: Sequence[Result]) -> list[Absent]:
    missing = [key for key in COMMANDS if key not in there and key != "languages"]
    if not several_languages(main):
        missing.append("languages")
    return [Absent(*COMMANDS[key]) for key in COMMANDS if key in missing]


def _missing_lineages(material: Material) -> list[UnreadableInput]:
    """Cards that rest on lineages which are not among what was read."""
    there = {read.record.name for read in material.lineages}
    absent: dict[str, list[str]] = {}
    for card in material.cards:
        for name in dict.fromkeys(item.lineage for item in card.evidence):
            if name not in there:
                absent.setdefault(name, []).append(card.name)
    return [
        UnreadableInput(f"lineage {name}", f"is not among what was read, and {_named(cards)} on it",
                f"give experts/{name}/lineage too; if it is lost, restore it from version control")
        for name, cards in absent.items()
    ]  # fmt: skip


def _named(cards: Sequence[str]) -> str:
    if len(cards) == 1:
        return f"the card {cards[0]} rests"
    return f"{len(cards)} cards rest ({', '.join(cards[:3])}{', ...' if len(cards) > 3 else ''})"


def _sources(material: Material) -> list[str]:
    lines = []
    for run in material.runs:
        when = f", started {run.info.started_at}" if run.info is not None else ""
        lines.append(f"{run.path}: {len(run.records)} verdicts{when}")
    lines += [f"{read.path}: trajectory, {len(read.events)} events" for read in material.trajectories]
    lines += [f"{read.path}: lineage, {len(read.record.states)} states" for read in material.lineages]
    return lines + ([counted(len(material.cards), "skill card")] if material.cards else [])
