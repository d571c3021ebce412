"""Tables of single studies in the paper's form: recovery, generated-only, held-out instances, cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_klineage.records import SkillCard, Trial
from pytest_klineage.report import paper
from pytest_klineage.report.aggregate import geometric_mean
from pytest_klineage.report.details import of_card
from pytest_klineage.report.document import Cell, Details, Section, Table, Tone, columns
from pytest_klineage.report.outcomes import Attempt, Result, method_order, ordered_cases
from pytest_klineage.report.speedups import speedup_bars
from pytest_klineage.report.table_cells import FAIL, NONE, NOTHING, named, share, time_cell, times, width_cell
from pytest_klineage.report.tables import interval_text

RECOVERED = 0.9
"""A trial succeeds at this share of the expert's speed, as in the paper."""
GENERATED, SKILLED = "generated-only", "klineage"
LESS = ("labels-only", "klineage-without-case", "klineage-without-language", "klineage-without-platform",
        "klineage-without-done")  # fmt: skip
"""Methods between the two: cards by name only, or one dimension of retrieval switched off."""
EFFECTS = (("tuning", "idiom", "blind"), ("card", "blind", "card"))
"""What is beyond one configuration and beyond blind tuning: two arms of suites/flaggems, the slower expected first."""


def recovery_section(found: Sequence[Attempt]) -> Section:
    """How many trials from a naive kernel came back to the expert's speed (the paper's Table 3)."""
    devices = sorted({one.device for one in found})
    kernels = list(dict.fromkeys(one.operator for one in found))
    rows = tuple(
        (Cell(paper.OPERATORS.get(kernel, kernel), kernel), *(_recovered(found, device, kernel) for device in devices))
        for kernel in kernels
    )
    foot = ((Cell("Total"), *(_recovered(found, device) for device in devices)),)
    table = Table("Recovered trials", columns("kernel", *devices, numeric=devices), rows, foot)
    text = f"A trial begins with a naive kernel and succeeds at {RECOVERED:.0%} of the expert's speed, timed beside it."
    return Section(key="recovery", title="Roundtrip recovery", text=text, tables=(table,))


def generated_section(found: Sequence[Result]) -> Section:
    """The same method without cards (the paper's Table 4)."""
    figures = ("without cards ms", "with cards ms", "slowdown")
    rows = []
    for _, device, case in ordered_cases(found):
        here = {one.best.method: one.best for one in found if (one.best.device, one.best.case_id) == (device, case)}
        skilled = here.get(SKILLED)
        rows += [
            (*map(named, (device, case, method)), _ms(here[method]), _ms(skilled), _slowdown(here[method], skilled))
            for method in method_order(here)
            if method == GENERATED or method in LESS
        ]
    heads = columns("device", "case", "method", *figures, numeric=figures)
    table = Table("Without cards", heads, tuple(rows)).condensed("device", "method")
    text = (
        "slowdown: time of the kernel made without cards over time of the one made with them, best of the runs of each."
    )
    return Section(key="generated-only", title="Generated only", text=text, tables=(table,))


def held_out_section(found: Sequence[Result], details: Details) -> Section:
    """Instances that no lineage comes from, by family and one by one (the paper's Tables 7 and 9)."""
    methods = method_order(one.best.method for one in found)
    tables = (_families(found, methods), _instances(found, methods), *_effects(found))
    text = "Speedup over the reference that the instances came with; means over successes, beside their coverage."
    figures = tuple(replace(figure, key=f"held-out-{figure.key}") for figure in speedup_bars(found, details))
    return Section(key="held-out", title="Held-out instances", text=text, figures=figures, tables=tables)


def card_section(cards: Sequence[SkillCard], details: Details) -> Section:
    """Cards with the trial that admitted each (for GDN: the paper's Table 8)."""
    names = ("card", "source", "adds", "status", "effect where it comes from", "verification evidence", "trials")
    rows = tuple(_card_row(card, details) for card in sorted(cards, key=lambda card: (_source(card), card.name)))
    admitted = sum(bool(card.successes) for card in cards)
    table = Table("Skill cards", columns(*names, numeric=("trials",)), rows)
    text = f"{admitted} of {len(cards)} cards have a held-out trial that succeeded. Open a card by its name."
    return Section(key="cards", title="Skill cards", text=text, tables=(table,))


def _recovered(found: Sequence[Attempt], device: str, kernel: str = "") -> Cell:
    """Successes of trials: a trial with several verdicts counts once, by its best."""
    best: dict[str, float] = {}
    for one in found:
        if one.device == device and kernel in ("", one.operator):
            best[one.trial] = max(best.get(one.trial, 0.0), one.speedup or 0.0)
    return share(sum(speed >= RECOVERED for speed in best.values()), len(best)) if best else NONE


def _ms(one: Attempt | None) -> Cell:
    if one is None:
        return NONE
    if one.speedup is None:
        return FAIL
    return time_cell(one.milliseconds[1] if one.milliseconds is not None else None)


