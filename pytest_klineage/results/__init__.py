"""What is kept on disk: runs, baselines, and how records become files."""

from __future__ import annotations
