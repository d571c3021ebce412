"""Importing what the extra `external` brings, where it is used. Nothing else lives here."""

from __future__ import annotations

import importlib
from typing import Any

from pytest_klineage.errors import MissingDependency


def package(name: str) -> Any:
    """A module of Starlette, uvicorn or httpx, such as "starlette.routing". Raises MissingDependency."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f"the package {name.partition('.')[0]}"
        raise MissingDependency(what, "pip install 'pytest-klineage[external]'") from error
