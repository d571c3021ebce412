"""Options of pytest that commands take as well, with and without `klineage-`, and the gate's settings from them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_klineage.gate import GateSettings
    from pytest_klineage.plugin.options import Option

GATE_OPTIONS = ("platform", "threads", "time-limit", "precision", "busy-limit", "spread-limit", "cache-dir")
"""Those of a judgement outside of pytest."""


def add_gate_options(parser: argparse.ArgumentParser, platform: str = "auto") -> None:
    """The options that choose the gate; `platform` is the default of theirs."""
    from pytest_klineage.plugin.options import OPTIONS

    chosen = [one for one in OPTIONS if one.name in GATE_OPTIONS]
    chosen = [replace(one, help=one.help.replace("default: auto", f"default: {platform}")) for one in chosen]
    add_options(parser.add_argument_group("the gate"), chosen)
    parser.set_defaults(klineage_platform=platform)


def add_options(group: argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """Options of pytest as those of a command."""
    for option in options:
        group.add_argument(
            f"--{option.name}", option.flag, dest=option.key, metavar=option.metavar, type=option.parse,
            help=option.help.replace("%", "%%"),
        )  # fmt: skip


def given(arguments: argparse.Namespace, name: str) -> Any:
    """The value of an option; None where it was not given."""
    return getattr(arguments, f"klineage_{name.replace('-', '_')}")


def given_settings(arguments: argparse.Namespace) -> GateSettings:
    """The gate's settings, with its own defaults for what was not given."""
    from pytest_klineage.gate import GateSettings
    from pytest_klineage.plugin.options import GATE_KEYS

    values = {name: given(arguments, name) for name in GATE_OPTIONS if name in GATE_KEYS}
    settings = {GATE_KEYS[name]: value for name, value in values.items() if value is not None}
    if "cache_dir" in settings:
        settings["cache_dir"] = Path(settings["cache_dir"]).absolute()
    return GateSettings(**settings)
