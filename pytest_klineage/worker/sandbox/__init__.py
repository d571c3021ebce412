"""What a worker may not do: containment of its process, refusal of the framework."""

from __future__ import annotations
