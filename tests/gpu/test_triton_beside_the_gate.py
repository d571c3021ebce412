"""Without a GPU: Triton's do_bench beside the gate's in suites/gate_quality, its process, its inputs and the table."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import on_gpu
import pytest
import test_gpu_references as references
import torch
import triton_do_bench
from evaluators.process import ProcessEnded

from pytest_klineage.operators import make_case
from pytest_klineage.references import Variant
from pytest_klineage.results.packed import line_files, read_packed
from pytest_klineage.worker.reference_kernel import TRIAL_SEED, trial_of

CASE = make_case("gemm", (16, 24, 32), "fp32", "torch")
PUBLISHED_ROWS = list(line_files(on_gpu.ROOT / "results" / "gate_quality", "references-sm90*"))


def test_do_bench_gets_converted_inputs_and_its_defaults() -> None:
    trial = trial_of(CASE, "cpu", device="cpu")
    seen = {}

    def do_bench(run: Callable[[], object], **options: Any) -> list[float]:
        run()
        seen.update(options)
        return [3.0, 1.0, 2.0]

    def call(inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        outputs["c"].copy_(inputs["product"])

    variant = Variant(call, convert=lambda inputs: {"product": inputs["a"] @ inputs["b"]})
    assert triton_do_bench.timed(variant, trial, do_bench) == [3.0, 1.0, 2.0]
    assert seen == {"warmup": 25, "rep": 100, "return_mode": "all"}
    assert torch.equal(trial.outputs["c"], trial.inputs["a"] @ trial.inputs["b"])


class FakeStream:
    """Says when it waits, and when it becomes the current stream and is it no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the default one")
        monkeypatch.setattr(torch.cuda, "stream", self.current)

    def wait_stream(self, other: str) -> None:
        self.said.append(f"waits for {other}")

    @contextlib.contextmanager
    def current(self, stream: object) -> Iterator[None]:
        assert stream is self
        self.said.append("enters")
        yield
        self.said.append("leaves")


def test_other_inputs_are_timed_in_turn_on_their_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(CASE, "cpu", device="cpu")
    plain, seen, converted = trial.inputs["a"].clone(), list[torch.Tensor](), list[torch.Tensor]()
    stream: Any = FakeStream(monkeypatch)

    def convert(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converted.append(inputs["a"].clone())
        return {"twice": 2 * inputs["a"]}

    def do_bench(run: Callable[[], object], **options: Any) -> list[float]:
        run()
        stream.said.append("times")
        return [float(len(seen)), 100.0, 0.0]

    variant = Variant(lambda inputs, outputs: seen.append(inputs["twice"]), convert=convert)
    others = triton_do_bench.times_of_others(variant, CASE, trial, do_bench, stream)
    assert others == tuple(map(float, range(1, triton_do_bench.OTHER_INPUTS + 1)))
    assert stream.said == ["waits for the default one", "enters", "times", "leaves"] * len(others)
    assert all(torch.equal(given, 2 * made) for given, made in zip(seen, converted, strict=True))
    assert len({tuple(made.flatten().tolist()) for made in [plain, *converted]}) == len(others) + 1


@pytest.mark.parametrize("item", references.TO_TIME[:5], ids=lambda item: item.name)
def test_other_inputs_are_made_as_the_one_input_is(item: references.ReferenceToTime) -> None:
    shapes = {"gemm": (8, 16, 24), "topk": (4, 64, 8), "conv2d": (1, 4, 9, 9, 8, 3, 1, 1)}
    case = make_case(item.operator, shapes[item.operator], item.dtype or "fp32", "torch", **dict(item.options))
    trial, same = trial_of(case, "cpu", device="cpu"), trial_of(case, "cpu", device="cpu")
    positions = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in trial.inputs.items()}
    triton_do_bench.refill(trial, case, TRIAL_SEED + 1)
    assert not any(torch.equal(trial.inputs[name], same.inputs[name]) for name in positions)
    triton_do_bench.refill(trial, case, TRIAL_SEED)
    assert all(torch.equal(trial.inputs[name], same.inputs[name]) for name in positions)
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in trial.inputs.items()} == positions


def test_a_cpu_has_no_stream() -> None:
    assert triton_do_bench.new_stream(torch.device("cpu")) is None


def test_an_absent_triton_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    case = references.TO_TIME[0].case()
    answer = triton_do_bench.answer(triton_do_bench.CaseToTime(case=case, platform="sm90"))
    assert "triton" in answer.absent
    assert answer.samples_ms == ()
    assert answer.like_the_gate_ms is None


def test_the_answer_has_the_medians_the_version_and_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    triton, testing = types.ModuleType("triton"), types.ModuleType("triton.testing")
    vars(triton).update(__version__="9.9", testing=testing)
    prepared, first = list[object](), [3.0, 1.0, 2.0, 9.0]
    taken = itertools.chain([first], ([float(number)] for number in (8, 7, 6, 5, 4, 3, 2, 1)))
    vars(testing)["do_bench"] = lambda run, **options: next(taken)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.testing", testing)

    def prepare(case: object, platform: str) -> Callable[..., None]:
        prepared.append(case)
        return lambda inputs, outputs: None

    monkeypatch.setattr(triton_do_bench, "prepared_on_gpu", prepare)
    monkeypatch.setattr(triton_do_bench, "trial_of", lambda case, platform: trial_of(case, platform, device="cpu"))
    chosen = types.SimpleNamespace(describe=lambda case: {"variant": "cublaslt"})
    monkeypatch.setattr(triton_do_bench, "reference", lambda name: chosen)
    answer = triton_do_bench.answer(triton_do_bench.CaseToTime(case=CASE, platform="sm90"))
    assert (answer.milliseconds, answer.triton, answer.variant) == (2.5, "9.9", "cublaslt")
    assert (answer.samples_ms, answer.others_ms) == (tuple(first), (8, 7, 6, 5, 4, 3, 2, 1))
    assert answer.like_the_gate_ms == 4.5
    assert prepared == [CASE]


