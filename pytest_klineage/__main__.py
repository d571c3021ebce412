"""`python -m pytest_klineage` is the command `pytest-klineage`."""

from __future__ import annotations

import sys

from pytest_klineage.cli.main import main

sys.exit(main())
