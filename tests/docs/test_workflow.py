"""The example workflow, held to what the package has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.plugin.options import OPTIONS

DOCS = Path(__file__).parents[2] / "docs"
WORKFLOW = DOCS / "examples" / "gate-kernels.yml"


def workflow() -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return found


def test_the_workflow_has_the_form_of_github() -> None:
    found = workflow()
    # YAML 1.1 reads the key `on` as true.
    assert set(found) == {"name", True, "permissions", "concurrency", "jobs"}
    assert "self-hosted" in found["jobs"]["gpu"]["runs-on"]
    assert found["jobs"]["cpu"]["runs-on"].startswith("ubuntu-")
    known = {"name", "runs-on", "timeout-minutes", "steps", "if", "concurrency"}
    for job in found["jobs"].values():
        assert set(job) <= known
        for step in job["steps"]:
            assert set(step) <= {"name", "uses", "with", "run", "if"}
            assert ("uses" in step) != ("run" in step)
            assert "@" in step.get("uses", "@")


def test_the_workflow_uses_options_that_there_are() -> None:
    commands = [step.get("run", "") for job in workflow()["jobs"].values() for step in job["steps"]]
    named = set(re.findall(r"--klineage-([a-z-]+)", " ".join(commands)))
    assert named
    assert named <= {option.name for option in OPTIONS}
