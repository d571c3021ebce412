"""The words of the project: frozen records without I/O and without torch. Everything that is stored or sent is one."""

from __future__ import annotations

from pytest_klineage.records.case import DTYPES, KernelCase, LibraryPolicy, Option
from pytest_klineage.records.codec import from_json, from_plain, json_schema, to_json, to_plain
from pytest_klineage.records.platform import PLATFORMS, Machine, platform_name
from pytest_klineage.records.signature import Arena, Placement, Signature, Slot, TensorSpec
from pytest_klineage.records.source import KernelSource, SourceFile, Surface
from pytest_klineage.records.usage import Usage
from pytest_klineage.records.verdict import (
    SCHEMA_VERSION,
    Build,
    Check,
    Code,
    Interval,
    Reason,
    Status,
    Timing,
    Verdict,
    speedup,
)

__all__ = [
    "DTYPES",
    "PLATFORMS",
    "SCHEMA_VERSION",
    "Arena",
    "Build",
    "Check",
    "Code",
    "Interval",
    "KernelCase",
    "KernelSource",
    "LibraryPolicy",
    "Machine",
    "Option",
    "Placement",
    "Reason",
    "Signature",
    "Slot",
    "SourceFile",
    "Status",
    "Surface",
    "TensorSpec",
    "Timing",
    "Usage",
    "Verdict",
    "from_json",
    "from_plain",
    "json_schema",
    "platform_name",
    "speedup",
    "to_json",
    "to_plain",
]
