"""AdaExplore, a published optimizer, as a method. docs/concepts/baselines.md says where it differs from its release."""

from __future__ import annotations

from pytest_klineage.lab.optimizers.adaexplore.method import AdaExplore
from pytest_klineage.lab.optimizers.adaexplore.settings import AdaExploreSettings, MemoryMode

__all__ = ["AdaExplore", "AdaExploreSettings", "MemoryMode"]
