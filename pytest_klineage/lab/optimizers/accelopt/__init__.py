"""AccelOpt, a published optimizer, as a method. docs/concepts/baselines.md says where it differs from its release."""

from __future__ import annotations

from pytest_klineage.lab.optimizers.accelopt.method import AccelOpt
from pytest_klineage.lab.optimizers.accelopt.settings import AccelOptSettings

__all__ = ["AccelOpt", "AccelOptSettings"]
