"""The arms of the suite, and which kernel with which configuration each of them has for a row.

idiom    one configuration for each kernel, frozen in idiom.toml
blind    the same kernel; the best of idiom's configuration and POINTS drawn from the public grid with a seed
card     the same kernel; the best of idiom's configuration and POINTS that a card's settings steer (points/card.toml)
expert   the best that we know, in any structure and language; of several kernels the one that a sweep found fastest
cpu      fp32 kernels for the machine that everybody has
"""

from __future__ import annotations

import itertools
import random
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from rows import ATTENTION, REDUCTION, Row

from pytest_klineage import UsageError
from pytest_klineage.lab.library.experts import find_experts
from pytest_klineage.records import KernelSource, SourceFile, Surface

HERE = Path(__file__).parent
EXPERTS = HERE.parents[1] / "experts"
ARMS = ("idiom", "blind", "card", "expert")
SWEPT = ("blind", "card", "expert")
POINTS = 7
SEED = 20261123
"""Of the draw of blind points. The grid and the rule are public; nothing of a measurement enters them."""
CARD_POINTS = HERE / "points" / "card.toml"
NO_CARDS = "retrieved cards have no figure for this kernel's configuration"
SHARED_BYTES = 232448
"""Of a block on sm90; 101376 on sm120."""
ELEMENTS = 128
"""fp32 numbers of a tile or of rows per thread beyond which a kernel spills."""
BEST_TILE = {"block_m": 128, "block_n": 256, "block_k": 64, "stages": 3, "threads": 256}
"""That of experts/gemm/sm90-tilelang."""
WARP_ELEMENTS = 1024
"""Of a row that a warp of the Triton expert holds: 32 numbers of a thread."""
REDUCTION_FLAGS = ((), ("-DEARLY_WEIGHTS=1",), ("-DPLAIN_STORES=1",), ("-DEARLY_WEIGHTS=1", "-DPLAIN_STORES=1"))
"""Ways to build kernels/reductions.cu among which a sweep chooses, as it was first."""
CORE = ("kernel.cuh", "launch.cuh")
"""Files of experts/gemm that kernels/products.cu stands on."""

Point = dict[str, int]

GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "tiles": {"block_m": (64, 128, 256), "block_n": (64, 128, 256), "block_k": (64,), "stages": (2, 3, 4),
              "threads": (128, 256)},
    "attention": {"block_m": (64, 128, 192), "block_n": (64, 128, 192), "stages": (1, 2, 3),
                  "threads": (128, 256, 384)},
    "rows": {"rows": (1, 2, 4, 8), "warps": (1, 2, 4, 8, 16)},
}  # fmt: skip


class Chosen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The point that a sweep has chosen for a row."""

    row: int
    arm: str
    point: Point
    speedup: float
    """Over FlagGems in the sweep; the reported one is from another run."""
    platform: str
    cards: tuple[str, ...] = ()


class CardPoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What retrieved cards propose for a row: their names, and points of the kernel's grid or beside it.

    In points/card.toml: [[rows]] with row = 9, cards = ["fmha-two-consumers"], and as points a list of
    {block_m = 128, block_n = 128, stages = 2, threads = 256}.
    """

    row: int
    cards: tuple[str, ...]
    points: tuple[Point, ...]


def kernel_of(row: Row) -> str:
    """The kernel file that idiom, blind and card share, by its stem."""
    return {ATTENTION: "attention", REDUCTION: "rows"}.get(row.family, "tiles")


@cache
def idiom() -> dict[str, Point]:
    """The frozen configurations by kernel."""
    return tomllib.loads((HERE / "idiom.toml").read_text())


def fits(row: Row, point: Point) -> bool:
    """Whether a configuration can be built: registers, shared memory, and whole warp groups of 64 rows."""
    if row.family == REDUCTION:
        return point["rows"] * row.shape[1] <= ELEMENTS * 32 * point["warps"]
    m, n, threads = point["block_m"], point["block_n"], point["threads"]
    if row.family == ATTENTION:
        width = row.shape[3]
        shared = 2 * width * (2 * m + 2 * n * point["stages"])
        return shared <= SHARED_BYTES and m * 2 == threads and m * (n + width) <= 192 * threads
    shared = 2 * point["block_k"] * (m + n) * point["stages"]
    if row.operator == "addmm":  # the bias is on its way while the ring is in use
        shared += 2 * m * n
    return shared <= SHARED_BYTES and m * n <= ELEMENTS * threads and m * 2 >= threads


def grid(row: Row) -> list[Point]:
    """The public grid of a row's kernel, without what cannot be built."""
    axes = GRIDS[kernel_of(row)]
    points = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [point for point in points if fits(row, point)]


def blind_points(row: Row) -> list[Point]:
    """POINTS of the grid, drawn for the row with a fixed seed; idiom's own is no candidate."""
    others = [point for point in grid(row) if point != idiom()[kernel_of(row)]]
    return random.Random(f"{SEED}-{row.number}").sample(others, POINTS)


@cache
def card_points() -> dict[int, CardPoints]:
    """By row, what cards propose; empty while there are no cards of the platform. Raises UsageError for a bad file."""
    if not CARD_POINTS.exists():
        return {}
    try:
        found = msgspec.toml.decode(CARD_POINTS.read_bytes(), type=dict[str, tuple[CardPoints, ...]])
    except msgspec.DecodeError as error:
        raise UsageError(f"{CARD_POINTS}: {error}") from error
    return {item.row: item for item in found.get("rows", ())}


