"""Operators and references of a user's files, judged where those files are not. Judges are the real ones."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pytest_klineage.cli.judge import LINE_LENGTH, MOST_NAMED, say_unjudged
from pytest_klineage.errors import UsageError, WaitsForVerdict
from pytest_klineage.executors.base import ExecutorGate, verdict_of
from pytest_klineage.executors.batch import BatchFolder
from pytest_klineage.executors.carried import DefinitionMissing, carried_files, import_error, supply
from pytest_klineage.executors.desk import Desk
from pytest_klineage.executors.local import LocalExecutor
from pytest_klineage.executors.queueing import QueuedJudgement
from pytest_klineage.executors.ray_judge import Judge, Order, build
from pytest_klineage.executors.sealing import SECRET_VARIABLE, open_reply
from pytest_klineage.gate.settings import GateSettings
from pytest_klineage.operators import make_case
from pytest_klineage.operators.resolve import CARRIED, file_of
from pytest_klineage.records import Definition, KernelCase, KernelSource, SourceFile, Surface, to_json
from pytest_klineage.records.judging import MOST_FAULTS, FaultCode, JudgeReply, JudgeRequest, MachineFault
from pytest_klineage.references import functions
from pytest_klineage.references.functions import named_file, reference_files

Ask = Callable[..., JudgeRequest]
QUICK = {
    "time_limit_s": 0.3, "precision": 0.5, "seeds": 1, "busy_limit": 1.0, "spread_limit": 1e6, "flush_bytes": 1 << 20,
}  # fmt: skip
LIMIT_S = 120.0
OPS = """
from pytest_klineage import operator

@operator("x[M,N] -> y[M,N]", dtypes=("fp32",))
def double(x):
    return x * 2
"""
REFS = "def twice(x):\n    return x + x\n"
KERNEL = """
#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &x = call->inputs[0], &y = call->outputs[0];
    for (int64_t i = 0; i < x.shape[0] * x.shape[1]; ++i) ((float *)y.data)[i] = 2 * ((const float *)x.data)[i];
    return 0;
}
"""
SECRET = b"s" * 32


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """The asker's folder: an operator and a function that is its reference, in files of their own."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "pytest.ini").touch()
    (root / "ops.py").write_text(OPS)
    (root / "refs.py").write_text(REFS)
    yield root
    functions._files.pop("refs.py", None)


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The judge's working directory, in which nothing lies."""
    path = tmp_path / "clean"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def case_of(project: Path) -> KernelCase:
    reference = f"{named_file(project / 'refs.py', 'refs.py')}:twice"
    return make_case(f"{project}/ops.py:double", (16, 8), "fp32", reference, at_least=1e-6)


def asked(folder: BatchFolder, case: KernelCase) -> JudgeRequest:
    """The request that a run writes."""
    source = KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", KERNEL),), entry="run")
    with pytest.raises(WaitsForVerdict):
        ExecutorGate(folder, "cpu", GateSettings(**QUICK)).judge(case, source)
    (request,) = folder.open_requests("cpu")
    return request


