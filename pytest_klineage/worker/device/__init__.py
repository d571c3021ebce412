"""A worker's calls on a GPU: the loop, device memory, blocks of calls."""

from __future__ import annotations
