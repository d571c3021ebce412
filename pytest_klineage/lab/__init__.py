"""The laboratory: what learns from kernels. The gate does not import it."""

from __future__ import annotations
