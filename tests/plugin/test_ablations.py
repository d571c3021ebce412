"""The ablations run, resume, replay and make their tables, with a model that is a program and a gate that pretends."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.lab.library.cards import read_card, write_card
from pytest_klineage.records import (
    CardScope,
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Context,
    Effect,
    Precondition,
    PreconditionClass,
    SkillCard,
    Surface,
)
from pytest_klineage.results.packed import packed

MODEL = """
import sys

said = sys.stdin.read()
speed = 0.3 + 0.4 * said.count("Verdict:") if "carrier of the card" in said else 0.2
print(f"PLAN: go on\\nCARDS: pack-b\\n```cpp\\n// accepted.faster {speed:.2f}\\n```")
"""
GATE = """
import pytest
import pytest_klineage.gate as gate
from pytest_klineage.records import Code, Interval, Machine, Reason, Timing, Verdict

MACHINE = Machine(platform="cpu", device="Pretended CPU", cores=2)


class FakeGate:
    def __init__(self, platform, settings=None, progress=None):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def machine(self):
        return MACHINE

    def judge(self, case, source, *, reference_source=None, platforms=(), precision=None):
        assert reference_source.label == "expert"
        said = source.files[0].text.partition("\\n")[0].split()
        code, speed = (Code(said[1]), float(said[2])) if "." in said[1] else (Code.SLOWER_THAN_REQUIRED, 0.1)
        if DIFFERS and speed > 0.5:
            code = Code.CRASH
        timing = Timing(
            policy="paired", reference_ms=speed, candidate_ms=1.0, speedup=Interval(speed, speed * 0.99, speed * 1.01),
            reference_samples_ms=(speed,), candidate_samples_ms=(1.0,), warmup=1, flush_bytes=0, statistic="",
        )
        return Verdict(
            case=case, status=code.status, reasons=(Reason(code=code, message="pretended"),), machine=MACHINE,
            source_digest=source.digest, timing=timing if code is not Code.CRASH else None,
        )

    def close(self):
        pass


PATCH = pytest.MonkeyPatch()


def pytest_configure(config):
    PATCH.setattr(gate, "Gate", FakeGate)


def pytest_unconfigure(config):
    PATCH.undo()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, a library with one card, and two gates that pretend."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "fake_gate.py").write_text(f"DIFFERS = False\n{GATE}")
    (tmp_path / "other_gate.py").write_text(f"DIFFERS = True\n{GATE}")
    origin = Context(operator="gemm", shape={"M": 64}, dtype="fp32", surface=Surface.CPP, platform="cpu")
    card = SkillCard(
        name="pack-b", status=CardStatus.ADMITTED, category=Category.SIMD, intent="packs b", anchor="loops",
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="carrier of the card\n"),
        preconditions=(Precondition(kind=PreconditionClass.LAYOUT, condition="b is dense", reason="it is read"),),
        effect=Effect(summary="faster"), scope=CardScope(), origins=(origin,),
    )  # fmt: skip
    write_card(tmp_path / "skills", card)
    return tmp_path


def ablation(config: pytest.Config, folder: Path, test: str, *arguments: str, gate: str = "fake_gate") -> str:
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", gate, f"suites/ablations/{test}.py",
        "--platform=cpu", "-k", "gemm", "--trials=2", "--steps=3", f"--skills={folder / 'skills'}",
        f"--klineage-results={folder / 'results'}", *arguments,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=config.rootpath, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


def asking(folder: Path) -> tuple[str, ...]:
    return (
        "--klineage-llm=command", f"--klineage-command={sys.executable} {folder / 'model.py'}",
        "--klineage-model=unbilled",
    )  # fmt: skip


def test_recovery_is_measured_replayed_and_compared(pytestconfig: pytest.Config, folder: Path) -> None:
    said = ablation(pytestconfig, folder, "test_roundtrip_recovery", *asking(folder))
    assert "2 passed" in said
    assert "roundtrip_recovery-cpu/klineage/gemm-1: step 1/3, $0.00 of $10.00, best 0.70x; this one 0.70x" in said
    results = folder / "results"
    table = (results / "ablations" / "roundtrip_recovery-cpu.md").read_text()
    assert "| gemm | 2/2 |\n| total | 2/2 |" in table
    assert "| gemm | 1 | 1.10 [1.09, 1.11] | 1.000 | 1.100 | 2 | 2 | 0.000 | target_reached |" in table
    assert "Machine: Pretended CPU, 2 cores." in table
    verdicts = (results / "ablations" / "roundtrip_recovery-cpu.jsonl").read_bytes().splitlines()
    assert len(verdicts) == 5, "two kernels of each trial, and the root of both"
    assert msgspec.json.decode(verdicts[0])["verdict"]["timing"]["candidate_samples_ms"] == [1.0]

    # Its replay needs neither the model nor the cards, judges again, and leaves the table alone.
    (folder / "skills").rename(folder / "gone")
    again = ablation(pytestconfig, folder, "test_roundtrip_recovery", "--klineage-llm=replay", "--steps=9")
    assert "2 passed" in again
    assert (results / "ablations" / "roundtrip_recovery-cpu.md").read_text() == table
    assert len((results / "ablations" / "roundtrip_recovery-cpu.jsonl").read_bytes().splitlines()) == 5
    differs = ablation(pytestconfig, folder, "test_roundtrip_recovery", "--klineage-llm=replay", gate="other_gate")
    assert "2 failed" in differs
    assert "step 1: recorded accepted.faster, now runtime_error.crash: pretended" in differs

    without = ablation(pytestconfig, folder, "test_generated_only", *asking(folder))
    assert "2 passed" in without
    table = (results / "ablations" / "generated_only-cpu.md").read_text()
    assert "| generated-only | gemm | 2 | 2 | 1.000 | 0.20 [0.20, 0.20] | 5.50x | 0.000 |" in table