def points_of(arm: str, row: Row) -> list[Point]:
    """The points that a sweep tries for an arm, idiom's first; none where an arm has nothing to choose from."""
    if arm == "expert":
        count = len(experts_of(row))
        return [{"kernel": i} for i in range(count)] if count > 1 else []
    start = idiom()[kernel_of(row)]
    if arm == "blind":
        return [start, *blind_points(row)]
    steered = card_points().get(row.number)
    return [] if steered is None else [start, *steered.points[:POINTS]]


def read_choices(path: Path) -> dict[tuple[int, str], Chosen]:
    """What sweeps have chosen, by row and arm; empty without a file."""
    if not path.exists():
        return {}
    found = msgspec.json.decode(path.read_bytes(), type=tuple[Chosen, ...])
    return {(item.row, item.arm): item for item in found}


def at_point(row: Row, arm: str, point: Point, label: str) -> KernelSource:
    """The kernel of an arm at a point of its sweep."""
    if arm == "expert":
        return msgspec.structs.replace(experts_of(row)[point["kernel"]], label=label)
    return configured(row, point, label)


def configured(row: Row, point: Point, label: str) -> KernelSource:
    """The shared kernel of a row with a configuration, as a source of its own."""
    kernel = kernel_of(row)
    shapes = [(row.operator, *shape, row.dtype) for shape in (row.shape, row.tail)]
    if row.family == REDUCTION:
        shapes = shapes[:1]
    config = f"CONFIG = {point!r}\nSHAPES = {shapes!r}\n"
    entry = {"tiles": f"run_{row.operator}", "rows": row.operator}.get(kernel, "run")
    files = (
        SourceFile(f"{kernel}.py", (HERE / "kernels" / f"{kernel}.py").read_text()),
        SourceFile("config.py", config),
    )
    surface = Surface.TRITON if kernel == "rows" else Surface.TILELANG
    return KernelSource(surface=surface, files=files, entry=entry, label=label)


def experts_of(row: Row) -> list[KernelSource]:
    """The kernels among which the best for a row on sm90 is, the likeliest first."""
    if row.family == ATTENTION:
        return [borrow("fmha", "sm90", Surface.CUDA)]
    if row.family == REDUCTION:
        rows = max(1, 4 * WARP_ELEMENTS // row.shape[1])
        best = {"rows": rows, "warps": max(1, rows * row.shape[1] // WARP_ELEMENTS)}
        built = [own(row, "reductions.cu", flags=flags) for flags in REDUCTION_FLAGS]
        return [built[0], configured(row, best, "expert"), *built[1:]]
    core = borrow("gemm", "sm90", Surface.CUDA, "grouped" if row.operator == "grouped_mm" else "expert")
    parts = tuple(file for file in core.files if file.name in CORE)
    cuda = own(row, "products.cu", parts) if row.operator in ("addmm", "bmm") else core
    return [cuda, configured(row, BEST_TILE, "expert")]


def own(row: Row, name: str, also: tuple[SourceFile, ...] = (), flags: tuple[str, ...] = ()) -> KernelSource:
    """A CUDA kernel of this suite whose entry is the row's operator."""
    main = SourceFile(name, (HERE / "kernels" / name).read_text())
    return KernelSource(surface=Surface.CUDA, files=(main, *also), entry=row.operator, flags=flags, label="expert")


def borrow(operator: str, platform: str, surface: Surface, variant: str = "expert") -> KernelSource:
    """A kernel of experts/ for an operator with the same signature."""
    found = next(
        item for item in find_experts(EXPERTS, platform) if (item.operator, item.surface) == (operator, surface)
    )
    return msgspec.structs.replace(found.source(variant), label="expert")


def cpu_kernel(row: Row) -> KernelSource:
    """The kernel of a row on a CPU."""
    if row.operator == "mm":
        return msgspec.structs.replace(borrow("gemm", "cpu", Surface.CPP), label="cpu")
    text = (HERE / "kernels" / "cpu.cpp").read_text()
    entry = "attention" if row.family == ATTENTION else row.operator
    flags = ("-O3", "-fopenmp", "-march=x86-64-v3")
    return KernelSource(
        surface=Surface.CPP, files=(SourceFile("cpu.cpp", text),), entry=entry, flags=flags, label="cpu"
    )


def source_of(row: Row, arm: str, chosen: Chosen | None = None) -> KernelSource | str:
    """The kernel of an arm for a row, or why there is none."""
    if arm == "cpu":
        return cpu_kernel(row)
    if arm == "expert" and chosen is None:
        return experts_of(row)[0]
    if arm == "idiom":
        return configured(row, idiom()[kernel_of(row)], arm)
    if arm == "card" and not points_of(arm, row):
        return NO_CARDS
    if chosen is None:
        return f"no point is chosen: pytest suites/flaggems/test_sweep.py -k {arm}"
    return at_point(row, arm, chosen.point, arm)


def to_build(rows: tuple[Row, ...]) -> Iterator[tuple[Row, str, KernelSource]]:
    """Every kernel that the arms and their sweeps may run, once: what the compile stage builds."""
    for row in rows:
        known: set[str] = set()
        plans: list[tuple[str, Any]] = [("idiom", source_of(row, "idiom")), ("expert", source_of(row, "expert"))]
        for arm in reversed(SWEPT):  # first the arm in which no kernel may spill
            for i, point in enumerate(points_of(arm, row)):
                plans.append((f"{arm}{i}", at_point(row, arm, point, f"{arm}{i}")))
        for name, source in plans:
            if isinstance(source, KernelSource) and source.digest not in known:
                known.add(source.digest)
                yield row, name, source
