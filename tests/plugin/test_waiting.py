"""Tests that wait for verdicts of a cluster: run again when these have come, and what is kept of a run that stops."""

from __future__ import annotations

import pytest

CLUSTER = """
import pathlib

import pytest_klineage.executors.ray as ray


class PretendedCluster:
    product = ""

    def __init__(self, *where, **chosen):
        pass

    def collect(self, wait_s):
        return {"first", "second", "third"}

    def doubt_lines(self):
        return []

    def finish(self):
        pathlib.Path("finished").touch()

    def close(self):
        pass


ray.RayExecutor = PretendedCluster
"""
SUITE = """
import pytest

from pytest_klineage.errors import WaitsForVerdict

ASKED = set()

@pytest.mark.parametrize("request_digest", ["first", "second", "third"])
def test_judged(request_digest):
    if request_digest not in ASKED:
        ASKED.add(request_digest)
        raise WaitsForVerdict("ray", "later", request_digest)
    assert request_digest != "second"
"""


@pytest.mark.parametrize(("options", "passed", "finished"), [((), 2, True), (("-x",), 1, False)])
def test_a_run_that_stops_keeps_its_answers(
    pytester: pytest.Pytester, options: tuple[str, ...], passed: int, finished: bool
) -> None:
    """All verdicts have come at once; what has not run with its own yet is not over."""
    pytester.makeconftest(CLUSTER)
    pytester.makepyfile(test_suite=SUITE)
    result = pytester.runpytest_subprocess("--klineage-executor=ray", "--klineage-platform=cpu", *options)
    result.assert_outcomes(passed=passed, failed=1)
    assert (pytester.path / "finished").exists() is finished
