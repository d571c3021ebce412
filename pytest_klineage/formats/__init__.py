"""Other projects' formats, in and out: problems become cases, verdicts become traces. Nothing foreign is executed."""

from __future__ import annotations

from pytest_klineage.formats.imported import Imported, Unsupported, lint_imported
from pytest_klineage.formats.kernelbench import candidate_of, import_problem, read_problem
from pytest_klineage.formats.trace_export import definition_of, solution_of, trace_of, traces_jsonl
from pytest_klineage.formats.trace_import import import_definition, source_of
from pytest_klineage.formats.trace_records import Definition, Solution, Trace, TraceSet, Workload, read_trace_set

__all__ = [
    "Definition",
    "Imported",
    "Solution",
    "Trace",
    "TraceSet",
    "Unsupported",
    "Workload",
    "candidate_of",
    "definition_of",
    "import_definition",
    "import_problem",
    "lint_imported",
    "read_problem",
    "read_trace_set",
    "solution_of",
    "source_of",
    "trace_of",
    "traces_jsonl",
]
