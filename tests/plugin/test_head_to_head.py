"""The head-to-head runs, resumes, replays and makes tables, with a model that is a program and a gate that pretends.

So does the main tier with what was recorded, and suites can be named together.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.lab.library.cards import write_card
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.records import (
    Begun,
    CardScope,
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Context,
    Effect,
    Judged,
    Noted,
    Precondition,
    PreconditionClass,
    SkillCard,
    Surface,
)

MODEL = """
import sys

said = sys.stdin.read()
turns = said.count("Verdict:")
kind = ["accepted.faster 1.50", "wrapper.library", "wrong_value.mismatch", "slower.than_required 0.50"][turns % 4]
print(f"PLAN: go on\\n```cpp\\n// {kind} {turns} {len(said)}\\n```")
"""
GATE = """
import pytest
import pytest_klineage.gate as gate
from pytest_klineage.records import Code, Interval, Machine, Reason, Timing, Verdict

MACHINE = Machine(platform="cpu", device="Pretended CPU", cores=2)


class FakeGate:
    def __init__(self, platform, settings=None, progress=None):
        self.platform = platform

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def machine(self):
        return MACHINE

    def judge(self, case, source, *, reference_source=None, platforms=(), precision=None):
        assert reference_source is None
        said = source.files[0].text.partition("\\n")[0].split()
        known = len(said) > 1 and "." in said[1]
        code = Code(said[1]) if known else Code.SLOWER_THAN_REQUIRED
        if DIFFERS and code is Code.MISMATCH:
            code = Code.CRASH
        speed = {"accepted": 1.5, "slower": 0.5 if known else 0.1}.get(code.status.value)
        timing = None
        if speed:
            timing = Timing(
                policy="paired", reference_ms=speed, candidate_ms=1.0,
                speedup=Interval(speed, speed * 0.99, speed * 1.01), reference_samples_ms=(speed,),
                candidate_samples_ms=(1.0,), warmup=1, flush_bytes=0, statistic="",
            )
        return Verdict(
            case=case, status=code.status, reasons=(Reason(code=code, message="pretended"),), machine=MACHINE,
            source_digest=source.digest, timing=timing, label=source.label,
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
    """A model and two gates that pretend."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "fake_gate.py").write_text(f"DIFFERS = False\n{GATE}")
    (tmp_path / "other_gate.py").write_text(f"DIFFERS = True\n{GATE}")
    return tmp_path


def suite(config: pytest.Config, folder: Path, *arguments: str, gate: str = "fake_gate") -> str:
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", gate, "--platform=cpu", "-rs",
        f"--klineage-results={folder / 'results'}", *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=config.rootpath, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def asking(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        "suites/head_to_head", "-k", "topk", "--runs=1", "--steps=5", "--klineage-llm=command",
        f"--klineage-command={sys.executable} {folder / 'model.py'}", "--klineage-model=unbilled", *more,
    )  # fmt: skip


METHODS = "--methods=generated-only,adaexplore,accelopt"
OWN_SCAN = "own-scan; some were lifted from this operator and shape"
"""The note of a run that was shown the card of `skills`."""


def test_runs_are_recorded_replayed_and_compared(pytestconfig: pytest.Config, folder: Path) -> None:
    said = suite(pytestconfig, folder, *asking(folder, METHODS))
    assert "3 passed" in said, said
    assert "cpu/generated-only/topk-1: step 4/5, $0.00 of $10.00, best 1.50x; this one 1.50x" in said
    base = folder / "results" / "head_to_head"
    events = [line.event for line in read_trajectory(base / "cpu" / "adaexplore" / "topk-1.jsonl")[0]]
    begun = events[0]
    assert isinstance(begun, Begun)
    assert {"method": "adaexplore", "platform": "cpu", "run": "1", "seed": "1", "steps": "5"}.items() <= (
        begun.settings.items()
    )
    table = (base / "cpu.md").read_text()
    assert "Limits of each run: $10, 5 steps." in table
    assert "- accelopt: 0 of 1 runs made two whole iterations, 24 kernels" in table
    assert "Machine: Pretended CPU, 2 cores." in table
    assert "| generated-only | 1.50x | 1/1 | 1/1 | 5 | 2 | 1 | 2 | 5 | 0.00 |" in table
    best = "| topk-64x4096x512-fp32 | generated-only | 1.50x [1.48, 1.52] | 1 | 1.5 | 1 | 4 | 0.00 | 1.50x | 0.00 |"
    assert best in table
    assert "| generated-only | 1 | 1.50x [1.48, 1.52] | 5 | 2 | 1 | 2 | 0 | 5 | 0.00 | step_limit |" in table
    verdicts = (base / "cpu.verdicts.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(verdicts[0])["verdict"]["timing"]["candidate_samples_ms"] == [1.0]

    # Without a model what is recorded is replayed: judged again, the tables compared, nothing written.
    files = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    again = suite(pytestconfig, folder, "suites/head_to_head")
    assert "4 passed" in again, again
    assert {path: path.read_bytes() for path in base.rglob("*") if path.is_file()} == files
    differs = suite(pytestconfig, folder, "suites/head_to_head", "-k", "generated-only", gate="other_gate")
    assert "1 failed" in differs
    assert "step 2: recorded wrong_value.mismatch, now runtime_error.crash: pretended" in differs
    (base / "cpu.md").write_text(table.replace("1.50x", "1.60x"))
    assert "1 failed, 3 passed" in suite(pytestconfig, folder, "suites/head_to_head")


def test_recorded_runs_are_kept_resumed_and_judged(pytestconfig: pytest.Config, folder: Path) -> None:
    only = "--methods=generated-only"
    path = folder / "results" / "head_to_head" / "cpu" / "generated-only" / "topk-1.jsonl"
    assert "1 passed" in suite(pytestconfig, folder, *asking(folder, only))
    whole = path.read_bytes()
    said = suite(pytestconfig, folder, *asking(folder, only))
    assert "topk-1.jsonl is recorded; --klineage-resume=cpu/generated-only/topk-1 goes on with it" in said
    assert path.read_bytes() == whole

    # Cut off after its second verdict, it goes on to the same end.
    lines = path.read_bytes().splitlines(keepends=True)
    judged = [number for number, line in enumerate(read_trajectory(path)[0]) if isinstance(line.event, Judged)]
    path.write_bytes(b"".join(lines[: judged[1] + 1]))
    resumed = suite(pytestconfig, folder, *asking(folder, only, "--klineage-resume=cpu/generated-only/*"))
    assert "1 passed" in resumed, resumed
    again = [line.event.source_digest for line in read_trajectory(path)[0] if isinstance(line.event, Judged)]
    assert len(again) == len(judged)

    tier = suite(
        pytestconfig, folder, "suites/main_tier", "--klineage-method=generated-only", "-k", "topk or gemm", "-rA"
    )
    assert "1 passed, 1 skipped" in tier, tier
    assert "generated-only" in tier
    assert "1.50x" in tier
    assert "has no kernel of generated-only for gemm-1024x1024x1024-fp32" in tier
    assert "--methods=generated-only -k gemm" in tier


def test_what_is_missing_is_said(pytestconfig: pytest.Config, folder: Path) -> None:
    nothing = suite(pytestconfig, folder, "suites/head_to_head", "-k", "topk", "--runs=1", "--methods=accelopt")
    assert "1 skipped" in nothing
    assert "topk-1.jsonl is not recorded; this records it: pytest suites/head_to_head --platform cpu" in nothing
    unknown = suite(pytestconfig, folder, "suites/head_to_head", "--methods=acelopt")
    assert "unknown method 'acelopt'. Did you mean 'accelopt'?" in unknown
    rules = suite(pytestconfig, folder, *asking(folder, "--methods=adaexplore-shared"))
    assert "adaexplore-shared begins with the rules of other workloads: give it their file (--rules=FILE)" in rules
    cards = suite(pytestconfig, folder, *asking(folder, "--methods=klineage", f"--skills={folder / 'none'}"))
    assert "has no card that is admitted on cpu" in cards


@pytest.fixture
def skills(folder: Path) -> Path:
    """A library whose only card was lifted from the workload's own operator and shape."""
    shape = {"B": 64, "S": 4096, "K": 512}
    origin = Context(operator="topk", shape=shape, dtype="fp32", surface=Surface.CPP, platform="cpu")
    card = SkillCard(
        name="own-scan", status=CardStatus.ADMITTED, category=Category.SIMD, intent="scans", anchor="loops",
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="carrier of the card\n"),
        preconditions=(Precondition(kind=PreconditionClass.LAYOUT, condition="x is dense", reason="it is read"),),
        effect=Effect(summary="faster"), scope=CardScope(), origins=(origin,),
    )  # fmt: skip
    write_card(folder / "skills", card)
    return folder / "skills"


