"""For this repository only: the pytester fixture and the short option `--platform`. No fixtures live here."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    # The installed plugin must not claim so common a name: two registrants of one option stop pytest at its start.
    parser.addoption(
        "--platform",
        dest="klineage_platform",
        metavar="NAME",
        default=None,
        help="Short for --klineage-platform.",
    )
