"""The gate: the only way a kernel is accepted. The judge's side of it; what runs elsewhere is in pytest_klineage.worker."""

from pytest_klineage.gate.devices import resolve_platform
from pytest_klineage.gate.judge import Gate, Progress
from pytest_klineage.gate.policy import POLICIES
from pytest_klineage.gate.settings import DEFENCES, GateSettings

__all__ = ["DEFENCES", "POLICIES", "Gate", "GateSettings", "Progress", "resolve_platform"]
