"""Comparisons of a run with saved baselines or with the base of a pull request."""

from __future__ import annotations
