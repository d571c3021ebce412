"""The page of platforms and the example workflow, held to what the package has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.plugin.options import OPTIONS
from pytest_klineage.records import GPU_PLATFORMS, GpuPlatform

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "platforms.md").read_text().splitlines()
WORKFLOW = DOCS / "examples" / "gate-kernels.yml"


def cells(first: str) -> list[str]:
    """The row that begins with a cell."""
    (line,) = (line for line in PAGE if line.startswith(f"| {first} |"))
    return [cell.strip(" `") for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("item", GPU_PLATFORMS.values(), ids=lambda item: item.name)
def test_a_platform_has_its_row(item: GpuPlatform) -> None:
    row = cells(f"`{item.name}`")
    least = ".".join(map(str, item.toolkit))
    assert row[1:6] == [item.title, item.capability, f"sm_{item.target}", least, str(item.shared_bytes)]
    (known,) = (line for line in PAGE if line.startswith(f"- `{item.name}`: "))
    assert known.partition(": ")[2].split(", ") == [product.name.removeprefix("NVIDIA ") for product in item.products]


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
