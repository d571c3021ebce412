"""The public names, loaded when they are first used; importing the package alone costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_klineage.errors import (
        BadRecord,
        DeadlineExceeded,
        HarnessError,
        KlineageError,
        MissingDependency,
        StoreError,
        UnknownName,
        UsageError,
        WorkerDied,
    )
    from pytest_klineage.gate import Gate, GateSettings, Progress
    from pytest_klineage.operators import make_case, paper_case
    from pytest_klineage.operators.define import OpenOperator, allclose, operator
    from pytest_klineage.plugin.judging import KernelGate
    from pytest_klineage.plugin.markers import kernel_case
    from pytest_klineage.plugin.session import KlineageSession
    from pytest_klineage.records import Code, KernelCase, KernelSource, Machine, Reason, Status, Timing, Verdict
    from pytest_klineage.results.runs import Record, Run, read_run
    from pytest_klineage.surfaces import read_source

__version__ = "0.2.0"

__all__ = [
    "BadRecord",
    "Code",
    "DeadlineExceeded",
    "Gate",
    "GateSettings",
    "HarnessError",
    "KernelCase",
    "KernelGate",
    "KernelSource",
    "KlineageError",
    "KlineageSession",
    "Machine",
    "MissingDependency",
    "OpenOperator",
    "Progress",
    "Reason",
    "Record",
    "Run",
    "Status",
    "StoreError",
    "Timing",
    "UnknownName",
    "UsageError",
    "Verdict",
    "WorkerDied",
    "__version__",
    "allclose",
    "kernel_case",
    "make_case",
    "operator",
    "paper_case",
    "read_run",
    "read_source",
]

_HOMES = {
    "pytest_klineage.errors": (
        "BadRecord", "DeadlineExceeded", "HarnessError", "KlineageError", "MissingDependency", "StoreError",
        "UnknownName", "UsageError", "WorkerDied",
    ),
    "pytest_klineage.gate": ("Gate", "GateSettings", "Progress"),
    "pytest_klineage.operators": ("make_case", "paper_case"),
    "pytest_klineage.operators.define": ("OpenOperator", "allclose", "operator"),
    "pytest_klineage.plugin.judging": ("KernelGate",),
    "pytest_klineage.plugin.markers": ("kernel_case",),
    "pytest_klineage.plugin.session": ("KlineageSession",),
    "pytest_klineage.records": (
        "Code", "KernelCase", "KernelSource", "Machine", "Reason", "Status", "Timing", "Verdict",
    ),
    "pytest_klineage.results.runs": ("Record", "Run", "read_run"),
    "pytest_klineage.surfaces": ("read_source",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