PUBLISHED_MS = 0.2


def timed(ratio: float, today: float | None, others: tuple[float, ...] = ()) -> references.Timed:
    """A row whose gate took `ratio` of the published time, and Triton today `today` of it, and `others` on others."""
    item = references.TO_TIME[0]
    triton = None
    if today is not None:
        triton = triton_do_bench.DoBenched(
            milliseconds=today * PUBLISHED_MS, samples_ms=(1.0,), variant="cublas",
            others_ms=tuple(other * PUBLISHED_MS for other in others),
        )  # fmt: skip
    return references.Timed(
        name=item.name, case=item.case().id, reference="cublas", published_ms=PUBLISHED_MS,
        measured_ms=ratio * PUBLISHED_MS, samples_ms=(1.0,), facts={"variant": "cublaslt"},
        machine="NVIDIA H200", judged_at="2026-11-21T12:00:00+00:00", triton=triton,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "today", "agrees"), [(1.2, 1.21, True), (1.0, 1.05, False), (1.02, None, True), (1.05, None, False)]
)
def test_a_reference_is_held_to_triton_of_the_same_minute(ratio: float, today: float | None, agrees: bool) -> None:
    row = timed(ratio, today)
    assert row.agrees is agrees
    shown = references.report_of([row], "sm90").splitlines()[-3]
    assert shown.endswith("| yes |" if agrees else "| no |")
    assert f"| {ratio:.3f} |" in shown
    if today is not None:
        assert f"| {ratio / today:.3f} |" in shown
        assert "cublas (cublaslt); Triton's process chose cublas" in shown
    assert msgspec.json.decode(msgspec.json.encode(row), type=references.Timed) == row


def columns(table: str) -> list[dict[str, str]]:
    """The cells of a table, by the heads of its columns."""
    head, _line, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return [dict(zip(head, row, strict=True)) for row in rows]


LIKE_THE_GATE, BESIDE_IT = "on the gate's inputs and stream, ms", "gate / Triton on its inputs and stream"
AS_PUBLISHED = "within 3 % of the published"


def test_triton_on_inputs_and_a_stream_as_the_gates_decides() -> None:
    near, far = timed(1.0, 1.05, (0.9, 1.01, 1.0, 1.3)), timed(1.04, 1.04, (1.5, 1.4))
    (row,) = columns(references.report_of([near], "sm90"))
    assert (row[LIKE_THE_GATE], row[BESIDE_IT]) == (f"{1.005 * PUBLISHED_MS:.4f}", "0.995")
    assert (row["gate / Triton"], row[AS_PUBLISHED], row["agrees"]) == ("0.952", "yes", "yes")
    (row,) = columns(references.report_of([far], "sm90"))
    assert (row[BESIDE_IT], row["gate / Triton"], row[AS_PUBLISHED], row["agrees"]) == ("0.717", "1.000", "no", "no")
    assert msgspec.json.decode(msgspec.json.encode(near), type=references.Timed) == near


@pytest.mark.parametrize(
    ("chosen", "own", "agrees"), [("+benchmark", 0.2, "yes"), ("+benchmark", 0.18, "no"), ("", 0.2, "yes")]
)
def test_a_searched_plan_is_held_to_pytorchs_own_choice(chosen: str, own: float, agrees: str) -> None:
    times = {"variant_ms.nchw": f"{own:.5f}", "variant_ms.nchw+benchmark": "0.10000"}
    searched = msgspec.structs.replace(
        timed(1.0, 1.5, (1.5,)), published_ms=None, facts={"variant": f"nchw{chosen}", **times}
    )
    (row,) = columns(references.report_of([searched], "sm90"))
    assert (row["published, ms"], row["gate / published"], row[AS_PUBLISHED]) == ("-", "-", "-")
    assert row["agrees"] == f"{agrees}: {0.2 / own:.3f} of PyTorch's own choice"
    assert searched.agrees is (agrees == "yes")


def test_an_old_row_without_other_inputs_has_dashes(tmp_path: Path) -> None:
    row = timed(1.0, 1.01, (1.0,))
    written = msgspec.json.decode(msgspec.json.encode(row))
    del written["triton"]["others_ms"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(msgspec.json.encode(written) + b"\n")
    (old,) = on_gpu.kept_rows(path, references.Timed, without=lambda row: False)
    assert (old.agrees, old.ratio_today, old.ratio_like_the_gate) == (True, row.ratio_today, None)
    for without in (old, timed(1.0, None)):
        (shown,) = columns(references.report_of([without], "sm90"))
        assert (shown[LIKE_THE_GATE], shown[BESIDE_IT], shown["agrees"]) == ("-", "-", "yes")


@pytest.mark.parametrize("path", PUBLISHED_ROWS, ids=lambda path: path.stem)
def test_published_rows_can_still_be_read(path: Path) -> None:
    rows = on_gpu.kept_rows(path, references.Timed, without=lambda row: False)
    assert len(rows) == len(read_packed(path).splitlines())
    shown = columns(references.report_of(rows, "sm90"))
    assert {row["case"] for row in shown} == {row.case for row in rows}
    assert all(re.fullmatch(r"-|\d+\.\d{4}", row[LIKE_THE_GATE]) for row in shown)


def test_a_script_that_fails_leaves_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ProcessEnded("it ended")

    monkeypatch.setattr(references, "alone", fail)
    settings: Any = None
    assert references.by_triton(CASE, "sm90", settings) == (None, "it ended")
