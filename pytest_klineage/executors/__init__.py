"""Where a judgement runs: in this process, or in batches on another machine. The gate itself is the same everywhere."""

from __future__ import annotations
