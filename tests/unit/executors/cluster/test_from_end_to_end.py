"""pytest with --klineage-executor=ray, and the commands of the documentation, on a simulated cluster; all is real."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_klineage.executors.ray import RayExecutor

from .conftest import Nodes, judged_lines, until

Join = Callable[..., RayExecutor]
ROOT = Path(__file__).parents[4]
SUITE = """
import pytest
from pytest_klineage import kernel_case

@kernel_case((24, 16, 8), "fp32", op="gemm", at_least=0.0001)
@pytest.mark.parametrize("count", range(4))
def test_judged(kernel_gate, count):
    kernel_gate("kernel.cpp", flags=["-O2", f"-DCOUNT={count}"])

def test_other():
    pass
"""
OPTIONS = (
    "--klineage-platform=cpu", "--klineage-executor=ray", "--klineage-time-limit=1", "--klineage-precision=0.5",
    "--klineage-seeds=1", "--klineage-busy-limit=1", "--klineage-spread-limit=1e6",
)  # fmt: skip


@pytest.fixture(scope="module")
def documentation() -> ModuleType:
    """tests/docs, which executes pages."""
    spec = importlib.util.spec_from_file_location("documentation", ROOT / "tests" / "docs" / "test_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_on_clusters(documentation: ModuleType, join: Join, tmp_path: Path) -> None:
    join().close()
    documentation.execute(documentation.ON_A_CLUSTER, tmp_path)


def test_a_run_that_is_killed_goes_on(join: Join, nodes: Nodes, documentation: ModuleType, tmp_path: Path) -> None:
    """Killed when one verdict is there; the same command ends with every verdict, and no request was judged twice."""
    join(name="warm").close()
    page = documentation.blocks(documentation.ON_A_CLUSTER)
    kernel = next(block.text for block in page if "my_gemm.cpp" in block.info)
    (tmp_path / "kernel.cpp").write_text(kernel)
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *OPTIONS]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    answers = tmp_path / "results" / "judged"
    until(lambda: any(b"seal" in path.read_bytes() for path in answers.glob("*.jsonl")))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(1.0)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"5 passed", done.stdout)
    assert done.stdout.count("gemm-24x16x8") >= 1
    (kept,) = answers.glob("*.done.jsonl")
    assert not [path for path in answers.glob("*.jsonl") if path != kept]
    asked = set(re.findall(r'"asked":"([0-9a-f]{64})"', kept.read_text()))
    lines = judged_lines(nodes)
    assert [lines.count(digest) for digest in asked] == [1] * 4


def test_a_machine_outside_of_the_cluster_asks(
    join: Join, nodes: Nodes, documentation: ModuleType, tmp_path: Path
) -> None:
    """By ray://HOST:PORT, with the token."""
    join().close()
    for block in documentation.blocks(documentation.ON_A_CLUSTER):
        if title := re.search(r'title="(\w+\.(?:cpp|py))"', block.info):
            (tmp_path / title[1]).write_text(block.text)
    where = f"ray://127.0.0.1:{nodes.client_port}"
    options = [*OPTIONS, f"--klineage-executor={where}"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    outside = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_one_process_asks(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-n", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "leave out -n" in done.stderr
