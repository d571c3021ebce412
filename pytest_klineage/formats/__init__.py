"""Other projects' formats, in and out: problems become operators with cases, verdicts become traces."""

from __future__ import annotations

from pytest_klineage.formats.imported import Imported, Unsupported, lint_imported
from pytest_klineage.formats.kernelbench import candidate_of, read_problem, read_problems
from pytest_klineage.formats.trace_export import definition_of, solution_of, trace_of, traces_jsonl
from pytest_klineage.formats.trace_import import import_definition, source_of
from pytest_klineage.formats.trace_records import Solution, Trace, TraceDefinition, TraceSet, Workload, read_trace_set

__all__ = [
    "Imported",
    "Solution",
    "Trace",
    "TraceDefinition",
    "TraceSet",
    "Unsupported",
    "Workload",
    "candidate_of",
    "definition_of",
    "import_definition",
    "lint_imported",
    "read_problem",
    "read_problems",
    "read_trace_set",
    "solution_of",
    "source_of",
    "trace_of",
    "traces_jsonl",
]
