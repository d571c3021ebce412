"""A Ray cluster on this machine: a head and four nodes with a fake GPU each, tokens on, and a secret for the judges.

The judges are real ones on the cpu platform, unless a test says that a stand-in takes their place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.executors.cluster import CPU_RESOURCE, PRODUCT, ClusterLimits, JudgeState
from pytest_klineage.executors.ray import NAME, NAMESPACE, RayExecutor, find_desk
from pytest_klineage.executors.ray_judge import Judge

LIMIT_S = 150.0
STORE_BYTES = 80 << 20
"""Least object store that Ray accepts."""
RAY_START_S = 120.0
CLIENT_PORTS = range(20000, 22000)


class Nodes:
    """The simulated cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.client_port = folder, free_port()
        self.environment = {
            "XDG_CACHE_HOME": str(folder / "cache"), "KLINEAGE_JUDGE_SECRET_FILE": str(folder / "secret"),
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_worker_niceness": "0",
            "RAY_health_check_period_ms": "1000", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        for name in ("secret", "token"):
            (folder / name).write_text(os.urandom(32).hex())
            (folder / name).chmod(0o600)

    def start(self, cluster: Any, products: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.environment["RAY_ADDRESS"] = cluster.address
        for product in products:
            self.add(product, wait=False)
        cluster.wait_for_nodes(RAY_START_S)

    def add(self, product: str, *, wait: bool = True) -> Any:
        """One more node with a fake GPU, which judges for the cpu platform."""
        resources = {CPU_RESOURCE: 1} | ({f"{PRODUCT}{product}": 1} if product else {})
        return self.cluster.add_node(
            wait=wait, num_cpus=1, num_gpus=1, resources=resources, object_store_memory=STORE_BYTES
        )

    def judge_pids(self, name: str) -> list[int]:
        """Processes of the judges' class."""
        found = subprocess.run(["pgrep", "-f", f"^ray::{name}"], capture_output=True, text=True, check=False)
        return [int(line) for line in found.stdout.split()]


def free_port() -> int:
    """A free port, outside of those that Ray gives its workers."""
    for port in range(CLIENT_PORTS.start + os.getpid() % 1000, CLIENT_PORTS.stop):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra ray")
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("a cluster has this machine to itself: make test-ray")
    folder = Path(tempfile.mkdtemp(prefix="klineage-", dir="/tmp"))  # sockets have paths of at most 107 bytes
    found = Nodes(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster  # Ray reads its mode of authentication when it is imported

        head = {
            "num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False,
            "ray_client_server_port": found.client_port,
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves the logs of its client server open
            cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            found.start(cluster, ("", "", "", ""))
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield found
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def join(nodes: Nodes, tmp_path: Path) -> Iterator[Callable[..., RayExecutor]]:
    """Joins the cluster as a run does; a desk of its own for each test."""
    import ray

    joined: list[RayExecutor] = []

    def build(
        limits: ClusterLimits | None = None, judge_class: type = Judge, *, name: str = "run", product: str = ""
    ) -> RayExecutor:
        if not ray.is_initialized():
            ray.init(address="auto", namespace="klineage", log_to_driver=False, logging_level="ERROR")
        find_desk(limits or ClusterLimits(alone_s=5.0), judge_class)
        joined.append(RayExecutor("ray", "cpu", tmp_path / f"{name}.jsonl", product=product))
        return joined[-1]

    yield build
    if not ray.is_initialized():
        ray.init(address="auto", namespace="klineage", log_to_driver=False, logging_level="ERROR")
    end_desk()
    for executor in joined:
        executor.answers.close()
    ray.shutdown()
    shutil.rmtree(nodes.folder / "cache" / "pytest-klineage" / "judges", ignore_errors=True)


def end_desk() -> None:
    """End the desk and its judges, and wait until its name is free."""
    import ray

    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(NAME, namespace=NAMESPACE))
    until(lambda: not any(actor["name"] == NAME for actor in ray.util.list_named_actors(all_namespaces=True)))


def until(true: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def finish(executor: RayExecutor, limit_s: float = LIMIT_S) -> None:
    """Collect until nothing is open."""
    deadline = time.monotonic() + limit_s
    while executor.num_open:
        executor.collect(0.5)
        assert time.monotonic() < deadline, executor.state()


def judges(executor: RayExecutor, state: str = "") -> list[JudgeState]:
    """The judges in a state, or all."""
    return [judge for judge in executor.state().judges if state in ("", judge.state)]


def judged_lines(nodes: Nodes) -> list[str]:
    """What all judges have written on their disks: digests of replies, canaries included."""
    found = []
    for path in (nodes.folder / "cache" / "pytest-klineage" / "judges").glob("*.jsonl"):
        for line in path.read_bytes().splitlines():
            found.append(msgspec.json.decode(line)["content"]["request"])
    return found


PYTHON = sys.executable
