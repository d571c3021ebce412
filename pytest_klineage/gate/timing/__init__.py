"""Counts and order of timed calls, restarts of processes, intervals."""

from __future__ import annotations