def judge(folder: Path, clean: Path, cache: Path, *more: str) -> tuple[int, str]:
    """`pytest-klineage judge` in a clean directory: its exit code and what it printed."""
    command = [sys.executable, "-m", "pytest_klineage", "judge", str(folder), "--platform", "cpu", *more]
    done = subprocess.run(
        [*command, "--cache-dir", str(cache)], cwd=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_request_carries_the_files_that_define_it(project: Path, folder: BatchFolder) -> None:
    request = asked(folder, case_of(project))
    assert {file.name: file.text for file in request.files} == {"ops.py": OPS, "refs.py": REFS}
    assert request.case.definition is not None
    assert request.files[0].digest == request.case.definition.digest
    assert msgspec.structs.replace(request, files=request.files[1:]).digest == request.digest
    assert msgspec.structs.replace(request, files=request.files[:1]).digest != request.digest
    assert carried_files(make_case("gemm", (8, 8, 8), "fp32", "torch")) == ()


def test_a_definition_that_changed_is_not_asked_for(project: Path, folder: BatchFolder) -> None:
    case = case_of(project)
    (project / "ops.py").write_text(OPS.replace("x * 2", "x * 3"))
    with pytest.raises(UsageError, match=r"the definition ops\.py:double has changed"):
        ExecutorGate(folder, "cpu", GateSettings(**QUICK)).judge(
            case, KernelSource(surface=Surface.CPP, files=(), entry="run")
        )


def test_a_copied_folder_is_all_a_judge_needs(
    project: Path, folder: BatchFolder, clean: Path, cache: Path, tmp_path: Path
) -> None:
    request = asked(folder, case_of(project))
    shutil.copytree(folder.root, tmp_path / "there")
    status, printed = judge(tmp_path / "there", clean, cache, "--build-only")
    assert (status, printed.splitlines()[-1]) == (0, f"{tmp_path}/there: 1 built, 0 not")
    status, printed = judge(tmp_path / "there", clean, cache)
    assert (status, printed.splitlines()[-1].partition(": ")[2]) == (
        0, "0 open, 0 claimed, 1 done, 0 given up, 0 faults"
    )  # fmt: skip
    verdict = verdict_of(BatchFolder(tmp_path / "there"), request)
    assert verdict.ok
    assert verdict.reference["label"] == "refs.py:twice"
    assert list(clean.iterdir()) == []


@pytest.mark.parametrize("name", ["ops.py", "refs.py"])
def test_text_that_was_changed_is_refused(project: Path, folder: BatchFolder, clean: Path, name: str) -> None:
    request = asked(folder, case_of(project))
    files = tuple(
        msgspec.structs.replace(file, text=file.text + "import os\n") if file.name == name else file
        for file in request.files
    )
    reply = LocalExecutor("cpu").judge(msgspec.structs.replace(request, files=files))
    assert reply.fault is not None
    assert reply.fault.code is FaultCode.DEFINITION
    assert f"the request carries another {name}, with the digest" in reply.fault.message


def test_another_digest_of_an_operator_is_refused(project: Path, folder: BatchFolder, clean: Path, cache: Path) -> None:
    """Text and digest that agree with each other, but not with the case."""
    request = asked(folder, case_of(project))
    (project / "ops.py").write_text(OPS.replace("x * 2", "x * 3"))
    other = carried_files(case_of(project))
    with pytest.raises(DefinitionMissing, match=r"the request carries another ops\.py"):
        supply(msgspec.structs.replace(request, files=other), cache)


def test_the_same_file_here_goes_first(
    project: Path, folder: BatchFolder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(folder, case_of(project))
    monkeypatch.chdir(project)
    supply(request, cache)
    assert file_of(request.case) == project / "ops.py"
    assert reference_files(["refs.py:twice"]) == {"refs.py": str(project / "refs.py")}
    for name in ("ops.py", "refs.py"):
        (project / name).write_text("MORE = 1\n")
    supply(request, cache)
    for path in (file_of(request.case), Path(reference_files(["refs.py:twice"])["refs.py"])):
        assert path is not None
        assert path.parents[1] == cache / CARRIED
    (project / "refs.py").unlink()
    with pytest.raises(DefinitionMissing, match=r"refs\.py is not below .*, and the request does not carry it; start"):
        supply(msgspec.structs.replace(request, files=request.files[:1]), cache)


def test_a_file_is_written_below_the_cache_alone(project: Path, folder: BatchFolder, clean: Path, cache: Path) -> None:
    """A name that leads elsewhere, and a carried file that was changed after it was written."""
    request = asked(folder, case_of(project))
    renamed = msgspec.structs.replace(request.files[1], name="../../refs.py")
    case = msgspec.structs.replace(request.case, reference="../../refs.py:twice")
    supply(msgspec.structs.replace(request, case=case, files=(request.files[0], renamed)), cache)
    path = Path(reference_files([case.reference])["../../refs.py"])
    functions._files.pop("../../refs.py")
    assert path.parents[1] == cache / CARRIED
    path.write_text("changed = True\n")
    supply(request, cache)
    assert path.read_text() == REFS
    named = msgspec.structs.replace(request.case, reference="refs\0.py:twice")
    with pytest.raises(DefinitionMissing, match=r"is called such as ops\.py"):
        supply(msgspec.structs.replace(request, case=named), cache)


@pytest.mark.parametrize("name", ["ops.py", "refs.py"])
def test_a_sibling_that_is_missing_is_named(
    project: Path, folder: BatchFolder, clean: Path, cache: Path, name: str
) -> None:
    """Not a verdict and not the end: the request is judged once the sibling is there."""
    sibling = f"klineage_sibling_of_{name[:-3]}"
    (project / f"{sibling}.py").write_text("TWO = 2\n")
    (project / name).write_text(f"from {sibling} import TWO\n{(project / name).read_text()}")
    request = asked(folder, case_of(project))
    status, printed = judge(folder.root, clean, cache)
    assert status == 1, printed
    last = printed.splitlines()[-1]
    assert "double-16x8-fp32 kernel: not judged, the next call tries again: definition_missing: " in last
    assert sibling in last
    assert "start the judge in a checkout" in last
    assert (folder.counts().open, folder.counts().faults) == (1, 1)
    shutil.copy(project / f"{sibling}.py", clean)
    status, printed = judge(folder.root, clean, cache)
    assert status == 0, printed
    assert verdict_of(folder, request).ok


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from .factor import TWO\n", r"\(from \.factor import TWO\); start the judge in a checkout"),
        ("import no_such_package.inner\n", r"ops\.py:1: .*No module named 'no_such_package'"),
        ("1 / 0\n", "importing it failed: ZeroDivisionError"),
    ],
)
def test_a_definition_that_does_not_import(
    project: Path, folder: BatchFolder, clean: Path, cache: Path, text: str, said: str
) -> None:
    request = asked(folder, case_of(project))
    (project / "other.py").write_text(text + OPS)
    named_file(project / "other.py", "ops.py")
    carried = carried_files(msgspec.structs.replace(request.case, definition=None, reference="ops.py:double"))
    functions._files.pop("ops.py")
    definition = Definition(source="ops.py:double", digest=carried[0].digest)
    case = msgspec.structs.replace(request.case, definition=definition, reference="torch")
    with pytest.raises(DefinitionMissing, match=said):
        supply(msgspec.structs.replace(request, case=case, files=carried), cache)


