"""Definitions of FlashInfer-Trace as operators: how many become cases, accept their own reference, and refuse zeros.

`--definitions DIR` names a folder of FlashInfer-Trace with definitions/. Axes that a workload would give are 8; fixed
ones are reduced where the reference does not insist on them. Inputs are drawn at random, scalars are 1. A survey
that was cut off goes on by the same command.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from surveying import HOW, SETTINGS, Progress, Row, judged, refuses_zeros, table_of

from pytest_klineage import Gate, GateSettings, KernelSource, UsageError
from pytest_klineage.formats import Imported, TraceDefinition, Unsupported, Workload, import_definition, read_trace_set
from pytest_klineage.formats import source_of as source_of_solution
from pytest_klineage.formats.sizes import smaller_value
from pytest_klineage.formats.trace_records import Axis, BuildSpec, Solution, SolutionFile, WorkloadInput

VARIABLE, AT_MOST = 8, 64
INTEGERS = "the input {name} is of integers that point into other inputs, and only workloads in files hold such"


def workload_of(definition: TraceDefinition) -> Workload:
    """Small sizes, and random inputs. Raises UsageError for integers, of which a definition gives no bounds."""
    inputs = {}
    for name, spec in definition.inputs.items():
        if spec.shape is not None and spec.dtype.startswith(("int", "uint", "bool")):
            raise Unsupported(definition.name, INTEGERS.format(name=name))
        whole = spec.dtype.startswith("int")
        scalar = WorkloadInput(type="scalar", value=1 if whole else 1.0)
        inputs[name] = WorkloadInput(type="random") if spec.shape is not None else scalar
    axes = {name: VARIABLE for name, axis in definition.axes.items() if axis.type != "const"}
    return Workload(axes=axes, inputs=inputs, uuid="survey")


def reduced(definition: TraceDefinition) -> TraceDefinition:
    """The definition with its fixed axes divided until they are small."""
    axes = {
        name: Axis(type="const", value=smaller_value(axis.value, AT_MOST)) if axis.type == "const" else axis
        for name, axis in definition.axes.items()
    }
    return msgspec.structs.replace(definition, axes=axes)


def own_of(definition: TraceDefinition, imported: Imported) -> KernelSource:
    """The definition's reference as a solution."""
    spec = BuildSpec(
        language="python", target_hardware=("cpu",), entry_point="main.py::run", destination_passing_style=False
    )
    solution = Solution(
        name="own", definition=definition.name, author="the definition", spec=spec,
        sources=(SolutionFile("main.py", definition.reference),),
    )  # fmt: skip
    return source_of_solution(solution, imported)


def surveyed(gate: Gate, definition: TraceDefinition, into: Path) -> Row:
    """What becomes of a definition: with small axes, else with its own."""
    row, why = Row(group=definition.op_type or definition.type, problem=definition.name), ""
    for number, (tried, at_most) in enumerate(((reduced(definition), AT_MOST), (definition, 0))):
        try:
            imported = import_definition(tried, workload_of(tried), into / str(number))
            fitting = msgspec.structs.replace(row, at_most=at_most)
            return judged(gate, fitting, imported, own_of(tried, imported))
        except UsageError as error:
            why = str(error)
    return msgspec.structs.replace(row, refused=why)


def test_imported_definitions(
    request: pytest.FixtureRequest,
    publish: Callable[[str, str, list[Row]], None],
    measured_here: str,
    write_line: Callable[[str], None],
    tmp_path: Path,
) -> None:
    """Every definition that becomes a case accepts its own reference, and none of them zeros."""
    folder = request.config.getoption("--definitions")
    if folder is None:
        pytest.skip("needs --definitions DIR, a folder of FlashInfer-Trace with definitions/")
    progress = Progress("imported_definitions")
    known = {row.problem for row in progress.rows}
    found = sorted(read_trace_set(folder).definitions.values(), key=lambda item: item.op_type)
    with Gate("cpu", GateSettings(**SETTINGS)) as gate:  # type: ignore[arg-type]  # of several types
        pending = [definition for definition in found if definition.name not in known]
        for row in progress.keep(surveyed(gate, definition, tmp_path) for definition in pending):
            write_line(f"{len(progress.rows)} of {len(found)}: {row.problem} {row.code or row.refused}")
    rows = progress.rows
    how = (
        f"Axes that a workload gives are {VARIABLE}, fixed ones are divided by their prime factors until they are "
        f"{AT_MOST} at most, or left where the reference insists on them. The kernel is the definition's own "
        f"reference. {HOW}"
    )
    table = f"# Definitions of FlashInfer-Trace as operators\n\n{measured_here}. {how}\n\n{table_of(rows)}"
    publish("imported_definitions", f"{table}\n\nRaw records: `imported_definitions.jsonl`.", list(rows))
    progress.end()
    assert [row for row in rows if row.case]
    assert not [row.problem for row in rows if row.case and not refuses_zeros(row)]
    assert not [row.problem for row in rows if row.case and not row.accepted]