def test_the_root_is_no_kernel_of_a_trial(pytestconfig: pytest.Config, folder: Path) -> None:
    (folder / "model.py").write_text('print("PLAN: go on\\n```cpp\\n// wrong_value.mismatch 0.50\\n```")\n')
    ablation(pytestconfig, folder, "test_roundtrip_recovery", *asking(folder))
    table = (folder / "results" / "ablations" / "roundtrip_recovery-cpu.md").read_text()
    # One kernel, which is wrong, and twice the same again.
    assert "| gemm | 1 | none was right | - | - | 3 | 0 | 0.000 | step_limit |" in table
    ablation(pytestconfig, folder, "test_generated_only", *asking(folder))
    table = (folder / "results" / "ablations" / "generated_only-cpu.md").read_text()
    assert "| generated-only | gemm | 2 | 0 | - | no right kernel | - | 0.000 |" in table


def test_packed_verdicts_are_gone_on_with(pytestconfig: pytest.Config, folder: Path) -> None:
    one = (*asking(folder), "--trials=1")
    assert "1 passed" in ablation(pytestconfig, folder, "test_roundtrip_recovery", *one)
    kept = folder / "results" / "ablations" / "roundtrip_recovery-cpu.jsonl"
    before = kept.read_bytes()
    packed(kept).write_bytes(gzip.compress(before))
    kept.unlink()
    assert "2 passed" in ablation(pytestconfig, folder, "test_generated_only", *asking(folder))
    others = kept.with_name("generated_only-cpu.jsonl").read_bytes().splitlines()
    assert len(others) == 2, "a kernel of each trial: the root's verdict is in the packed file"
    (folder / "results" / "trajectories" / "roundtrip_recovery-cpu" / "klineage" / "gemm-1.jsonl").unlink()
    assert "1 passed" in ablation(pytestconfig, folder, "test_roundtrip_recovery", *one)
    lines = kept.read_bytes()
    assert lines.startswith(before)
    assert len(lines.splitlines()) == len(before.splitlines()) + 2, "the root is known"


def test_what_is_missing_is_said(pytestconfig: pytest.Config, folder: Path) -> None:
    without_model = ablation(pytestconfig, folder, "test_roundtrip_recovery", "-rs")
    assert "2 skipped" in without_model
    assert "needs a language model (--klineage-llm=exchange, anthropic or command)" in without_model
    nothing = ablation(pytestconfig, folder, "test_generated_only", "-rs", "--klineage-llm=replay")
    assert "2 skipped" in nothing
    assert "gemm-1.jsonl is recorded" in nothing
    unknown = ablation(pytestconfig, folder, "test_generated_only", "--ablation=label-only")
    assert "unknown ablation 'label-only'. Did you mean 'labels-only'?" in unknown
    (folder / "skills").rename(folder / "gone")
    empty = ablation(pytestconfig, folder, "test_roundtrip_recovery", "-rs", *asking(folder))
    assert "skills has no admitted card: induce and admit cards first" in empty


def test_cards_of_the_very_target_can_be_left_out(pytestconfig: pytest.Config, folder: Path) -> None:
    card = read_card(folder / "skills" / "pack-b")
    own = msgspec.structs.replace(card.origins[0], shape={"M": 1024, "N": 1024, "K": 1024})
    write_card(folder / "skills", msgspec.structs.replace(card, origins=(own,)))
    said = ablation(pytestconfig, folder, "test_roundtrip_recovery", *asking(folder), "--held-out-cards")
    assert "roundtrip_recovery_held_out-cpu/klineage/gemm-1: step" in said
    tables = folder / "results" / "ablations"
    assert "| total | 0/2 |" in (tables / "roundtrip_recovery_held_out-cpu.md").read_text()
    assert not (tables / "roundtrip_recovery-cpu.md").exists()
