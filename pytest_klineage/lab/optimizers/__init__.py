"""Optimizers: one loop for every method that writes kernels with a model, and the methods."""

from __future__ import annotations