def test_what_a_package_registers_names_it(project: Path, folder: BatchFolder, clean: Path, cache: Path) -> None:
    request = asked(folder, case_of(project))
    definition = Definition(source="mylib/ops.py:double", digest="0", package="mylib 1.2")
    absent = msgspec.structs.replace(request.case, definition=definition)
    with pytest.raises(DefinitionMissing, match=r"unknown operator 'double'.*\(mylib 1\.2 registers it\)"):
        supply(msgspec.structs.replace(request, case=absent), cache)
    with pytest.raises(DefinitionMissing, match="unknown reference 'mylib'"):
        supply(msgspec.structs.replace(request, case=msgspec.structs.replace(request.case, reference="mylib")), cache)
    assert carried_files(absent)[0].name == "refs.py"


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("ops.py:3: the definition failed: ModuleNotFoundError: No module named 'late'", True),
        ("ImportError: cannot import name 'two' from 'late' (the reference refs.py:twice)", True),
        ("precision must lie between 0 and 1", False),
    ],
)
def test_imports_that_fail_late(message: str, missing: bool) -> None:
    assert isinstance(import_error(UsageError(message)), DefinitionMissing) is missing


def test_a_function_of_a_package_is_asked_for_again(project: Path, folder: BatchFolder, clean: Path) -> None:
    """It is no verdict that this machine lacks a package."""
    request = asked(folder, msgspec.structs.replace(case_of(project), reference="no_such_package.ops:twice"))
    executor = LocalExecutor("cpu")
    reply = executor.judge(request)
    executor.close()
    assert reply.fault is not None
    assert reply.fault.code is FaultCode.DEFINITION
    assert (
        "the module 'no_such_package', for the reference no_such_package.ops:twice, is missing" in reply.fault.message
    )


