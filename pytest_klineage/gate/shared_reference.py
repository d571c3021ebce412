"""What screenings of one case share of their reference: its choice of a variant, its kernels' names, and its process.

A full judgement starts its own, and compares the variants again.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import msgspec

from pytest_klineage.errors import HarnessError
from pytest_klineage.gate.supervise import CALL_SLACK_S, Processes, Worker
from pytest_klineage.records import KernelCase, KernelTime
from pytest_klineage.records.messages import Attached, Detach, Job


class KeptReference(NamedTuple):
    """The process of a reference with which the next screening of its case goes on."""

    worker: Worker
    job: Job
    said: dict[str, str]
    """What it said of itself when it had loaded."""


class SharedReference:
    """Kept by a gate between judgements, for screenings. One process at a time is kept."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._said: dict[bytes, dict[str, str]] = {}
        self._kernels: dict[tuple[bytes, str], tuple[KernelTime, ...]] = {}
        self._kept: KeptReference | None = None

    def note(self, case: KernelCase, said: dict[str, str]) -> None:
        """Remember what a reference said of itself when it had loaded."""
        self._said[_key(case)] = said

    def chosen(self, case: KernelCase) -> dict[str, str]:
        """What it said when its variants were last compared on this case; empty where they were not."""
        said = self._said.get(_key(case), {})
        return said if "variant" in said else {}

    def name(self, case: KernelCase, facts: dict[str, str], kernels: tuple[KernelTime, ...]) -> None:
        """Remember what the device executes for a variant."""
        self._kernels[_key(case), facts.get("variant", "")] = kernels

    def kernels(self, case: KernelCase, facts: dict[str, str]) -> tuple[KernelTime, ...]:
        """What the device executes for a variant; empty where that was not traced."""
        return self._kernels.get((_key(case), facts.get("variant", "")), ())

    def keep(self, worker: Worker, job: Job, said: dict[str, str]) -> None:
        """Keep a process that the oracle stays attached to."""
        self._kept = KeptReference(worker, job, said)

    def take(self, job: Job) -> KeptReference | None:
        """The process that was kept, if its job is this one."""
        if self._kept is None or self._kept.job != job:
            self.end()
        kept, self._kept = self._kept, None
        return kept

    def end(self, *, but_for: KernelCase | None = None) -> None:
        """End the process that was kept, unless it is one for this case."""
        kept = self._kept
        if kept is None or kept.job.case == but_for:
            return
        self._processes.ask_oracle(Detach(role="reference"), Attached, CALL_SLACK_S)
        with contextlib.suppress(HarnessError):
            kept.worker.end()
        self._kept = None

    def discard(self) -> None:
        """Forget the process that was kept; its template ends it, or is gone."""
        if self._kept is not None:
            self._kept.worker.discard()
            self._kept = None


def _key(case: KernelCase) -> bytes:
    return msgspec.json.encode(case)
