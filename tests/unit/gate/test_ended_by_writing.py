"""What a candidate is called that ended by a signal of memory: it writes to its inputs only if it does so again."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_klineage.gate.judgement import Judgement
from pytest_klineage.gate.rejection import Rejected
from pytest_klineage.records import Code, LibraryPolicy, Reason, Surface
from pytest_klineage.records.messages import Attached

CRASH = Reason(code=Code.CRASH, message="ended by SIGSEGV", evidence={"signal": int(signal.SIGSEGV)})
ABORT = Reason(code=Code.CRASH, message="ended by SIGABRT", evidence={"signal": int(signal.SIGABRT)})
WRONG = Reason(code=Code.MISMATCH, message="error 3")
CHECKED: Any = "a check of the first process"


class Scripted(Judgement):
    """A judgement whose candidates end as they are listed, each in a process of its own; None is right."""

    def __init__(self, *ends: Reason | None, read_only: bool = True) -> None:
        self.ends, self.read_only = [*ends], read_only
        self.started: list[str] = []
        self.settings: Any = SimpleNamespace(defences=frozenset({"own_kernel", "input_integrity"}))
        self.source: Any = SimpleNamespace(surface=Surface.CPP)
        self.case: Any = SimpleNamespace(library=LibraryPolicy.FORBID)
        self.gate: Any = SimpleNamespace(host=SimpleNamespace(device="cpu"), report=lambda *_: None)
        self.processes: Any = SimpleNamespace(ask_oracle=lambda *_: None)
        self.workers, self.checks, self.notes, self.log = {}, [], [], ""

    def job(self, *_: Any, **__: Any) -> Any:
        return None

    def preload(self, *_: Any) -> str:
        return ""

    def start(self, role: str, *_: Any) -> Attached:
        self.started.append(role)
        self.workers[role] = SimpleNamespace(end=lambda: None)  # type: ignore[assignment]  # as far as is used
        return Attached(read_only=self.read_only and role == "candidate")

    def _check_all(self, *_: Any, **__: Any) -> None:
        self.checks.append(CHECKED)
        if (end := self.ends.pop(0)) is not None:
            self.log = "segmentation fault"
            raise Rejected(end)

    def code(self) -> Code:
        """What the first reason says."""
        with pytest.raises(Rejected) as caught:
            self._check_candidate(*[SimpleNamespace()] * 2)  # type: ignore[arg-type]  # not looked at
        assert self.ends == []
        return caught.value.reasons[0].code


def test_one_that_ends_twice_and_is_right_in_other_memory_writes() -> None:
    judged = Scripted(CRASH, CRASH, None)
    assert judged.code() is Code.INPUT_MUTATED
    assert judged.started == ["candidate", "candidate", "replay"]


@pytest.mark.parametrize("second", [None, WRONG, ABORT])
def test_one_that_ends_so_once_has_crashed(second: Reason | None) -> None:
    judged = Scripted(CRASH, second)
    assert judged.code() is Code.CRASH
    assert judged.started == ["candidate", "candidate"]
    assert (judged.checks, judged.log) == ([CHECKED], "segmentation fault")


def test_nothing_is_repeated_where_inputs_can_be_written_to() -> None:
    judged = Scripted(CRASH, read_only=False)
    assert judged.code() is Code.CRASH
    assert judged.started == ["candidate"]


def test_another_signal_is_a_crash() -> None:
    assert Scripted(ABORT).code() is Code.CRASH


@pytest.mark.parametrize("third", [CRASH, WRONG])
def test_what_is_wrong_in_other_memory_too_is_its_own_fault(third: Reason) -> None:
    assert Scripted(CRASH, CRASH, third).code() is third.code
