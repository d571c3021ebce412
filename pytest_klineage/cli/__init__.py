"""The command pytest-klineage: `main` parses and dispatches, the other files are its subcommands."""

from __future__ import annotations
