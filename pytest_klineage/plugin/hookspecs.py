"""Hooks that this plugin calls, for other plugins and conftest files. They receive facts, and decide nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from pytest_klineage.records import KernelCase, KernelSource, Verdict


def pytest_klineage_judged(
    item: pytest.Item, case: KernelCase, source: KernelSource, verdict: Verdict,
    reference_source: KernelSource | None, platforms: tuple[str, ...], paths: tuple[Path, ...],
) -> None:  # fmt: skip
    """A kernel of this test has been judged, in the process that runs the test; the verdict is already recorded.

    reference_source: the kernel that took the reference's place, if one did.
    platforms: those that the kernel was written for; empty for all that its surface runs on.
    paths: where the kernel's files lie, in the source's order; empty where the test handed over text.
    """
