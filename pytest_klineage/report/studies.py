"""Tables of single studies in the paper's form: recovery, generated-only, held-out instances, cards. No layout."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_klineage.records import SkillCard, Trial
from pytest_klineage.report import paper
from pytest_klineage.report.aggregate import geometric_mean
from pytest_klineage.report.behind import of_card
from pytest_klineage.report.cells import FAIL, NOTHING, share, time_cell, times
from pytest_klineage.report.document import Cell, Column, Details, Section, Table, Tone
from pytest_klineage.report.outcomes import Attempt, Result, method_order, ordered_cases
from pytest_klineage.report.tables import ratio

RECOVERED = 0.9
"""A trial succeeds at this share of the expert's speed, as in the paper."""
GENERATED, SKILLED = "generated-only", "klineage"
LESS = ("labels-only", "klineage-without-case", "klineage-without-language", "klineage-without-platform",
        "klineage-without-done")  # fmt: skip
"""Methods between the two: cards by name only, or one dimension of retrieval switched off."""
FAMILIES = {
    "GEMM": ("gemm", "mm", "addmm", "bmm"),
    "Grouped GEMM": ("grouped_gemm",),
    "Attention": ("fmha", "flash_attention", "gqa"),
    "Reduction": ("rmsnorm", "layernorm", "softmax", "fused_add_rmsnorm"),
}
"""Families of held-out operators, as the paper groups them."""


def recovery_section(found: Sequence[Attempt]) -> Section:
    """How many trials from a naive kernel came back to the expert's speed (the paper's Table 3)."""
    devices = sorted({one.device for one in found})
    kernels = list(dict.fromkeys(one.operator for one in found))
    columns = (Column("kernel"), *(Column(device, numeric=True) for device in devices))
    rows = tuple(
        (Cell(paper.OPERATORS.get(kernel, kernel), kernel), *(_recovered(found, device, kernel) for device in devices))
        for kernel in kernels
    )
    foot = ((Cell("Total"), *(_recovered(found, device) for device in devices)),)
    tables = [Table("Recovered trials", columns, rows, foot)]
    text = f"A trial begins with a naive kernel and succeeds at {RECOVERED:.0%} of the expert's speed, timed beside it."
    return Section(key="recovery", title="Roundtrip recovery", text=text, tables=tuple(tables))


def generated_section(found: Sequence[Result]) -> Section:
    """The same method without cards (the paper's Table 4)."""
    columns = (Column("device"), Column("case"), Column("method"), Column("without cards ms", numeric=True),
               Column("with cards ms", numeric=True), Column("slowdown", numeric=True))  # fmt: skip
    rows = []
    for _, device, case in ordered_cases(found):
        here = {one.best.method: one.best for one in found if (one.best.device, one.best.case_id) == (device, case)}
        skilled = here.get(SKILLED)
        rows += [
            (Cell(device, device), Cell(case, case), Cell(method, method), _ms(here[method]), _ms(skilled),
             _slowdown(here[method], skilled))
            for method in method_order(here)
            if method == GENERATED or method in LESS
        ]  # fmt: skip
    tables = [Table("Without cards", columns, tuple(rows)).condensed("device", "method")]
    text = (
        "slowdown: time of the kernel made without cards over time of the one made with them, best of the runs of each."
    )
    return Section(key="generated-only", title="Generated only", text=text, tables=tuple(tables))


def held_out_section(found: Sequence[Result]) -> Section:
    """Instances that no lineage comes from, by family and one by one (the paper's Tables 7 and 9)."""
    methods = method_order(one.best.method for one in found)
    tables = [_families(found, methods)]
    tables.append(_instances(found, methods))
    text = "Speedup over the reference that the instances came with; means over successes, beside their coverage."
    return Section(key="held-out", title="Held-out instances", text=text, tables=tuple(tables))


def card_section(cards: Sequence[SkillCard], details: Details) -> Section:
    """Cards with the trial that admitted each (for GDN: the paper's Table 8)."""
    names = ("card", "source", "adds", "status", "effect where it comes from", "verification evidence", "trials")
    columns = tuple(Column(name, numeric=name == "trials") for name in names)
    rows = tuple(_card_row(card, details) for card in sorted(cards, key=lambda card: (_source(card), card.name)))
    admitted = sum(bool(card.successes) for card in cards)
    tables = [Table("Skill cards", columns, rows)]
    text = f"{admitted} of {len(cards)} cards have a held-out trial that succeeded. Open a card by its name."
    return Section(key="cards", title="Skill cards", text=text, tables=tuple(tables))


