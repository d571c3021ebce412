"""Figures as SVG and PNG, drawn by matplotlib without its global state."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_klineage.errors import MissingDependency, StoreError
from pytest_klineage.report.document import Figure, FigureKind, Line, Mark, Point, Series
from pytest_klineage.report.tables import ratio

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

REMEDY = "pip install 'pytest-klineage[report]'"
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#8c7f2a", "#56b4e9")
"""Colours that also differ for most colour-blind eyes (Okabe and Ito), their yellow darkened for white paper."""
WRAPPER, FAILED, INK = "#d55e00", "#7a838c", "#1b1f24"
MARKERS = {Mark.SCORED: "o", Mark.WRAPPER: "x", Mark.FAILED: "^", Mark.REJECTED: "x", Mark.SCREENED: "."}
WORDS = {
    Mark.WRAPPER: "wrapper, not counted", Mark.FAILED: "failed", Mark.REJECTED: "refused step",
    Mark.SCREENED: "right, screened",
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"], "font.size": 8.5, "axes.titlesize": 9.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#57606a", "axes.labelcolor": INK, "xtick.color": "#57606a",
    "ytick.color": INK, "svg.fonttype": "none", "svg.hashsalt": "pytest-klineage", "text.parse_math": False,
    "legend.frameon": False, "axes.grid": True, "grid.color": "#e3e7eb", "axes.axisbelow": True,
}  # fmt: skip
WIDTH_IN, PNG_DPI = 7.0, 160
RAIL = 0.12
"""Room for points without a value, as a share of the height."""
TITLE, POINTS = "title", "points"
"""Ids of groups in an SVG: the title; points, followed by their places among all points of the figure."""


def draw(figures: Iterable[Figure], folder: Path) -> dict[str, Path]:
    """Write each figure as SVG and PNG into a folder. Gives back the SVG of each, by key.

    Raises MissingDependency without matplotlib, StoreError where the folder cannot be written.
    """
    matplotlib = _matplotlib()
    written: dict[str, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            for figure in figures:
                canvas = _canvas(figure)
                written[figure.key] = folder / f"{figure.key}.svg"
                canvas.savefig(written[figure.key], metadata={"Date": None})
                # The layout stays as the first file has it; to find it costs as much as to draw.
                canvas.set_layout_engine("none")
                canvas.savefig(folder / f"{figure.key}.png", dpi=PNG_DPI)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from error
    return written


def svg_text(figure: Figure) -> str:
    """A figure as the SVG that `draw` writes. Raises MissingDependency without matplotlib."""
    with _matplotlib().rc_context(STYLE), io.StringIO() as file:
        _canvas(figure).savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise MissingDependency("matplotlib, which figures are drawn with,", REMEDY) from error
    return matplotlib


def _canvas(figure: Figure) -> Canvas:
    canvas: Canvas = _matplotlib().figure.Figure(figsize=(WIDTH_IN, _height(figure)), layout="constrained")
    axes = canvas.add_subplot()
    _draw(figure, axes)
    _legend(figure, axes, canvas)
    return canvas


def _name(artist: Artist, figure: Figure, points: Iterable[Point]) -> None:
    """Give what was drawn an id from which its points are found."""
    positions = {id(point): position for position, point in enumerate(figure.points)}
    artist.set_gid("-".join([POINTS, *(str(positions[id(point)]) for point in points)]))


def _height(figure: Figure) -> float:
    if figure.kind is FigureKind.BARS:
        return 1.2 + 0.24 * sum(len(series.points) for series in figure.series) + 0.16 * len(figure.categories)
    return 4.1 if figure.categories else 3.4


def _draw(figure: Figure, axes: Axes) -> None:
    axes.set_title(figure.title, loc="left", fontweight="bold").set_gid(TITLE)
    if figure.kind is FigureKind.BARS:
        _bars(figure, axes)
    else:
        _curves(figure, axes)


def _legend(figure: Figure, axes: Axes, canvas: Canvas) -> None:
    """Names in the order of the series, below everything; none for a single name."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [*dict.fromkeys(series.name for series in figure.series if series.name in handles), *WORDS.values()]
    names = [name for name in order if name in handles]
    if len(names) > 1:
        canvas.legend([handles[name] for name in names], names, loc="outside lower left", ncols=4, fontsize=8)


def _bars(figure: Figure, axes: Axes) -> None:
    """Groups from top to bottom; each bar begins at 1x, on a logarithmic axis."""
    top, ticks = 0.0, []
    axes.set_xscale("log")
    named: set[str] = set()
    for category in range(len(figure.categories)):
        rows = [(series, point) for series in figure.series for point in series.points if point.x == category]
        ticks.append(top + (len(rows) - 1) / 2)
        for series, point in rows:
            _bar(figure, axes, series, point, top, "" if series.name in named else series.name)
            named |= {series.name} if point.y is not None else set()
            top += 1
        top += 0.7
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    axes.set_yticks(ticks, figure.categories)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.margins(x=0.18, y=min(0.05, 0.8 / top))
    axes.set_xlabel(f"{figure.y_label}, logarithmic; bars begin at 1x: the {figure.parity}")
    _plain_ticks(axes, "x")


