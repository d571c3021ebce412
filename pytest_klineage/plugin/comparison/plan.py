"""What a run is to be compared with, as its options say, and where its second judgements are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_klineage.plugin.options import COMPARING_NAMES, OPTIONS, given_path, option_value

if TYPE_CHECKING:
    from pytest_klineage.plugin.session import KlineageSession
    from pytest_klineage.records import Verdict
    from pytest_klineage.results.baselines import PinKey

AGAIN_KEY = pytest.StashKey[dict["PinKey", "Verdict"]]()
"""Second judgements of what is to be pinned."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the options ask for."""

    save: str
    compare: str
    base: Path | None
    summary: Path | None
    margin: float
    """Relative change of speed that counts."""
    failing: bool
    """Whether a kernel that is slower by more fails its test; else it is only reported."""


def read_plan(session: KlineageSession) -> Plan | None:
    """What was asked for; None for nothing. Raises pytest.UsageError for what does not fit together."""
    from pytest_klineage.report.compare import MARGIN, read_tolerance

    config = session.config
    given = {option.name: option_value(config, option) for option in OPTIONS if option.name in COMPARING_NAMES}
    if not any(given.values()):
        return None
    failing = given["compare-fail"]
    if failing and not (given["compare"] or given["base"]):
        raise pytest.UsageError("--klineage-compare-fail needs --klineage-compare=NAME or --klineage-base=DIR")
    timed = [name for name in ("save", "compare", "base") if given[name]]
    if timed and session.settings.gate.get("stage") == "compile":
        raise pytest.UsageError(f"--klineage-{timed[0]} is about times; --klineage-stage=compile takes none")
    return Plan(
        save=given["save"] or "",
        compare=given["compare"] or "",
        base=given_path(config, "base", given["base"]) if given["base"] else None,
        summary=given_path(config, "summary", given["summary"]) if given["summary"] else None,
        margin=read_tolerance(failing) if failing else MARGIN,
        failing=bool(failing),
    )
