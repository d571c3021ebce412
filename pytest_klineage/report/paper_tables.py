"""The paper's values as tables, each labelled with the device that they were measured on. None is mixed with ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pytest_klineage.report import paper
from pytest_klineage.report.cells import FAIL, times
from pytest_klineage.report.document import Cell, Column, Section, Table

BOTH = " and ".join(paper.DEVICES.values())


def with_paper(section: Section) -> Section:
    """A section with what the paper printed of the same kind at its end."""
    return replace(section, tables=(*section.tables, *printed().get(section.key, ())))


def printed() -> dict[str, tuple[Table, ...]]:
    """The paper's tables by the section that they stand in."""
    return {
        "speedups": (_speedups(),),
        "latencies": (_latencies(), _languages()),
        "cards": (_cards(),),
        "recovery": (_recovery(),),
        "generated-only": (_generated(),),
        "held-out": (_families(), _instances()),
        "setup": (_setup(),),
    }


def _speedups() -> Table:
    """Figure 3 as numbers: ratios of the latencies in Table 5."""
    rows = (
        (_device(platform), _text(kernel), *(times(reference / value) if value else FAIL for value in values))
        for platform, kernel, *values, reference in paper.LATENCIES
    )
    note = "Ratios of the latencies in the paper's Table 5, which are medians of do_bench."
    columns = _columns("device", "kernel", "KLineage", "AdaExplore", "AccelOpt", texts=2)
    return Table("The paper's Figure 3 as numbers", columns, tuple(rows), notes=(note,), paper=BOTH)


def _latencies() -> Table:
    columns = _columns("device", "kernel", "KLineage ms", "AdaExplore ms", "AccelOpt ms", "reference ms", texts=2)
    rows = (
        (
            _device(platform),
            _text(kernel),
            *(_milliseconds(value, (platform, kernel, at)) for at, value in enumerate(ms)),
        )
        for platform, kernel, *ms in paper.LATENCIES
    )
    note = "*: counted by an adapter that the authors wrote afterwards. FAIL: no correct kernel within $10."
    return Table("The paper's Table 5, ms", columns, tuple(rows), notes=(note,), paper=BOTH)


def _languages() -> Table:
    columns = _columns("device", "kernel", "CUDA ms", "TileLang ms", "reference ms", texts=2)
    rows = (
        (_device(platform), _text(kernel), *(Cell(f"{value:.4f}", value) for value in values))
        for platform, kernel, *values in paper.LANGUAGES
    )
    return Table("The paper's Table 6, ms", columns, tuple(rows), paper=BOTH)


def _setup() -> Table:
    columns = _columns("kernel", "expert from", "shape (type)", "reference", texts=4)
    return Table("The paper's Table 2", columns, _texts(paper.SETUP), paper=BOTH)


def _recovery() -> Table:
    rows = tuple((_text(name), *map(Cell, both)) for name, both in paper.RECOVERY.items())
    columns = _columns("kernel", *paper.DEVICES.values(), texts=1)
    return Table("The paper's Table 3", columns, rows[:-1], rows[-1:], paper=BOTH)


def _generated() -> Table:
    rows = (
        (_device(platform), _text(kernel), Cell(f"{alone:.4f}", alone), Cell(f"{skilled:.4f}", skilled),
         Cell(f"{slowdown:.2f}x", slowdown))
        for platform, kernel, alone, skilled, slowdown in paper.GENERATED_ONLY
    )  # fmt: skip
    columns = _columns("device", "kernel", "without cards ms", "with cards ms", "slowdown", texts=2)
    return Table("The paper's Table 4", columns, tuple(rows), paper=BOTH)


def _families() -> Table:
    columns = _columns("family (n)", "idiom-only", "with card's settings", "difference",
                       "at or above 1x, idiom / card", texts=1)  # fmt: skip
    return Table("The paper's Table 7", columns, _texts(paper.FAMILIES), paper=paper.DEVICES["sm120"])


def _instances() -> Table:
    columns = _columns("instance", "Triton ms", "idiom-only ms", "with card's settings ms", "speedup over Triton",
                       texts=1)  # fmt: skip
    rows = (
        (_text(name), *(Cell(f"{value:.3f}", value) for value in values), Cell(f"{speedup:.2f}x", speedup))
        for name, *values, speedup in paper.HELD_OUT
    )
    return Table("The paper's Table 9", columns, tuple(rows), paper=paper.DEVICES["sm120"])


def _cards() -> Table:
    columns = _columns("skill", "source sub-kernel", "verification evidence", texts=3)
    return Table("The paper's Table 8", columns, _texts(paper.CARDS), paper="GDN; the device is not stated")


def _columns(*names: str, texts: int) -> tuple[Column, ...]:
    """Columns of which the first `texts` hold no numbers."""
    return tuple(Column(name, numeric=index >= texts) for index, name in enumerate(names))


def _texts(rows: Iterable[Sequence[str]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(tuple(map(_text, row)) for row in rows)


def _text(text: str) -> Cell:
    return Cell(text, text)


def _device(platform: str) -> Cell:
    return Cell(paper.DEVICES[platform], platform)


def _milliseconds(value: float | None, place: tuple[str, str, int]) -> Cell:
    """A latency as it was printed, with the mark of the one that was audited."""
    if value is None:
        return FAIL
    return Cell(f"{value:.4f}{'*' if place == (*paper.AUDITED, 1) else ''}", value)