def _bar(figure: Figure, axes: Axes, series: Series, point: Point, top: float, name: str) -> None:
    if point.y is None:
        _name(axes.plot([1.0], [top], MARKERS[Mark.WRAPPER], color=WRAPPER, markersize=6)[0], figure, [point])
        axes.annotate(point.text.partition(": ")[2], (1.0, top), (8, 0), textcoords="offset points", va="center",
                      fontsize=7.5, color=WRAPPER)  # fmt: skip
        return
    drawn = axes.barh(top, point.y - 1.0, left=1.0, height=0.82, color=_colour(series), alpha=0.9, label=name or None)
    _name(drawn[0], figure, [point])
    end = max(point.y, 1.0)
    if point.low is not None and point.high is not None:
        axes.errorbar([point.y], [top], xerr=[[point.y - point.low], [point.high - point.y]], color=INK, capsize=2.5,
                      linewidth=1)  # fmt: skip
        end = max(end, point.high)
    axes.annotate(f"{ratio(point.y)}x", (end, top), (5, 0), textcoords="offset points", va="center", fontsize=8)


def _curves(figure: Figure, axes: Axes) -> None:
    if figure.y_log:
        axes.set_yscale("log")
    named: set[object] = set()
    for series in figure.series:
        _line(axes, series, named)
        _marks(figure, axes, series, named)
    if any(point.y is None for series in figure.series for point in series.points):
        _rail(axes, log=figure.y_log)
    if figure.parity:
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    if figure.categories:
        axes.set_xticks(
            range(len(figure.categories)), figure.categories, rotation=32, ha="right", rotation_mode="anchor"
        )
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    _plain_ticks(axes, "y")


def _line(axes: Axes, series: Series, named: set[object]) -> None:
    points = [point for point in series.points if point.y is not None]
    if series.line is Line.NONE or not points:
        return
    style = "steps-post" if series.line is Line.STEPS else "default"
    axes.plot([point.x for point in points], [point.y or math.nan for point in points], color=_colour(series),
              linewidth=1.6, drawstyle=style, label=None if series.name in named else series.name)  # fmt: skip
    named.add(series.name)


def _marks(figure: Figure, axes: Axes, series: Series, named: set[object]) -> None:
    """Points with a value at their height; all others on a rail at the bottom of the axes."""
    for mark in Mark:
        for points, on_rail in _split(series.points, mark):
            if not points:
                continue
            label = WORDS.get(mark) if mark not in named else None
            named.add(mark)
            heights = [0.0375] * len(points) if on_rail else [point.y or math.nan for point in points]
            (drawn,) = axes.plot(
                [point.x for point in points], heights, MARKERS[mark], color=_mark_colour(mark, series), markersize=5,
                markerfacecolor="none" if mark is Mark.FAILED else None, label=label,
                transform=axes.get_xaxis_transform() if on_rail else axes.transData, clip_on=not on_rail,
            )  # fmt: skip
            _name(drawn, figure, points)
    for point in series.points:
        if point.y is not None and point.low is not None and point.high is not None:
            axes.plot([point.x] * 2, [point.low, point.high], color=_colour(series), linewidth=1)


def _rail(axes: Axes, *, log: bool) -> None:
    """A band at the bottom for what has no value, below everything that has one."""
    from matplotlib.patches import Rectangle

    low, high = axes.get_ylim()
    axes.set_ylim(low / (high / low) ** RAIL if log else low - (high - low) * RAIL, high)
    band = Rectangle((0, 0), 1, 0.075, transform=axes.transAxes, color="#eceff2", zorder=0.5)
    axes.add_patch(band)
    axes.annotate("none", (1.0, 0.0375), (3, 0), xycoords="axes fraction", textcoords="offset points", va="center",
                  fontsize=7.5, color=FAILED)  # fmt: skip


def _split(points: Sequence[Point], mark: Mark) -> tuple[tuple[list[Point], bool], tuple[list[Point], bool]]:
    own = [point for point in points if point.mark is mark]
    return ([one for one in own if one.y is not None], False), ([one for one in own if one.y is None], True)


def _colour(series: Series) -> str:
    return PALETTE[series.colour % len(PALETTE)]


def _mark_colour(mark: Mark, series: Series) -> str:
    return {Mark.WRAPPER: WRAPPER, Mark.FAILED: FAILED, Mark.REJECTED: FAILED}.get(mark, _colour(series))


def _plain_ticks(axes: Axes, which: str) -> None:
    """1-2-5 ticks with plain numbers instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    narrow = max(low, high) / max(min(low, high), 1e-12) < 500
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
