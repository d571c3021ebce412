"""What a thread's control registers say: a change is named, and gone once it is taken back."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import pytest

from pytest_klineage.records.messages import DENORMALS, FLOAT_CONTROL
from pytest_klineage.worker.host import float_control
from pytest_klineage.worker.host.float_control import FloatControl

MATHEMATICS = ctypes.CDLL(None)
KNOWN = platform.machine() in float_control.MASKS
DOWNWARD = {"x86_64": 0x400, "aarch64": 0x800000}
INVALID = 1
"""FE_INVALID of both."""


@pytest.fixture
def _restored() -> Iterator[None]:
    before = ctypes.create_string_buffer(64)
    MATHEMATICS.fegetenv(before)
    yield
    MATHEMATICS.fesetenv(before)


@pytest.mark.skipif(not KNOWN, reason="another processor")
@pytest.mark.usefixtures("_restored")
def test_another_rounding_mode_is_seen_until_it_is_taken_back() -> None:
    control = FloatControl()
    assert control.changed() == 0
    MATHEMATICS.fesetround(DOWNWARD[platform.machine()])
    assert control.changed() == 1 << FLOAT_CONTROL.index("rounding")
    assert FloatControl().changed() == 0
    MATHEMATICS.fesetround(0)
    assert control.changed() == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor")
@pytest.mark.usefixtures("_restored")
def test_exceptions_that_end_a_process_are_seen() -> None:
    control = FloatControl()
    MATHEMATICS.feenableexcept(INVALID)
    found = control.changed()
    MATHEMATICS.fedisableexcept(INVALID)
    assert found == 1 << FLOAT_CONTROL.index("floating-point exceptions")


def test_flags_of_past_exceptions_are_no_change() -> None:
    control = FloatControl()
    MATHEMATICS.feraiseexcept(4)
    assert control.changed() == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor")
@pytest.mark.usefixtures("_restored")
def test_denormals_that_are_flushed_are_seen() -> None:
    torch = pytest.importorskip("torch")
    control = FloatControl()
    torch.set_flush_denormal(True)
    found = control.changed()
    torch.set_flush_denormal(False)
    assert found == 1 << FLOAT_CONTROL.index("denormal numbers")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor")
@pytest.mark.usefixtures("_restored")
def test_only_denormals_can_be_taken_for_what_they_were() -> None:
    torch = pytest.importorskip("torch")
    control = FloatControl()
    assert not control.keep(DENORMALS)
    torch.set_flush_denormal(True)
    MATHEMATICS.fesetround(DOWNWARD["x86_64"])
    assert control.keep(DENORMALS)
    assert control.changed() == 1 << FLOAT_CONTROL.index("rounding")
    torch.set_flush_denormal(False)
    found = control.changed()
    assert found == 1 << FLOAT_CONTROL.index("rounding") | 1 << FLOAT_CONTROL.index(DENORMALS)


def test_nothing_is_said_of_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert FloatControl().changed() == 0


def test_nothing_is_said_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_control, "READ", None)
    assert FloatControl().changed() == 0


def test_every_processor_names_all_that_can_change() -> None:
    words = [masks for of_machine in float_control.MASKS.values() for masks in of_machine.values()]
    assert {len(masks) for masks in words} == {len(FLOAT_CONTROL)}