def test_what_was_given_up_ends_the_command_with_1(folder: BatchFolder, ask: Ask, clean: Path, cache: Path) -> None:
    """After three faults --retry is the remedy, but not for misuse."""
    wrong = ask(settings={}, product="")
    wrong = msgspec.structs.replace(wrong, settings={"precision": 7.0})
    folder.submit(wrong)
    status, printed = judge(folder.root, clean, cache)
    assert (status, printed.count("given up: misuse: precision must lie between")) == (1, 1)
    assert "--retry" not in printed
    lost = ask(case=msgspec.structs.replace(ask().case, reference="gone.py:gemm"))
    folder.submit(lost)
    for state in ["not judged, the next call tries again"] * (MOST_FAULTS - 1) + ["given up"]:
        status, printed = judge(folder.root, clean, cache)
        assert (status, printed.count(f"{state}: definition_missing: gone.py is not below")) == (1, 1), printed
    assert printed.splitlines()[-1].endswith(f"pytest-klineage judge {folder.root} --platform cpu --retry")


def test_few_lines_say_what_was_given_up(folder: BatchFolder, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(MOST_NAMED + 2):
        request = ask(f"// {number}")
        folder.submit(request)
        fault = MachineFault(code=FaultCode.HARNESS, message="so " * LINE_LENGTH + "\nand more")
        folder.answer(JudgeReply(request=request.digest, fault=fault))
    assert say_unjudged(folder, "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MOST_NAMED + 1
    assert max(map(len, lines)) == LINE_LENGTH
    assert lines[-1] == "... and 2 more"
    assert not say_unjudged(folder, "sm90")


# --- a judge of a Ray cluster, without the cluster --------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv(SECRET_VARIABLE, str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def order_of(request: JudgeRequest) -> Order:
    return Order(
        digest=request.digest, ticket="ticket", platform="cpu", product="", priority=0, recipe="",
        request=msgspec.Raw(to_json(request)),
    )  # fmt: skip


@pytest.mark.usefixtures("secret")
def test_a_judge_of_a_cluster_takes_carried_files(project: Path, folder: BatchFolder, clean: Path, cache: Path) -> None:
    request = asked(folder, case_of(project))
    lacking = msgspec.structs.replace(request, files=())
    judge = Judge("judge", "cpu", "", "node")
    try:
        replies = [open_reply(judge.judge(to_json(order_of(one)), 1, b""), SECRET) for one in (lacking, request)]
    finally:
        judge.close()
    assert build(to_json(order_of(lacking))) == b""
    assert replies[0].fault is not None
    assert replies[0].fault.code is FaultCode.DEFINITION
    assert replies[1].verdict is not None
    assert replies[1].verdict.ok
    assert (cache / "pytest-klineage" / CARRIED).is_dir()


@pytest.mark.usefixtures("secret")
def test_a_missing_definition_is_no_fault_of_a_device(ask: Ask) -> None:
    """Another device takes the request, and the judge goes on without a quarantine."""
    task = QueuedJudgement(order_of(ask()), b"", "asker")
    seat: Any = SimpleNamespace(state=SimpleNamespace(device="one"))
    fault = MachineFault(code=FaultCode.DEFINITION, message="no ops.py")

    async def settled() -> Desk:
        desk = Desk()
        await desk._settle(seat, task, JudgeReply(request=task.order.digest, fault=fault), b"")
        return desk

    desk = asyncio.run(settled())
    assert (task.attempt, task.tried, task.fault) == (2, {"one"}, fault)
    assert desk._queue.lengths() == {"cpu": 1}
    assert not desk._device_faults
