"""A root that was judged before is not judged again: on this case and this machine, and only if it was scored."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from pytest_klineage import KernelSource, Verdict, paper_case
from pytest_klineage.records import Code, Interval, Machine, Reason, SourceFile, Surface, Timing, to_json
from pytest_klineage.results.packed import packed
from pytest_klineage.results.runs import Record

CASE = paper_case("topk", "cpu", "torch")
HERE = Machine(platform="cpu", device="A CPU", cores=2)
ROOT = KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", "naive"),), entry="run")
OTHER = msgspec.structs.replace(ROOT, files=(SourceFile("kernel.cpp", "other"),))


def verdict(source: KernelSource = ROOT, code: Code = Code.SLOWER_THAN_REQUIRED, machine: Machine = HERE) -> Verdict:
    timing = Timing(
        policy="paired", reference_ms=1.0, candidate_ms=2.0, speedup=Interval(0.5, 0.5, 0.5),
        reference_samples_ms=(1.0,), candidate_samples_ms=(2.0,), warmup=1, flush_bytes=0, statistic="",
    )  # fmt: skip
    return Verdict(
        case=CASE, status=code.status, reasons=(Reason(code=code, message="said"),), machine=machine,
        source_digest=source.digest, timing=timing if code is Code.SLOWER_THAN_REQUIRED else None, label="stored",
    )  # fmt: skip


@pytest.fixture(scope="module")
def judged_roots(pytestconfig: pytest.Config) -> ModuleType:
    path = pytestconfig.rootpath / "suites" / "judged_roots.py"
    spec = importlib.util.spec_from_file_location("judged_roots", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def label_of(judged_roots: ModuleType, tmp_path: Path) -> Callable[..., str]:
    """Whose verdict a source gets, "stored" or "judged", with these lines in the file."""

    def label(*lines: bytes, source: KernelSource = ROOT) -> str:
        path = tmp_path / "kept.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        fresh = msgspec.structs.replace(verdict(source), label="judged")
        judge = judged_roots.taking_known_root(lambda case, given: fresh, ROOT, [path], HERE)
        return str(judge(CASE, source).label)

    return label


def test_a_packed_file_of_verdicts_is_read_too(judged_roots: ModuleType, tmp_path: Path) -> None:
    packed(tmp_path / "kept.jsonl").write_bytes(gzip.compress(stored(verdict()) + b"\n"))
    for name, label in (("kept.jsonl", "stored"), ("absent.jsonl", "judged")):
        judge = judged_roots.taking_known_root(
            lambda case, given: msgspec.structs.replace(verdict(given), label="judged"), ROOT, [tmp_path / name], HERE
        )
        assert judge(CASE, ROOT).label == label


def stored(one: Verdict) -> bytes:
    return to_json(Record(nodeid="test", verdict=one, recorded_at="2026-01-02T03:04:05Z"))


def test_a_root_that_was_scored_here_is_not_judged_again(label_of: Callable[..., str]) -> None:
    assert label_of() == "judged"
    assert label_of(stored(verdict())) == "stored"
    assert label_of(stored(verdict()), stored(verdict())[:-40]) == "stored", "a line cut off is passed over"


@pytest.mark.parametrize(
    "other",
    [
        verdict(code=Code.CRASH),
        verdict(machine=Machine(platform="cpu", device="Another CPU", cores=2)),
        msgspec.structs.replace(verdict(), case=paper_case("gemm", "cpu", "torch")),
    ],
    ids=["failed", "machine", "case"],
)
def test_another_verdict_is_not_taken_for_it(other: Verdict, label_of: Callable[..., str]) -> None:
    assert label_of(stored(other)) == "judged"


def test_only_the_root_is_taken_over(label_of: Callable[..., str]) -> None:
    assert label_of(stored(verdict(OTHER)), source=OTHER) == "judged"
