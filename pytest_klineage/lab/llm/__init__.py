"""Language models: where replies come from, what they cost, what is recorded."""

from __future__ import annotations
