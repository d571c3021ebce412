"""State of one pytest process: settings, the gate (started once, on demand), verdicts on their way to a report."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_klineage.errors import KlineageError, UsageError
from pytest_klineage.plugin.options import Settings, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_klineage.executors.base import Executor, ExecutorGate
    from pytest_klineage.executors.ray import RayExecutor
    from pytest_klineage.gate import Gate, GateSettings
    from pytest_klineage.plugin.progress import ProgressLine
    from pytest_klineage.records import KernelCase, KernelSource, Verdict

SESSION_KEY = pytest.StashKey["KlineageSession"]()


class KlineageSession:
    """State of the plugin in one process. `config.stash[SESSION_KEY]` holds it; making one costs nothing."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.settings: Settings = read_settings(config)
        self.num_cases = 0
        """Tests with a kernel_case that this process collected."""
        self.num_workers = 0
        """Processes that pytest-xdist started for this one."""
        self._gate: Gate | ExecutorGate | None = None
        self.waiting: list[tuple[str, str]] = []
        """Tests of this run whose turn ended at something that has not come yet: WAITS_FOR_..., and where."""
        self._gate_settings: GateSettings | None = None
        self._cluster: RayExecutor | None = None
        self._platform = ""
        self._progress: ProgressLine | None = None
        self._pending: list[dict[str, Any]] = []
        self._write: Callable[[str, Verdict], None] | None = None

    @property
    def mode(self) -> str:
        """ "gate" or "record"."""
        return self.settings.mode

    @property
    def methods(self) -> tuple[str, ...]:
        """Names given with --klineage-method, in the user's order."""
        return self.settings.methods

    @property
    def is_worker(self) -> bool:
        """True inside a process that pytest-xdist started."""
        return hasattr(self.config, "workerinput")

    @property
    def platform(self) -> str:
        """Canonical name of the platform; "auto" is resolved on first use. Raises UsageError.

        "auto" takes the GPU that the machine has, else the CPU.
        """
        if not self._platform:
            from pytest_klineage.gate import resolve_platform
            from pytest_klineage.gate.host.gpus import gpus_for

            found = resolve_platform(self.settings.platform)
            here = not self.elsewhere and self.settings.gate.get("stage") != "compile"
            if found != "cpu" and here and not self.is_worker:
                # Said before anything is collected: no GPU, another one, a driver that is too old. Not in a process of
                # pytest-xdist: one that ends while it starts is started again, without end where --tx is used.
                gpus_for(found)
            self._platform = found
        return self._platform

    @property
    def gate_settings(self) -> GateSettings:
        """The gate's settings. Raises UsageError for values that the gate refuses."""
        if self._gate_settings is None:
            from pytest_klineage.gate import GateSettings

            self._gate_settings = GateSettings(**self.settings.gate)
        return self._gate_settings

    @property
    def gate(self) -> Gate | ExecutorGate:
        """The gate of this process, started on first use and closed when the session ends."""
        if self._gate is None:
            self._gate = self.gate_with(self.gate_settings)
        return self._gate

    def gate_with(self, settings: GateSettings) -> Gate | ExecutorGate:
        """A gate with other settings, where --klineage-executor says; close it. Raises UsageError.

        One that judges elsewhere raises WaitsForVerdict for what has not been judged yet.
        """
        if self.elsewhere and settings.stage == "all":
            from pytest_klineage.executors.base import ExecutorGate

            chosen = self.settings
            product = self.cluster.product if chosen.ray else chosen.product
            return ExecutorGate(self.executor, self.platform, settings, priority=chosen.priority, product=product)
        from pytest_klineage.gate import Gate

        return Gate(self.platform, settings, progress=self.progress)

    @property
    def elsewhere(self) -> bool:
        """Whether kernels are judged outside of this process, so that what has not come yet is waited for."""
        return self.settings.batch is not None or bool(self.settings.ray)

    @property
    def executor(self) -> Executor:
        """Who judges elsewhere."""
        if self.settings.ray:
            return self.cluster
        from pytest_klineage.executors.batch import BatchFolder

        return BatchFolder(self.settings.batch or Path())

    @property
    def cluster(self) -> RayExecutor:
        """The Ray cluster, joined on first use. The file of answers is named by the command: the same one goes on."""
        if self._cluster is None:
            from pytest_klineage.executors.ray import RayExecutor

            command = repr((self.config.invocation_params.args, str(self.config.invocation_params.dir)))
            name = hashlib.sha256(command.encode()).hexdigest()[:16]
            answers = self.settings.results / "judged" / f"{name}.jsonl"
            chosen = self.settings
            self._cluster = RayExecutor(chosen.ray, self.platform, answers, product=chosen.product)
        return self._cluster

    @property
    def joined_cluster(self) -> RayExecutor | None:
        """The Ray cluster, when this run has joined it."""
        return self._cluster

    @property
    def progress(self) -> ProgressLine | None:
        """Where live progress goes, or None without one."""
        if self._progress is None:
            from pytest_klineage.plugin.progress import make_progress

            self._progress = make_progress(self.config, self.settings.progress)
        return self._progress

    def note_given(self, names: tuple[str, ...]) -> None:
        """Count options of another plugin as given, and check what there is to check. Raises pytest.UsageError."""
        self.settings = replace(self.settings, given=(*self.settings.given, *names))
        self.check()

    def check(self) -> None:
        """Raise pytest.UsageError unless platform, policies and values exist. Starts nothing."""
        if self.settings.product and not self.settings.ray:
            raise pytest.UsageError("--klineage-gpu-product chooses among the nodes of --klineage-executor=ray")
        if self.settings.ray and (self.is_worker or self.config.getoption("numprocesses", None)):
            raise pytest.UsageError("with --klineage-executor=ray one process asks: leave out -n")
        if self.elsewhere and (other := set(self.settings.given) & {"save", "compare", "base"}):
            raise pytest.UsageError(
                f"--klineage-{min(other)} judges more than once in one run: use it where the GPU is"
            )
        try:
            _ = self.platform, self.gate_settings
        except KlineageError as error:
            raise pytest.UsageError(str(error)) from None

    def write_with(self, write: Callable[[str, Verdict], None]) -> None:
        """Hand every verdict to `write` at once: for the process that owns the run store."""
        self._write = write

    def judge(
        self, case: KernelCase, source: KernelSource, *, reference_source: KernelSource | None = None,
        platforms: tuple[str, ...] = (), title: str = "", precision: float | None = None,
    ) -> Verdict:  # fmt: skip
        """The gate's verdict, with `title` on the progress line meanwhile. Raises KlineageError."""
        if self.progress is not None:
            self.progress.begin(title or f"{case.id} {source.label}".rstrip())
        try:
            return self.gate.judge(
                case, source, reference_source=reference_source, platforms=platforms, precision=precision
            )
        finally:
            if self.progress is not None:
                self.progress.end()

    def remember(self, nodeid: str, verdict: Verdict) -> None:
        """Write a verdict down where this process can, and keep it for the report of the test.

        Raises UsageError for a screened one, whose speedup is not for publication.
        """
        from pytest_klineage.records import to_plain

        if verdict.screened is not None:
            raise UsageError(f"the verdict on {verdict.label or 'the kernel'} is a screening: judge it in full")
        if self._write is not None:
            self._write(nodeid, verdict)
        self._pending.append({"nodeid": nodeid, "verdict": to_plain(verdict)})

    def take_pending(self) -> list[dict[str, Any]]:
        """Verdicts since the last call, as plain data."""
        taken, self._pending = self._pending, []
        return taken

    def close(self) -> None:
        """End the gate's processes; a second call does nothing."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()
