"""A worker's calls on a CPU: the loop, shared memory, returned tensors."""

from __future__ import annotations
