"""What head_to_head and ablations share: what a run has recorded, its task, its judge, and how it screens."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_klineage import Gate, KernelCase, KernelSource, KlineageSession, Verdict
from pytest_klineage.executors.base import ExecutorGate
from pytest_klineage.lab.library.experts import Expert
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.optimizers.instructions import instructions_for, machine_text
from pytest_klineage.lab.optimizers.recording import Recording
from pytest_klineage.lab.optimizers.session import Judge, Screen
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.lab.plugin import Models
from pytest_klineage.results.runs import append_record

NAIVE = "naive"
"""The kernel that every run begins with."""


def recorded_so_far(models: Models, name: str) -> Recording:
    """What a run has recorded; nothing for a new one."""
    events = [line.event for line in read_trajectory(models.path(name))[0]] if models.is_recorded(name) else []
    return Recording(events)


def task_of(
    session: KlineageSession, expert: Expert, case: KernelCase, features: tuple[str, ...], *, reference: str = "",
    seed: int = 0,
) -> Task:  # fmt: skip
    """From a folder's naive kernel on. `reference` says whom it is timed against where that is not the case's own."""
    root = expert.source(NAIVE)
    described = machine_text(session.gate.machine(), threads=session.gate_settings.threads, features=features)
    text = instructions_for(
        case, expert.surface, session.platform, root.entry, root.flags, machine=described, reference=reference
    )
    return Task(case=case, platform=session.platform, surface=expert.surface, root=root, instructions=text, seed=seed)


def judging(
    session: KlineageSession, gate: Gate | ExecutorGate, nodeid: str, *, label: str = "",
    against: KernelSource | None = None, keep: Path | None = None,
) -> Judge:  # fmt: skip
    """A judge that shows its progress, and keeps every verdict: in the run store, and with its samples in `keep`.

    `label` is for kernels without one; `against` stands in for the case's reference.
    """

    def judge(case: KernelCase, source: KernelSource) -> Verdict:
        source = msgspec.structs.replace(source, label=source.label or label)
        if session.progress is not None:
            session.progress.begin(f"{case.id} {source.label}")
        try:
            verdict = gate.judge(case, source, reference_source=against)
        finally:
            if session.progress is not None:
                session.progress.end()
        session.remember(nodeid, verdict)
        if keep is not None:
            append_record(keep, nodeid, verdict)
        return verdict

    return judge


def screening(gate: Gate | ExecutorGate, *, label: str = "", against: KernelSource | None = None) -> Screen:
    """A judge that screens. What it says is in the trajectory only, since its speedups are not for publication."""

    def screen(case: KernelCase, source: KernelSource, best: float) -> Verdict:
        labelled = msgspec.structs.replace(source, label=source.label or label)
        return gate.judge(case, labelled, reference_source=against, screen_against=best)

    return screen
