"""What a user may set: every value that makes no sense is refused with the range or the names that do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.gate import DEFENCES, POLICIES, GateSettings
from pytest_klineage.gate.settings import MOST_CONFIDENCE, as_recorded, default_cache_dir
from pytest_klineage.records.bootstrap import tail_share

RANGES = {
    "margin": (0.0, 0.99),
    "busy_limit": (0.0, 1.0),
    "spread_limit": (1.01, 1e9),
    "precision": (1e-5, 1.0),
    "confidence": (0.5, 0.995),
    "time_limit_s": (0.05, 86400.0),
    "seeds": (1, 1000),
    "flush_bytes": (0, 1 << 40),
    "threads": (0, 4096),
    "build_timeout_s": (0.1, 86400.0),
    "load_timeout_s": (0.1, 86400.0),
    "run_timeout_s": (0.05, 86400.0),
}


def with_value(name: str, value: Any) -> GateSettings:
    return GateSettings(**{name: value})


def test_the_defaults_are_valid_and_switch_every_defence_on() -> None:
    settings = GateSettings()
    assert settings.policy == "paired"
    assert settings.defences == DEFENCES


def test_every_number_has_a_range() -> None:
    defaults = GateSettings()
    numbers = {
        name for name in GateSettings.__struct_fields__ if type(getattr(defaults, name)) in (int, float)
    }  # fmt: skip
    assert numbers | {"flush_bytes"} == set(RANGES)
    assert defaults.flush_bytes is None


@pytest.mark.parametrize(("name", "bounds"), RANGES.items())
def test_the_ends_of_a_range_are_valid(name: str, bounds: tuple[float, float]) -> None:
    for value in bounds:
        assert getattr(with_value(name, value), name) == value


@pytest.mark.parametrize(("name", "bounds"), RANGES.items())
def test_a_number_out_of_range_is_refused_with_the_range(name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    step = 1 if isinstance(low, int) else 1e-6
    for value in (low - step, high + step, -1, math.inf, -math.inf, math.nan):
        with pytest.raises(UsageError) as caught:
            with_value(name, value)
        assert name in str(caught.value)
        assert f"{low:g} and {high:g}" in str(caught.value)


def test_the_most_confidence_leaves_resamples_beyond() -> None:
    """Where pairs are many; how few it leaves of few stands beside the number."""
    beyond = [2000 * tail_share(MOST_CONFIDENCE, pairs) for pairs in (100_000, 32, 24, 12)]
    assert beyond == pytest.approx([5.0, 2.1, 1.5, 0.3], abs=0.05)


@pytest.mark.parametrize(("asked", "judged"), [(0.95, 0.95), (0.995, 0.995), (0.996, 0.995), (0.9999, 0.995)])
def test_a_recorded_confidence_is_read_as_the_most(asked: float, judged: float) -> None:
    recorded = {"confidence": asked, "seeds": 2}
    assert as_recorded(recorded) == {"confidence": judged, "seeds": 2}
    assert recorded["confidence"] == asked


@pytest.mark.parametrize("recorded", [{"confidence": 0.99991}, {"confidence": math.nan}, {"confidence": "0.999"}, {}])
def test_what_was_never_valid_is_left_as_it_is(recorded: dict[str, Any]) -> None:
    assert as_recorded(recorded) is recorded


@pytest.mark.parametrize("field", ["policy", "also_policies"])
def test_an_unknown_policy_is_refused_with_the_names(field: str) -> None:
    value = "pared" if field == "policy" else ("paper", "pared")
    with pytest.raises(UnknownName) as caught:
        with_value(field, value)
    assert all(name in str(caught.value) for name in POLICIES)


def test_an_unknown_defence_is_refused_with_the_names() -> None:
    with pytest.raises(UnknownName) as caught:
        GateSettings(defences=frozenset({"sandbox", "moat"}))
    assert "moat" in str(caught.value)
    assert all(name in str(caught.value) for name in DEFENCES)


@pytest.mark.parametrize("defence", sorted(DEFENCES))
def test_every_defence_can_be_switched_off(defence: str) -> None:
    assert defence not in GateSettings(defences=DEFENCES - {defence}).defences


def test_the_cache_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "pytest-klineage"
    assert GateSettings().cache_dir == tmp_path / "pytest-klineage"


def test_the_cache_lies_in_the_home_directory_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "pytest-klineage"
