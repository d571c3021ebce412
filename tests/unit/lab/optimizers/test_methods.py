"""Every method can be made by its name, asks for what it needs, and is made again from what a run recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.optimizers.adaexplore.method import AdaExplore
from pytest_klineage.lab.optimizers.klineage import CardMethod
from pytest_klineage.lab.optimizers.methods import (
    COMPARED,
    METHOD_NAMES,
    MethodSettings,
    make_method,
    needs_cards,
    recorded_method,
)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_method_bears_the_name_that_it_is_made_by(name: str, tmp_path: Path) -> None:
    assert make_method(name, MethodSettings(rules_path=tmp_path / "rules.txt")).name == name
    assert recorded_method({"method": name}, 3).name == name


def test_the_four_that_are_compared_are_known_and_need_no_file() -> None:
    assert [make_method(name).name for name in COMPARED] == list(COMPARED)


def test_which_methods_need_cards() -> None:
    needing = {name for name in METHOD_NAMES if needs_cards(name)}
    assert {"klineage", "labels-only", "klineage-without-case"} <= needing
    assert not needing & {"generated-only", "adaexplore", "adaexplore-online", "accelopt"}


def test_settings_reach_their_method() -> None:
    method = make_method("klineage", MethodSettings(k=3, contaminated=False))
    assert isinstance(method, CardMethod)
    assert (method.k, method.contaminated) == (3, False)
    long = make_method("adaexplore", MethodSettings(max_steps=80))
    assert isinstance(long, AdaExplore)
    assert long.settings.total_steps == 80
    usual = make_method("adaexplore", MethodSettings(max_steps=3))
    assert isinstance(usual, AdaExplore)
    assert usual.settings.total_steps == 50


def test_what_cannot_be_made_is_said() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'accelopt'"):
        make_method("acelopt")
    with pytest.raises(UsageError, match="--rules=FILE"):
        make_method("adaexplore-shared")
    with pytest.raises(UsageError, match="names no method"):
        recorded_method({}, 1)
