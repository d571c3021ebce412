"""Language models: where replies come from, what they cost, what is recorded. What is asked is said elsewhere."""

from __future__ import annotations
