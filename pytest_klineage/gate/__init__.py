"""The gate, the only way a kernel is accepted: the judge's side; what runs elsewhere is in pytest_klineage.worker."""

from __future__ import annotations

from pytest_klineage.gate.context import Progress
from pytest_klineage.gate.host.platforms import resolve_platform
from pytest_klineage.gate.judge import Gate
from pytest_klineage.gate.settings import DEFENCES, GateSettings
from pytest_klineage.gate.timing.policy import POLICIES

__all__ = ["DEFENCES", "POLICIES", "Gate", "GateSettings", "Progress", "resolve_platform"]
