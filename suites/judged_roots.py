"""The kernel that many runs begin with, judged once: per machine and case when recording, per session in replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pytest_klineage import KernelCase, KernelSource, Verdict
from pytest_klineage.records import Machine
from pytest_klineage.results.packed import is_there, read_packed
from pytest_klineage.results.runs import Record

Judge = Callable[[KernelCase, KernelSource], Verdict]


def taking_known_root(judge: Judge, root: KernelSource, paths: Sequence[Path], machine: Machine) -> Judge:
    """A judge that takes the root's verdict from files of verdicts, if one of them is there and has it.

    A naive kernel may take a second a call, and a minute to be judged: once is enough for all runs that begin with it.
    """

    def judged(case: KernelCase, source: KernelSource) -> Verdict:
        known = _judged_before(paths, case, root.digest, machine) if source.digest == root.digest else None
        return known if known is not None else judge(case, source)

    return judged


def judging_once(judge: Judge, known: dict[tuple[str, str], Verdict]) -> Judge:
    """A judge for replays: a kernel that several runs have, such as the naive one, is judged in the first of them."""

    def once(case: KernelCase, source: KernelSource) -> Verdict:
        key = (case.id, source.digest)
        if key not in known:
            known[key] = judge(case, source)
        return known[key]

    return once


def _judged_before(paths: Sequence[Path], case: KernelCase, digest: str, machine: Machine) -> Verdict | None:
    """The last scored verdict of this kernel on this case and machine. Lines that cannot be read are passed over."""
    for path in filter(is_there, paths):
        for line in reversed(read_packed(path).splitlines()):
            if digest.encode() not in line:
                continue
            try:
                verdict = msgspec.json.decode(line, type=Record).verdict
            except msgspec.DecodeError:
                continue  # the last line of an interrupted run
            same_case = verdict.case == case and verdict.source_digest == digest
            if same_case and verdict.scored and verdict.machine is not None and _same(verdict.machine, machine):
                return verdict
    return None


def _same(one: Machine, other: Machine) -> bool:
    return (one.platform, one.device, one.cores) == (other.platform, other.device, other.cores)
