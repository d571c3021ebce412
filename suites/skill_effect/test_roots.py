"""The naive kernels that every chain begins with: right, built without a GPU, and how much slower than the reference.

pytest suites/skill_effect/test_roots.py --platform sm90 --klineage-stage compile
pytest suites/skill_effect/test_roots.py --platform sm90 --klineage-executor batch:JUDGE     # once; then judge JUDGE
"""

from __future__ import annotations

import pytest
from design import Design, read_design
from running import Runner

from pytest_klineage.lab.studies.chains import root_speeds


@pytest.mark.parametrize("target", read_design().targets)
def test_root(target: str, design: Design, runner: Runner) -> None:
    """The root is right. Its speed stands in for chains without a right kernel."""
    if design.case(target).id in root_speeds(runner.verdicts):
        pytest.skip(f"{runner.verdicts} has it")
    verdict = runner.judging(design.gate)(design.case(target, of_root=True), design.root(target))
    assert verdict.ok, f"{verdict.code.value}: {verdict.reasons[0].message}"
