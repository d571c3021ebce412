"""Statistics of experiments with methods and cards: paired by target and repeat."""

from __future__ import annotations
