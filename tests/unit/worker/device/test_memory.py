"""What keeps CUDA away is said with its remedy. The memory itself needs a GPU: tests/gpu has that."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from pytest_klineage.errors import MissingDependency
from pytest_klineage.worker.device import memory


def test_a_torch_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependency, match=r"a PyTorch that sees the GPU is missing.*doctor"):
        memory.initialise()


def test_absent_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"cuda-bindings.*pytest-klineage\[cuda\]"):
        memory.initialise()


def test_the_error_survives_the_way_between_processes() -> None:
    error = MissingDependency("a thing", "pip install 'a thing'")
    again = MissingDependency.parsed(str(error))
    assert (again.what, again.remedy, str(again)) == (error.what, error.remedy, str(error))
