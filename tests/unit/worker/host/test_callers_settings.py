"""What calls leave changed of PyTorch's settings, and what a kernel may set when it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from pytest_klineage.records.messages import CALLERS_SETTINGS, FRAMEWORK_SETTINGS
from pytest_klineage.worker.host.callers_settings import CallersSettings, FrameworkSettings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The settings of this process stay what they are."""
    threads = torch.get_num_threads()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


CHANGES: list[tuple[str, Callable[[], object]]] = [
    ("PyTorch's default type", lambda: torch.set_default_dtype(torch.float64)),
    ("PyTorch's gradients", lambda: torch.set_grad_enabled(False)),
    ("number of PyTorch's threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_change_is_seen_and_named(name: str, change: Callable[[], object]) -> None:
    settings = CallersSettings()
    assert settings.changed() == 0
    change()
    assert [one for i, one in enumerate(CALLERS_SETTINGS) if settings.changed() >> i & 1] == [name]
    assert CallersSettings().changed() == 0


def test_every_setting_has_a_change() -> None:
    assert [name for name, _change in CHANGES] == [*FRAMEWORK_SETTINGS]


def test_what_is_put_back_is_no_change() -> None:
    settings = CallersSettings()
    with torch.no_grad(), torch.inference_mode():
        assert settings.changed()
    assert settings.changed() == 0


def test_threads_may_be_chosen_once() -> None:
    settings = FrameworkSettings()
    for _name, change in CHANGES:
        change()
    settings.keep_threads()
    assert settings.changed() == 0b011
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert settings.changed() == 0b111


def test_without_the_framework_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    settings = FrameworkSettings()
    settings.keep_threads()
    torch.set_grad_enabled(False)
    assert settings.changed() == 0
