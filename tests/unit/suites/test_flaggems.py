"""The suite of FlagGems' rows: definitions against PyTorch, kernels in Triton's interpreter, arms, sweeps and tuning.

No GPU is here: what FlagGems itself takes is not run, and an attempt of its tuner is a stand-in that says so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

torch = pytest.importorskip("torch")

from pytest_klineage import UsageError, make_case  # noqa: E402  # after torch is known to be there
from pytest_klineage.lab.library.cards import find_cards  # noqa: E402
from pytest_klineage.operators import operator_of  # noqa: E402
from pytest_klineage.operators.null_models import lint_case  # noqa: E402
from pytest_klineage.records import Interval, KernelCase, KernelSource  # noqa: E402
from pytest_klineage.results.packed import read_packed  # noqa: E402

SUITE = Path(__file__).parents[3] / "suites" / "flaggems"
FROZEN = "22d77754e1f019d15ebb9481fa4a8f4f94c638203cce999ceffd12aaf9e76190"
"""SHA-256 of idiom.toml: the configurations were fixed before any card was read, and stay."""
functional = torch.nn.functional


@pytest.fixture(scope="module")
def suite() -> dict[str, ModuleType]:
    """The suite's modules by name."""
    return {name: importlib.import_module(name) for name in ("rows", "arms", "steering", "table", "tune", "test_sweep")}


def add_norm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return functional.rms_norm(x + residual, (x.shape[1],), w, 1e-5), x + residual