def _recovered(found: Sequence[Attempt], device: str, kernel: str = "") -> Cell:
    """Successes of trials: a trial with several verdicts counts once, by its best."""
    best: dict[str, float] = {}
    for one in found:
        if one.device == device and kernel in ("", one.operator):
            best[one.trial] = max(best.get(one.trial, 0.0), one.speedup or 0.0)
    return share(sum(speed >= RECOVERED for speed in best.values()), len(best)) if best else time_cell(None)


def _ms(one: Attempt | None) -> Cell:
    if one is None:
        return time_cell(None)
    if one.speedup is None:
        return FAIL
    return time_cell(one.milliseconds[1] if one.milliseconds is not None else None)


def _slowdown(generated: Attempt, skilled: Attempt | None) -> Cell:
    """A ratio of speedups, each over the reference of its own measurement: the machine's mood cancels."""
    if skilled is None or not generated.speedup or not skilled.speedup:
        return Cell(NOTHING, None, Tone.QUIET)
    return times(skilled.speedup / generated.speedup)


def _family(one: Attempt) -> str:
    return next((name for name, members in FAMILIES.items() if one.operator in members), "Other")


def _families(found: Sequence[Result], methods: Sequence[str]) -> Table:
    columns = [Column("family")]
    for method in methods:
        columns += [Column(f"{method}, geomean", numeric=True), Column(f"{method}, coverage", numeric=True),
                    Column(f"{method}, at or above 1x", numeric=True)]  # fmt: skip
    families = [name for name in (*FAMILIES, "Other") if any(_family(one.best) == name for one in found)]
    rows = [_family_row(name, [one for one in found if _family(one.best) == name], methods) for name in families]
    foot = [_family_row("Overall", found, methods)]
    bound = [one for one in found if _family(one.best) != "Reduction"]
    foot += [_family_row("Compute-bound", bound, methods)] if bound and len(bound) < len(found) else []
    return Table("By family", tuple(columns), tuple(rows), tuple(foot))


def _family_row(name: str, group: Sequence[Result], methods: Sequence[str]) -> tuple[Cell, ...]:
    size = len({(one.best.device, one.best.case_id) for one in group})
    cells = [Cell(f"{name} ({size})", name)]
    for method in methods:
        own = [one.best for one in group if one.best.method == method]
        speeds = [one.speedup for one in own if one.speedup is not None]
        cells += [times(geometric_mean(speeds)), share(len(speeds), size), share(sum(s >= 1 for s in speeds), size)]
    return tuple(cells)


def _instances(found: Sequence[Result], methods: Sequence[str]) -> Table:
    columns = [Column("device"), Column("instance"), Column("reference ms", numeric=True)]
    for method in methods:
        columns += [Column(f"{method} ms", numeric=True), Column(f"{method} speedup", numeric=True)]
    rows = []
    for _, device, case in ordered_cases(found):
        here = {one.best.method: one.best for one in found if (one.best.device, one.best.case_id) == (device, case)}
        known = [one.milliseconds[0] for one in here.values() if one.milliseconds is not None]
        cells = [Cell(device, device), Cell(case, case), time_cell(min(known, default=None))]
        for method in methods:
            own = here.get(method)
            cells += [_ms(own), times(own.speedup if own is not None else None)]
        rows.append(tuple(cells))
    return Table("One by one", tuple(columns), tuple(rows)).condensed("device")


def _source(card: SkillCard) -> str:
    lineages = dict.fromkeys(item.lineage for item in card.evidence)
    return ", ".join(lineages) or ", ".join(dict.fromkeys(context.operator for context in card.origins)) or NOTHING


def _card_row(card: SkillCard, details: Details) -> tuple[Cell, ...]:
    tones = {"admitted": Tone.GOOD, "retired": Tone.QUIET}
    own = card.effect.speedup
    shown = _evidence(card.successes)
    return (
        Cell(card.name, card.name, detail=of_card(card, details)),
        Cell(_source(card), _source(card)),
        Cell(card.category.value, card.category.value),
        Cell(card.status.value, card.status.value, tones.get(card.status.value, Tone.PLAIN)),
        Cell(f"{ratio(own.estimate)}x [{ratio(own.low)}, {ratio(own.high)}]" if own is not None else NOTHING,
             own.estimate if own is not None else None),
        Cell(shown or NOTHING, shown or None),
        share(len(card.successes), len(card.log)) if card.log else time_cell(None),
    )  # fmt: skip


def _evidence(successes: Sequence[Trial]) -> str:
    """The first success: its speedup over what it started from, and where."""
    for trial in successes:
        context = trial.context
        place = f"{context.operator}, {context.platform}, {context.surface.value}"
        speed = trial.speedup
        return f"{ratio(speed.estimate)}x [{ratio(speed.low)}, {ratio(speed.high)}] on {place}" if speed else place
    return ""