def _slowdown(generated: Attempt, skilled: Attempt | None) -> Cell:
    """A ratio of speedups, each over the reference of its own measurement: the machine's mood cancels."""
    if skilled is None or not generated.speedup or not skilled.speedup:
        return NONE
    return times(skilled.speedup / generated.speedup)


def _family(one: Attempt) -> str:
    return next((name for name, members in paper.MEMBERS.items() if one.operator in members), "Other")


def _families(found: Sequence[Result], methods: Sequence[str]) -> Table:
    figures = [f"{method}, {what}" for method in methods for what in ("geomean", "coverage", "at or above 1x")]
    families = [name for name in (*paper.MEMBERS, "Other") if any(_family(one.best) == name for one in found)]
    rows = [_family_row(name, [one for one in found if _family(one.best) == name], methods) for name in families]
    foot = [_family_row("Overall", found, methods)]
    bound = [one for one in found if _family(one.best) != "Reduction"]
    foot += [_family_row("Compute-bound", bound, methods)] if bound and len(bound) < len(found) else []
    return Table("By family", columns("family", *figures, numeric=figures), tuple(rows), tuple(foot))


def _family_row(name: str, group: Sequence[Result], methods: Sequence[str]) -> tuple[Cell, ...]:
    size = len({(one.best.device, one.best.case_id) for one in group})
    cells = [Cell(f"{name} ({size})", name)]
    for method in methods:
        own = [one.best for one in group if one.best.method == method]
        speeds = [one.speedup for one in own if one.speedup is not None]
        cells += [times(geometric_mean(speeds)), share(len(speeds), size), share(sum(s >= 1 for s in speeds), size)]
    return tuple(cells)


def _instances(found: Sequence[Result], methods: Sequence[str]) -> Table:
    figures = [f"{method} {what}" for method in methods for what in ("ms", "speedup", "95 % interval")]
    figures.insert(0, "reference ms")
    rows = []
    for _, device, case in ordered_cases(found):
        here = {one.best.method: one.best for one in found if (one.best.device, one.best.case_id) == (device, case)}
        known = [one.milliseconds[0] for one in here.values() if one.milliseconds is not None]
        cells = [named(device), named(case), time_cell(min(known, default=None))]
        for method in methods:
            own = here.get(method)
            cells += [_ms(own), times(own.speedup if own else None), width_cell(own.interval if own else None)]
        rows.append(tuple(cells))
    return Table("One by one", columns("device", "instance", *figures, numeric=figures), tuple(rows)).condensed(
        "device"
    )


def _effects(found: Sequence[Result]) -> list[Table]:
    """How much faster one arm is than another on the same instance; each was timed beside the reference."""
    best = {(one.best.device, one.best.case_id, one.best.method): one.best for one in found}
    rows = []
    for _, device, case in ordered_cases(found):
        pairs = [(best.get((device, case, slow)), best.get((device, case, fast))) for _name, slow, fast in EFFECTS]
        if any(map(all, pairs)):
            rows.append((named(device), named(case), *(_over(*pair) for pair in pairs)))
    figures = [f"{name}: {fast} over {slow}" for name, slow, fast in EFFECTS]
    heads = columns("device", "instance", *figures, numeric=figures)
    note = "An effect's interval joins the ends of both intervals; one that holds 1x shows no effect."
    return [Table("Effects", heads, tuple(rows), notes=(note,)).condensed("device")] if rows else []


def _over(slow: Attempt | None, fast: Attempt | None) -> Cell:
    """A ratio of two speedups over one reference."""
    one, other = (found.interval if found is not None else None for found in (slow, fast))
    if one is None or other is None:
        return NONE
    value, low, high = other.estimate / one.estimate, other.low / one.high, other.high / one.low
    return Cell(f"{value:.3f}x [{low:.3f}, {high:.3f}]", value)


def _source(card: SkillCard) -> str:
    lineages = dict.fromkeys(item.lineage for item in card.evidence)
    return ", ".join(lineages) or ", ".join(dict.fromkeys(context.operator for context in card.origins)) or NOTHING


def _card_row(card: SkillCard, details: Details) -> tuple[Cell, ...]:
    tones = {"admitted": Tone.GOOD, "retired": Tone.QUIET}
    own = card.effect.speedup
    return (
        named(card.name, detail=of_card(card, details)),
        named(_source(card)),
        named(card.category.value),
        named(card.status.value, tones.get(card.status.value, Tone.PLAIN)),
        Cell(interval_text(own), own.estimate) if own is not None else Cell(NOTHING),
        named(_evidence(card.successes)),
        share(len(card.successes), len(card.log)) if card.log else NONE,
    )


def _evidence(successes: Sequence[Trial]) -> str:
    """The first success: its speedup over what it started from, and where."""
    if not successes:
        return ""
    context, speed = successes[0].context, successes[0].speedup
    where = f"{context.operator}, {context.platform}, {context.surface.value}"
    return f"{interval_text(speed)} on {where}" if speed else where
