"""KernelBench as operators: how many of its problems become cases, accept their own Model, and refuse zeros.

`--problems DIR` names the folder that holds level1 and level2 in a checkout of KernelBench. Sizes are reduced, so that
a CPU can judge; what is measured is whether a problem can be judged, not how fast anything is. A survey that was cut
off goes on by the same command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from surveying import HOW, SETTINGS, Progress, Row, judged, refuses_zeros, table_of

from pytest_klineage import Gate, GateSettings, HarnessError, UsageError
from pytest_klineage.cli.formats import files_of, number_of
from pytest_klineage.formats import candidate_of, read_problems

ATTEMPTS: tuple[tuple[int, dict[str, str], bool], ...] = (
    (16, {}, True), (32, {}, True), (64, {}, True), (64, {"batch_size": "2"}, True), (16, {}, False),
)  # fmt: skip
"""What sizes become at most, and whether modules are in training mode, in turn until a problem is a case: strides and
groups ask for some size, and a dropout's answer is random in training."""
NEEDED = {1: 95, 2: 90}
"""Of the 100 problems of each level."""


def surveyed(gate: Gate, level: int, paths: list[Path], into: Path) -> Iterator[Row]:
    """A row for every problem: at the first attempt at which it is a case, or why it was none at the first."""
    pending: dict[Path, str] = dict.fromkeys(paths, "")
    for number, (at_most, sizes, training) in enumerate(ATTEMPTS):
        found = read_problems(list(pending), into / str(number), at_most=at_most, sizes=sizes, training=training)
        for path, imported in zip(list(pending), found, strict=True):
            try:
                if isinstance(imported, UsageError):
                    raise imported
                own = candidate_of(re.sub(r"\bModel\b", "ModelNew", path.read_text()), imported)
                row = Row(group=f"level{level}", problem=path.stem, at_most=at_most, training=training)
                row = judged(gate, row, imported, own)
            except (UsageError, HarnessError) as error:  # the latter: the problem itself errs too much on new inputs
                pending[path] = pending[path] or str(error)
                continue
            del pending[path]
            yield row
    yield from (Row(group=f"level{level}", problem=path.stem, refused=why) for path, why in pending.items())


@pytest.mark.parametrize("level", NEEDED)
def test_imported_problems(
    level: int,
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[Row]], None],
    measured_here: str,
    write_line: Callable[[str], None],
    tmp_path: Path,
) -> None:
    """At least 95 problems of level 1 and 90 of level 2 accept their own Model, and none of them zeros."""
    folder = request.config.getoption("--problems")
    if folder is None:
        pytest.skip("needs --problems DIR, the folder KernelBench of a checkout of KernelBench")
    count = request.config.getoption("--trials") or 100
    how = (
        f"Every size at a file's top is divided by its prime factors until it is 16 at most, else "
        f"{', '.join(str(at_most) for at_most, *_ in ATTEMPTS[1:-1])} (the last with batch_size = 2), else 16 in "
        f"evaluation mode. The kernel is the "
        f"problem's own Model under the name ModelNew. {HOW}"
    )
    name = f"imported_problems-level{level}"
    progress, paths = Progress(name), files_of(folder / f"level{level}")[:count]
    known = {row.problem for row in progress.rows}
    with Gate("cpu", GateSettings(**SETTINGS)) as gate:  # type: ignore[arg-type]  # of several types
        pending = [path for path in paths if path.stem not in known]
        for row in progress.keep(surveyed(gate, level, pending, tmp_path)):
            write_line(f"level {level}: {len(progress.rows)} of {len(paths)}: {row.problem} {row.code or row.refused}")
    rows = sorted(progress.rows, key=lambda row: number_of(Path(row.problem)))
    larger = [f"{row.problem} ({row.at_most})" for row in rows if row.at_most > ATTEMPTS[0][0]]
    table = f"# KernelBench's level {level} as operators\n\n{measured_here}. {how}\n\n{table_of(rows)}"
    table += f"\n\nAt sizes above {ATTEMPTS[0][0]}: {', '.join(larger) or 'none'}."
    table += f"\n\nIn evaluation mode: {', '.join(row.problem for row in rows if not row.training) or 'none'}."
    publish(name, f"{table}\n\nRaw records: `{name}.jsonl`.", list(rows))
    progress.end()
    assert not [row.problem for row in rows if row.case and not refuses_zeros(row)]
    assert sum(row.accepted for row in rows) >= NEEDED[level] * count // 100
