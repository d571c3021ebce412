"""The stages of a judgement: audit, build, sanitize, time, attribute."""

from __future__ import annotations
