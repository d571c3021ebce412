"""The machine that kernels are judged on: CPU, GPUs, driver, clocks, neighbours, locks."""

from __future__ import annotations
