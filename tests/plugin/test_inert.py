"""A plugin that is installed and not used: silent, cheap, and out of the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "numpy",
    "tabulate",
    "msgspec",
    "asyncio",
    "multiprocessing",
    "pytest_klineage.gate",
    "pytest_klineage.lab.llm",
    "http",
    "sqlite3",
)


def test_importing_the_plugin_loads_nothing_heavy() -> None:
    code = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import pytest_klineage, pytest_klineage.plugin, pytest_klineage.lab.plugin\n"
        "new = set(sys.modules) - before\n"
        f"heavy = [name for name in {HEAVY!r} if name in new]\n"
        "assert not heavy, heavy\n"
        "assert len(new) < 30, sorted(new)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_that_uses_nothing_shows_and_writes_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_plain():
            for name in ("torch", "msgspec", "tabulate", "pytest_klineage.gate"):
                assert name not in sys.modules
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    assert [
        line for line in result.outlines if "klineage" in line and not line.startswith(("plugins:", "rootdir:"))
    ] == []
    assert not (pytester.path / "results").exists()


def test_help_lists_every_option_and_ini_key(pytester: pytest.Pytester) -> None:
    from pytest_klineage.lab.plugin import OPTIONS as LAB_OPTIONS
    from pytest_klineage.plugin.options import OPTIONS

    text = pytester.runpytest("--help").stdout.str()
    for option in OPTIONS + LAB_OPTIONS:
        assert option.flag in text
        assert option.key in text
        assert option.help[0].isupper()


def test_marker_and_fixtures_are_documented(pytester: pytest.Pytester) -> None:
    pytester.runpytest("--markers").stdout.fnmatch_lines(
        ['@pytest.mark.kernel_case(shape, dtype, ref="torch", *, op,*']
    )
    text = pytester.runpytest("--fixtures", "-q").stdout.str()
    for line in ("kernel_gate -- ", "klineage_case -- ", "klineage_session [[]session scope] -- "):
        assert line.replace("[[]", "[") in text


@pytest.mark.parametrize("absent", ["xdist", "benchmark", "terminal", "junitxml"])
def test_other_plugins_may_be_absent(fake_gate: Path, pytester: pytest.Pytester, absent: str) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("-p", f"no:{absent}", "--klineage-mode=record")
    assert result.ret == pytest.ExitCode.OK
    assert list((fake_gate / "results" / "runs").glob("*/records.jsonl"))


def test_it_works_when_loaded_by_name(
    fake_gate: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(SUITE)
    pytester.runpytest_subprocess("-p", "pytest_klineage.plugin").assert_outcomes(passed=1)


def test_warnings_as_errors_and_strict_markers(fake_gate: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    args = ("-W", "error", "--strict-markers", "--strict-config")
    pytester.runpytest_subprocess(*args).assert_outcomes(passed=1)


SUITE = """
from pytest_klineage import kernel_case

@kernel_case((8, 8, 8), "fp32", op="gemm")
def test_kernel(kernel_gate):
    assert kernel_gate("fast.cpp").ok
"""