def noted(folder: Path, method: str, topic: str) -> list[str]:
    """What a method's run noted on a topic."""
    lines, _ = read_trajectory(folder / "results" / "head_to_head" / "cpu" / method / "topk-1.jsonl")
    return [line.event.text for line in lines if isinstance(line.event, Noted) and line.event.topic == topic]


def test_cards_of_the_own_workload_are_left_out_or_labelled(
    pytestconfig: pytest.Config, folder: Path, skills: Path
) -> None:
    run = asking(folder, "--methods=klineage", f"--skills={skills}")
    assert "1 passed" in suite(pytestconfig, folder, *run)
    assert "1 passed" in suite(pytestconfig, folder, *run, "--own-cards")
    assert noted(folder, "klineage", "cards") == ["none"]
    assert noted(folder, "klineage-own-cards", "cards") == [OWN_SCAN]
    table = (folder / "results" / "head_to_head" / "cpu.md").read_text()
    assert "\n| klineage | " in table
    assert "\n| klineage, own cards | " in table


def test_a_run_that_waited_at_its_root_gets_cards_and_rules(
    pytestconfig: pytest.Config, folder: Path, skills: Path
) -> None:
    (folder / "rules").write_text("You cannot divide by zero||3\n")
    run = asking(
        folder, "--methods=klineage,adaexplore-shared", f"--skills={skills}", "--own-cards",
        f"--rules={folder / 'rules'}",
    )  # fmt: skip
    assert "2 passed" in suite(pytestconfig, folder, *run)
    for method in ("klineage-own-cards", "adaexplore-shared"):
        path = folder / "results" / "head_to_head" / "cpu" / method / "topk-1.jsonl"
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    said = suite(pytestconfig, folder, *run, "--klineage-resume=all")
    assert "2 passed" in said, said
    assert noted(folder, "klineage-own-cards", "cards") == [OWN_SCAN]
    assert noted(folder, "adaexplore-shared", "adaexplore start") == ["You cannot divide by zero||3\n"]

    # What a run has noted counts from then on: neither the library nor the rules need be there.
    skills.rename(folder / "gone")
    (folder / "rules").unlink()
    again = suite(pytestconfig, folder, *run, "--klineage-resume=all")
    assert "2 passed" in again, again
    assert noted(folder, "klineage-own-cards", "cards") == [OWN_SCAN]


def test_suites_can_be_named_together(pytestconfig: pytest.Config, folder: Path) -> None:
    said = suite(pytestconfig, folder, "suites", "--collect-only", "-q", "--trials=1", "--runs=1")
    assert "tests collected" in said, said[-2000:]
    assert "error" not in said.lower()