def groups(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    owner = torch.searchsorted(ends, torch.arange(len(a), dtype=ends.dtype), right=True)
    return torch.einsum("mk,mkn->mn", a, b[owner])


ANSWERS: dict[str, tuple[tuple[int, ...], Callable[..., object]]] = {
    "mm": ((9, 16, 24), torch.mm),
    "addmm": ((9, 24, 16), torch.addmm),
    "bmm": ((3, 9, 16, 24), torch.bmm),
    "grouped_mm": ((40, 16, 4, 24), groups),
    "attention": ((2, 4, 33, 16, 4), functional.scaled_dot_product_attention),
    "causal_attention": (
        (2, 4, 33, 16, 2),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    ),
    "rms_norm": ((13, 72), lambda x, w: functional.rms_norm(x, (72,), w, 1e-5)),
    "layer_norm": ((13, 72), lambda x, w, b: functional.layer_norm(x, (72,), w, b, 1e-5)),
    "softmax": ((13, 72), lambda x: functional.softmax(x, -1)),
    "fused_add_rms_norm": ((13, 72), add_norm),
}
"""By operator, a small shape and PyTorch's own function."""


def small_case(name: str, dtype: str = "fp32") -> KernelCase:
    return make_case(f"{SUITE}/operators.py:{name}", ANSWERS[name][0], dtype, "torch")


@pytest.mark.parametrize("name", ANSWERS)
def test_a_definition_is_pytorchs_function(name: str) -> None:
    function = ANSWERS[name][1]
    case = small_case(name)
    operator = operator_of(case)
    for distribution in operator.input_distributions:
        inputs = operator.make_inputs(case, torch.Generator().manual_seed(1), distribution)
        wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs.values()]
        found = function(*wide)
        right = found if isinstance(found, tuple) else (found,)
        for one, other in zip(operator.oracle(case, inputs).values(), right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_compute_nothing_are_refused(name: str, dtype: str) -> None:
    case = small_case(name, dtype)
    assert lint_case(operator_of(case), case, torch.Generator().manual_seed(3)) == []


def test_groups_move_with_their_rows() -> None:
    case = small_case("grouped_mm")
    operator = operator_of(case)
    inputs = operator.make_inputs(case, torch.Generator().manual_seed(1), "ragged")
    assert int(inputs["ends"][0]) == 0
    moved, undo = operator.symmetry_transform(case, inputs, torch.Generator().manual_seed(2))
    assert not torch.equal(moved["a"], inputs["a"])
    torch.testing.assert_close(undo(operator.oracle(case, moved))["c"], operator.oracle(case, inputs)["c"])


def test_the_rows_are_the_papers(suite: dict[str, ModuleType]) -> None:
    rows = suite["rows"].ROWS
    assert [row.number for row in rows] == list(range(1, 23))
    assert [sum(row.family == name for row in rows) for name in suite["rows"].FAMILIES] == [8, 6, 8]
    assert len({row.case("cpu", "torch").id for row in rows if row.number not in (18,)}) == 21
    for row in rows:
        assert row.case("sm90", "flaggems").also_shapes == row.case("cpu", "torch").also_shapes != ()
        assert row.case("sm90", "flaggems", "expert").max_spills == 0


def test_idiom_stays_frozen() -> None:
    assert hashlib.sha256((SUITE / "idiom.toml").read_bytes()).hexdigest() == FROZEN


def test_blind_points_are_drawn_from_the_grid(suite: dict[str, ModuleType]) -> None:
    arms = suite["arms"]
    for row in suite["rows"].ROWS:
        points = arms.blind_points(row)
        assert points == arms.blind_points(row)
        assert len({str(point) for point in points}) == arms.POINTS
        assert arms.idiom()[arms.kernel_of(row)] not in points
        assert all(point in arms.grid(row) for point in points)


def test_an_arm_without_cards_says_so(suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    arms, row = suite["arms"], suite["rows"].ROWS[14]
    monkeypatch.setattr(arms, "card_points", lambda: {})
    assert arms.source_of(row, "card") == arms.NO_CARDS
    assert "test_sweep.py" in arms.source_of(row, "blind")
    proposed = arms.CardPoints(row=15, cards=("rows-in-registers",), points=({"rows": 2, "warps": 4},))
    monkeypatch.setattr(arms, "card_points", lambda: {15: proposed})
    assert arms.points_of("card", row) == [{"rows": 1, "warps": 8}, {"rows": 2, "warps": 4}]
    chosen = arms.Chosen(row=15, arm="card", point={"rows": 2, "warps": 4}, speedup=1.1, platform="sm90")
    assert isinstance(arms.source_of(row, "card", chosen), KernelSource)


def test_points_of_cards_are_read_with_their_names(
    suite: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms, path = suite["arms"], tmp_path / "card.toml"
    monkeypatch.setattr(arms, "CARD_POINTS", path)
    assert arms.card_points.__wrapped__() == {}
    path.write_text('[[rows]]\nrow = 15\ncards = ["one-read"]\npoints = [{rows = 2, warps = 4}]\n')
    (found,) = arms.card_points.__wrapped__().values()
    assert (found.row, found.cards, found.points) == (15, ("one-read",), ({"rows": 2, "warps": 4},))
    path.write_text('[[rows]]\nrow = "fifteen"\n')
    with pytest.raises(UsageError, match=r"card\.toml"):
        arms.card_points.__wrapped__()


@pytest.mark.parametrize(
    ("settings", "row", "votes"),
    [
        ({"tile_cols": "128 -> 256", "threads": "288", "stages": "4"}, 0,
         {"block_n": [256], "threads": [288], "stages": [4]}),
        ({"gemm": "288 threads, 4 stages", "attention": "384 threads, 2 stages each", "CONSUMERS": "2"}, 0,
         {"stages": [4], "threads": [256], "block_m": [128]}),
        ({"gemm": "288 threads, 4 stages", "attention": "384 threads, 2 stages each", "CONSUMERS": "2"}, 8,
         {"stages": [2], "threads": [256], "block_m": [128]}),
        ({"stages": "4 (gemm, depth 64), 2 (fmha, 128 keys)"}, 8, {"stages": [2], "block_n": [128]}),
        ({"selection": "1024 threads", "attention": "128 threads"}, 14, {"warps": [32]}),
        ({"pitch": "17", "wide": "warp 64x32", "mma": "m64n200k16"}, 0, {}),
    ],
)  # fmt: skip
def test_settings_of_a_card_are_read_as_votes(
    suite: dict[str, ModuleType], settings: dict[str, str], row: int, votes: dict[str, list[int]]
) -> None:
    card = msgspec.structs.replace(find_cards(SUITE.parents[1] / "skills")[0], settings=settings)
    assert suite["steering"].figures(card, suite["rows"].ROWS[row]) == votes


def test_points_nearest_to_a_card_come_first(suite: dict[str, ModuleType]) -> None:
    steering, row = suite["steering"], suite["rows"].ROWS[0]
    card, other = find_cards(SUITE.parents[1] / "skills")[:2]
    wide = msgspec.structs.replace(card, settings={"tile": "128x256x64", "stages": "4", "threads": "256"})
    mute = msgspec.structs.replace(other, settings={"pitch": "17"})
    found = steering.steered(row, [mute, wide])
    assert [name.partition("@")[0] for name in found.cards] == [wide.name]
    assert found.points[0] == {"block_m": 128, "block_n": 256, "block_k": 64, "stages": 4, "threads": 256}
    assert len(found.points) == suite["arms"].POINTS
    assert all(suite["arms"].fits(row, point) for point in found.points)
    assert steering.steered(row, [mute]) is None
    assert tomllib.loads(steering.as_toml([found]))["rows"][0]["points"] == list(found.points)


def test_every_row_has_steered_points_that_fit(suite: dict[str, ModuleType]) -> None:
    arms = suite["arms"]
    assert sorted(arms.card_points()) == list(range(1, 23))
    for row in suite["rows"].ROWS:
        points = arms.card_points()[row.number].points
        assert len({str(point) for point in points}) == arms.POINTS
        assert all(arms.fits(row, point) for point in points)


def test_an_expert_is_chosen_among_kernels(suite: dict[str, ModuleType]) -> None:
    arms = suite["arms"]
    for row in suite["rows"].ROWS:
        kernels, points = arms.experts_of(row), arms.points_of("expert", row)
        assert len({kernel.digest for kernel in kernels}) == len(kernels)
        assert kernels[0].surface == "cuda"
        assert len(points) == (len(kernels) if len(kernels) > 1 else 0)
        assert arms.source_of(row, "expert") == kernels[0]
        for i, point in enumerate(points):
            chosen = arms.Chosen(row=row.number, arm="expert", point=point, speedup=1.0, platform="sm90")
            assert arms.source_of(row, "expert", chosen).digest == kernels[i].digest


def test_a_limit_of_time_skips_what_is_known_or_late(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    table, path, row = suite["table"], tmp_path / "sm90.jsonl", suite["rows"].ROWS[14]
    soon = time.monotonic() + 60
    table.append(path, measured(suite, "idiom", "known", 1.0))
    table.skip_unless_due(path, "H200", row, "idiom", "known", 0.0)
    table.skip_unless_due(path, "H100", row, "idiom", "known", soon)
    table.skip_unless_due(path, "H200", suite["rows"].ROWS[15], "idiom", "known", soon)  # another row's same kernel
    with pytest.raises(pytest.skip.Exception, match="judged before"):
        table.skip_unless_due(path, "H200", row, "idiom", "known", soon)
    with pytest.raises(pytest.skip.Exception, match="time is up"):
        table.skip_unless_due(path, "H200", row, "idiom", "other", time.monotonic() - 1)
    assert len(table.read(path)) == 1


def test_a_kernel_of_two_arms_is_judged_once(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    table, path, row = suite["table"], tmp_path / "sm90.jsonl", suite["rows"].ROWS[14]
    table.append(path, measured(suite, "idiom", "same", 1.1))
    with pytest.raises(pytest.skip.Exception, match="judged before"):
        table.skip_unless_due(path, "H200", row, "blind", "same", time.monotonic() + 60)
    idiom, blind = table.read(path).values()
    assert (idiom.arm, blind.arm, blind.speedup) == ("idiom", "blind", idiom.speedup)
    ratio = table.over(idiom, blind)
    assert (ratio.estimate, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def measured(suite: dict[str, ModuleType], arm: str, digest: str, speed: float | None, row: int = 15) -> object:
    interval = None if speed is None else Interval(speed, speed * 0.99, speed * 1.01)
    return suite["table"].Measured(
        platform="sm90", device="H200", row=row, arm=arm, digest=digest, code="accepted", speedup=interval,
        reference_ms=0.07, candidate_ms=0.07 / (speed or 1), floor_ms=0.056,
        beside={"torch": 0.08, "flashinfer": 0.065},
    )  # fmt: skip


def test_a_sweep_keeps_the_fastest_point(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    arms, table, row = suite["arms"], suite["table"], suite["rows"].ROWS[14]
    points = arms.points_of("blind", row)
    digests = [arms.configured(row, point, "blind").digest for point in points]
    path = tmp_path / "sweep.jsonl"
    for i, speed in enumerate([1.0, None, 1.2, 1.1]):
        table.append(path, measured(suite, f"blind{i}", digests[i], speed))
    path.write_bytes(path.read_bytes() + b'{"cut')
    chosen, *shared = suite["test_sweep"].choices(table.read(path), "sm90")
    assert all(item.arm != "blind" and item.cards for item in shared)
    assert (chosen.row, chosen.arm, chosen.point, chosen.speedup) == (15, "blind", points[2], 1.2)
    (tmp_path / "choices.json").write_bytes(msgspec.json.encode([chosen]))
    assert arms.read_choices(tmp_path / "choices.json") == {(15, "blind"): chosen}


def test_a_point_is_screened_against_its_arms_best(suite: dict[str, ModuleType]) -> None:
    sweep, row = suite["test_sweep"], suite["rows"].ROWS[14]
    points = [("blind0", 1.1, 15), ("blind10", 1.2, 15), ("blind2", None, 15), ("card1", 1.5, 15), ("blind0", 1.6, 16)]
    found = [measured(suite, arm, f"{arm}-{number}", speed, number) for arm, speed, number in points]
    assert sweep.best_so_far({one.key: one for one in found}, row, "blind") == 1.2
    assert sweep.best_so_far({}, row, "blind") == 1.0


def test_the_table_has_effects_and_what_is_absent(suite: dict[str, ModuleType]) -> None:
    found = [
        measured(suite, "idiom", "a", 1.0),
        measured(suite, "blind", "b", 1.1),
        measured(suite, "expert", "c", None),
    ]
    text = suite["table"].tables(found, suite["arms"].ARMS, {"card": "no cards"})
    line = next(line for line in text.splitlines() if "15-rms_norm" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:5] == ["80.0", "65.0", "70.0", "1.000 [0.990, 1.010]"]
    assert cells[7:] == ["accepted", "1.100 [1.078, 1.122]", "-", "88%"]
    assert "1.100 [1.089, 1.111], 1/1, 1 " in text
    assert "card: no cards" in text


def test_what_is_published_has_its_verdicts(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    kept, to = tmp_path / "kept", tmp_path / "to"
    kept.mkdir()
    for name in ("sm90-verdicts.jsonl", "sm90.md", "sm90.jsonl", "cpu.jsonl", "sweep-sm90-verdicts.jsonl"):
        (kept / name).write_text(name)
    suite["table"].publish(kept, to, "sm90")
    assert {path.name for path in to.iterdir()} == {"records.jsonl.gz", "sm90.md", "sm90.jsonl"}
    assert [read_packed(to / name) for name in ("records.jsonl", "sm90.md")] == [b"sm90-verdicts.jsonl", b"sm90.md"]


def test_a_mean_is_narrower_than_its_rows(suite: dict[str, ModuleType]) -> None:
    mean = suite["table"].geomean([Interval(1.0, 0.99, 1.02), None, Interval(1.21, 1.21 * 0.99, 1.21 * 1.02)])
    assert mean.estimate == pytest.approx(1.1)
    assert mean.low == pytest.approx(1.1 * 0.99 ** (1 / math.sqrt(2)))
    assert mean.high == pytest.approx(1.1 * 1.02 ** (1 / math.sqrt(2)))
    assert suite["table"].geomean([None]) is None


def test_tuning_keeps_the_fastest_of_three(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    tune, row = suite["tune"], suite["rows"].ROWS[14]
    times = {"0": 0.08, "1": None, "2": 0.07}

    def attempt(_row: object, _platform: str, folder: Path) -> dict[str, str]:
        """Stands in for FlagGems, which needs a GPU: leaves a file, as its database would lie there."""
        (ms := times[folder.parent.name[-1]]) and (folder / "found.db").write_text(str(ms))
        return {"variant_ms.flaggems.generic": str(ms), "variant_ms.torch": "0.01"} if ms else {"error": "no GPU"}

    said, good = tune.tune(row, "sm90", tmp_path, attempt)
    assert good
    assert said.startswith("80.0, inf, 70.0 us")
    assert (tune.place_of(row, "sm90", tmp_path) / "found.db").read_text() == "0.07"
    assert [path.name for path in tmp_path.iterdir()] == [row.case("sm90", "flaggems").id]


def test_attempts_begin_with_what_was_compiled(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    tune, row = suite["tune"], suite["rows"].ROWS[14]

    def compiles(_row: object, _platform: str, folder: Path) -> dict[str, str]:
        """Stands in for FlagGems, which needs a GPU: one compiled kernel, and what its tuner has timed."""
        (folder / "triton" / "key").mkdir(parents=True)
        (folder / "triton" / "key" / "kernel.cubin").touch()
        (folder / "triton" / "key" / "kernel.autotune.json").touch()
        return {"variant_ms.flaggems.generic": "0.1"}

    def attempt(_row: object, _platform: str, folder: Path) -> dict[str, str]:
        assert [path.name for path in folder.rglob("kernel*")] == ["kernel.cubin"]
        return {"variant_ms.flaggems.generic": "0.1"}

    tune.compile_all([row], "sm90", tmp_path, compiles)
    assert tune.tune(row, "sm90", tmp_path, attempt)[1]
    assert [path.name for path in tmp_path.iterdir()] == [row.case("sm90", "flaggems").id]


def test_a_failed_compilation_leaves_nothing(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    tune, row = suite["tune"], suite["rows"].ROWS[14]
    tune.compile_all([row], "sm90", tmp_path, lambda *_: {"error": "no GPU"})
    assert not list(tmp_path.iterdir())


INTERPRETED = """
import sys, types
import torch
config = types.ModuleType("config")
config.CONFIG, config.SHAPES = {"rows": 2, "warps": 4}, []
sys.modules["config"] = config
sys.path[:0] = [sys.argv[1] + "/kernels"]
import rows
from pytest_klineage import UsageError, make_case
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.tolerance import Expected
case = make_case(f"{sys.argv[1]}/operators.py:{sys.argv[2]}", (7, 72), "bf16", "torch")
operator = operator_of(case)
for distribution in operator.input_distributions:
    inputs = operator.make_inputs(case, torch.Generator().manual_seed(1), distribution)
    expected = Expected(operator, case, inputs)
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    results = {name: given.get(name, torch.full((7, 72), 9, dtype=torch.bfloat16)) for name in expected.outputs}
    named = {"eps": 1e-5} if "norm" in operator.name else {}
    named |= {"out": results["y"]} if "y" in results else {}
    getattr(rows, operator.name)(*given.values(), **named)
    assert expected.accepts(results), (distribution, expected.errors(results))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("rms_norm", marks=pytest.mark.nightly),
        "layer_norm",
        pytest.param("softmax", marks=pytest.mark.nightly),
        "fused_add_rms_norm",
    ],
)
def test_triton_rows_are_right_when_interpreted(name: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED, str(SUITE), name]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_cpu_tier_runs_and_prints_its_table(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "suites/flaggems/test_flaggems.py",
        "--platform=cpu", "-k", "04- or 22-", "--klineage-time-limit=0.1", "--klineage-busy-limit=1",
        "--klineage-spread-limit=1e6", f"--klineage-results={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert "| Reduction" in done.stdout
    assert "| Reduction" in (tmp_path / "runs" / "flaggems" / "cpu.md").read_text()
