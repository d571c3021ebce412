"""The experiment on the effect of cards: operators and references agree, the design is frozen, chains go in turns.

No GPU is here, and no model: replies are made up. What needs nvcc is built by the suite itself in the compile stage.
"""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import design as experiment
import msgspec
import pytest
from made_up import begun, verdict
from running import Runner, frozen_now, goal, method_of, refused, task_of
from test_best import requested

from pytest_klineage import UsageError
from pytest_klineage.executors.batch import BatchFolder
from pytest_klineage.lab.library.cards import find_cards
from pytest_klineage.lab.optimizers.recording import VERDICT_TOPIC, VerdictMessage
from pytest_klineage.lab.studies.chains import chains_below
from pytest_klineage.lab.studies.pilot import Decision, threshold
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.plugin.waiting import WAITING_EXIT
from pytest_klineage.records import Code, Judged, KernelCase, KernelSource, Noted, TrajectoryLine, from_json, to_json
from pytest_klineage.records.judging import JudgeRequest
from pytest_klineage.results.packed import packed, read_lines
from pytest_klineage.results.runs import Record

torch = pytest.importorskip("torch")

import vendors  # noqa: E402  # after torch is known to be there

DESIGN = experiment.read_design()
SMALL = {
    "grouped_mm": ((64, 32, 4, 48), torch._grouped_mm),
    "gated_linear": ((40, 32, 48), vendors.gated),
    "fp8_gemm": ((32, 64, 48), vendors.scaled),
}
"""By target: a small shape, and its reference."""
ATTENTION, TOPK = "grouped_query", "long_topk"


def small(name: str) -> KernelCase:
    case = DESIGN.case(name)
    return case.at_shape(dict(zip(case.shape, SMALL[name][0], strict=True)))


@pytest.mark.parametrize("name", SMALL)
def test_references_compute_what_the_operators_define(name: str) -> None:
    case = small(name)
    operator = operator_of(case)
    inputs = operator.make_inputs(case, torch.Generator().manual_seed(3), DEFAULT_DISTRIBUTION)
    (expected,) = operator.oracle(case, inputs).values()
    found = SMALL[name][1](*inputs.values())
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), expected.double(), rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", SMALL)
def test_no_shortcut_passes_for_an_answer(name: str) -> None:
    case = small(name)
    assert lint_case(operator_of(case), case, torch.Generator().manual_seed(3)) == []


def test_the_design_is_frozen() -> None:
    """A number or choice that was changed after it was frozen; cards and prompts are held by the suite, which asks."""
    assert DESIGN.frozen is not None
    assert DESIGN.frozen.design == experiment.digest_of()
    assert set(DESIGN.frozen.prompts) == set(DESIGN.frozen.cards) == set(DESIGN.targets)


def shown_as_in_the_library() -> str:
    """A card of the target whose text is in skills/ what it was."""
    return next(card.name for card in DESIGN.cards(TOPK, "cards") if card in experiment.library())


def test_a_changed_card_is_not_the_frozen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    design = msgspec.structs.replace(DESIGN, targets={TOPK: DESIGN.targets[TOPK]})
    before = frozen_now(design)
    shown = shown_as_in_the_library()
    changed = [  # other words of the same length, so that the placebo stays
        msgspec.structs.replace(card, intent=card.intent.swapcase()) if card.name == shown else card
        for card in experiment.library()
    ]
    monkeypatch.setattr(experiment, "library", lambda: tuple(changed))
    after = frozen_now(design)
    assert after == frozen_now(msgspec.structs.replace(design, frozen=after))
    assert {arm for arm in design.arms if before.prompts[TOPK][arm] != after.prompts[TOPK][arm]} == {"cards"}
    assert before.cards[TOPK]["cards"] != after.cards[TOPK]["cards"]


def test_a_frozen_card_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_as_in_the_library()
    left = tuple(card for card in experiment.library() if card.name != shown)
    monkeypatch.setattr(experiment, "library", lambda: left)
    with pytest.raises(UsageError, match=shown):
        DESIGN.cards(TOPK, "cards")


def test_a_changed_card_is_shown_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    (digest, kept), *_ = experiment.kept_cards().items()
    own = {card.name: experiment.card_digest(card) for card in experiment.library()}
    assert own.get(kept.name) != digest
    assert experiment.frozen_card(digest) == kept
    monkeypatch.setattr(experiment, "library", lambda: ())
    assert experiment.frozen_card(digest) == kept


def test_every_kept_card_is_a_frozen_one() -> None:
    frozen = {digest for arms in DESIGN.frozen.cards.values() for digests in arms.values() for digest in digests}
    assert set(experiment.kept_cards()) <= frozen


def test_thresholds_are_those_of_the_published_pilot(tmp_path: Path) -> None:
    with tarfile.open(experiment.ROOT / "results" / "skill_effect-sm90" / "pilots.tar.xz") as made:
        made.extractall(tmp_path, filter="data")
    chains = chains_below(tmp_path / "skill_effect_brief" / "trajectories" / "skill_effect-sm90" / "pilot")
    found = {
        target: threshold(
            [chain.first.speedup for chain in chains if chain.target == target and chain.first is not None],
            replies=DESIGN.pilot.replies, rank=DESIGN.pilot.rank,
        )
        for target in DESIGN.targets
    }  # fmt: skip
    assert experiment.thresholds() == found


@pytest.mark.parametrize("missing", [Decision.WAIT, Decision.EASE])
def test_thresholds_are_written_when_all_are_there(missing: Decision, tmp_path: Path) -> None:
    path = tmp_path / "thresholds.toml"
    experiment.write_thresholds({"fp8_gemm": 0.63, "long_topk": 1.26}, path)
    assert experiment.thresholds(path) == {"fp8_gemm": 0.63, "long_topk": 1.26}
    with pytest.raises(UsageError, match=rf"long_topk \({missing.value}\)"):
        experiment.write_thresholds({"fp8_gemm": 0.7, "long_topk": missing}, path)
    assert experiment.thresholds(path) == {"fp8_gemm": 0.63, "long_topk": 1.26}


def test_packed_verdicts_are_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "skill_effect-sm90.verdicts.jsonl"
    packed(path).write_bytes(gzip.compress(to_json(Record(nodeid="before", verdict=verdict(0.5))) + b"\n"))
    models = SimpleNamespace(trajectories=tmp_path)
    session = SimpleNamespace(platform="sm90", remember=lambda nodeid, verdict: None)
    runner = Runner(session, models, SimpleNamespace(node=SimpleNamespace(nodeid="now")), print)
    assert runner.kept(verdict(0.9)) == verdict(0.9)
    assert [record.nodeid for record in read_lines(runner.verdicts, Record)] == ["before", "now"]


def test_another_folder_of_requests_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{tmp_path} has no request for the kernel {'0' * 12}"):
        requested(tmp_path, "0" * 64)


def test_a_changed_design_is_not_the_frozen_one(tmp_path: Path) -> None:
    text = experiment.FILE.read_text()
    changed = tmp_path / "experiment.toml"
    changed.write_text(text.replace("success = 0.5 ", "success = 0.4 "))
    assert experiment.digest_of(changed) != experiment.digest_of()
    changed.write_text(text.partition(experiment.MARK)[0])
    assert experiment.digest_of(changed) == experiment.digest_of()


def test_an_unknown_word_in_the_design_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(f"sucess = 0.5\n{experiment.FILE.read_text()}")
    with pytest.raises(UsageError, match="sucess"):
        experiment.read_design(tmp_path / "experiment.toml")


def test_the_frozen_part_is_read_as_it_was_written(tmp_path: Path) -> None:
    frozen = experiment.Frozen(
        design="d", cards={"a": {"cards": ["x@1", "y@2"]}}, prompts={"a": {"none": "1", "cards": "2"}}
    )
    path = tmp_path / "experiment.toml"
    path.write_text(experiment.FILE.read_text().partition(experiment.MARK)[0] + experiment.frozen_part(frozen))
    assert experiment.read_design(path).frozen == frozen


def test_targets_are_eight_and_have_room_for_forty_pairs() -> None:
    assert len(DESIGN.targets) == 8
    assert len(DESIGN.targets) * DESIGN.repeats >= 40
    assert {arm for pair in DESIGN.contrasts for arm in pair} == set(DESIGN.arms)


def test_arms_differ_in_their_cards_alone() -> None:
    """Contract, kernel, goal and steps are the same; a placebo has the words of the arm with cards."""
    for name in DESIGN.targets:
        task = task_of(DESIGN, name)
        methods = {arm: method_of(DESIGN, arm, task.case, DESIGN.cards(name, arm), DESIGN.shots) for arm in DESIGN.arms}
        assert len({(method.goal, method.max_steps) for method in methods.values()}) == 1
        assert methods["cards"].serving == methods["placebo"].serving
        assert [card.name for card in DESIGN.cards(name, "labels")] == [
            card.name for card in DESIGN.cards(name, "cards")
        ]
        assert not {card.name for card in DESIGN.cards(name, "cards")} & {
            card.name for card in DESIGN.cards(name, "placebo")
        }
        assert not DESIGN.cards(name, "none")


def test_no_lineage_has_a_targets_case() -> None:
    origins = [at for card in find_cards(experiment.ROOT / "skills") for at in card.origins]
    own = {(at.operator, tuple(at.shape.values())) for at in origins}
    assert not own & {(DESIGN.case(name).operator, DESIGN.targets[name].shape) for name in DESIGN.targets}


def test_a_root_may_have_any_speed_and_instructions() -> None:
    case, of_root = DESIGN.case("fp8_gemm"), DESIGN.case("fp8_gemm", of_root=True)
    assert (case.requires, case.at_least) == (("wgmma", "tma_load", "mbarrier"), DESIGN.success)
    assert not of_root.requires
    assert of_root.at_least < 1e-3
    assert case.id == of_root.id


@pytest.mark.parametrize("name", DESIGN.targets)
def test_goals_name_what_counts(name: str) -> None:
    case = DESIGN.case(name)
    assert operator_of(case).name == case.operator
    text = goal(DESIGN, case)
    assert f"{DESIGN.success:g}x" in text
    assert all(word in text for word in case.requires)


@pytest.mark.parametrize("name", DESIGN.repair.kernels)
def test_a_broken_kernel_differs_in_one_place(name: str) -> None:
    case, broken, whole = DESIGN.broken(name)
    before, after = whole.files[0].text.splitlines(), broken.files[0].text.splitlines()
    if len(before) == len(after):
        assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
    assert not broken.files[0].text.startswith("//")
    assert tuple(case.shape.values()) == DESIGN.repair.shapes[case.operator]
    assert case.at_least == DESIGN.repair.at_least
    (card,) = DESIGN.repair_cards(name, "cards")
    assert card.name == DESIGN.repair.kernels[name].card
    assert not DESIGN.repair_cards(name, "none")


def test_a_place_that_is_not_there_once_is_refused() -> None:
    kernels = {"x": msgspec.structs.replace(DESIGN.repair.kernels["tensor_box"], find="barrier")}
    design = msgspec.structs.replace(DESIGN, repair=msgspec.structs.replace(DESIGN.repair, kernels=kernels))
    with pytest.raises(UsageError, match=r"stands \d+ times"):
        design.broken("x")


def test_a_kernel_of_cutlass_is_refused() -> None:
    verdict = refused(DESIGN.case(TOPK), DESIGN.root(TOPK))
    assert verdict.code is Code.FLAG_REFUSED
    assert verdict.source_digest == DESIGN.root(TOPK).digest


def turn(root: Path, at: Path, chosen: str, *more: str) -> subprocess.CompletedProcess[str]:
    """One turn of some of the suite's tests."""
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"suites/skill_effect/{chosen}",
        "--platform=sm90", f"--klineage-executor=batch:{at / 'judge'}", "--klineage-llm=exchange",
        f"--klineage-exchange={at / 'replies'}", "--klineage-model=unbilled",
        f"--klineage-trajectories={at / 'trajectories'}", f"--klineage-cache-dir={at / 'cache'}", *more,
    ]  # fmt: skip
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.nightly
def test_one_command_writes_all_prompts_of_the_pilot(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    done = turn(pytestconfig.rootpath, tmp_path, "test_pilot.py")
    assert done.returncode == WAITING_EXIT, done.stdout[-3000:]
    prompts = sorted((tmp_path / "replies").rglob("*-prompt.md"))
    assert len(prompts) == len(DESIGN.targets) * DESIGN.pilot.replies == 32
    digests = {re.search(r"^digest: (\w+)$", prompt.read_text(), re.M)[1] for prompt in prompts}  # type: ignore[index]
    assert digests == {arms["none"] for arms in frozen_now(DESIGN).prompts.values()}
    assert not (tmp_path / "judge" / "request").exists()


@pytest.mark.nightly
def test_broken_kernels_are_judged_before_they_are_shown(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    done = turn(pytestconfig.rootpath, tmp_path, "test_repair.py", "-k", "test_repair and tensor_box")
    assert done.returncode == WAITING_EXIT, done.stdout[-3000:]
    assert len(list((tmp_path / "judge" / "request").iterdir())) == 1
    assert len(list((tmp_path / "judge" / "artifacts").iterdir())) == 1
    assert not (tmp_path / "replies").exists()


@pytest.mark.nightly
def test_only_what_is_built_with_its_words_reaches_a_gpu(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    chosen = ("test_effect.py", "-k", f"({TOPK} or {ATTENTION}) and none-1 and test_chain")
    first = turn(pytestconfig.rootpath, tmp_path, *chosen)
    if DESIGN.frozen != frozen_now(DESIGN):
        assert "not the frozen ones" in first.stdout
        pytest.skip("cards have changed since the freeze: the experiment's chains are no longer asked for")
    assert first.returncode == WAITING_EXIT
    replies = tmp_path / "replies" / "skill_effect-sm90" / "effect" / "none"
    root = {name: DESIGN.root(name).files[0].text for name in (TOPK, ATTENTION)}
    (replies / f"{TOPK}-1" / "0001-reply.md").write_text(f"PLAN: x\n\n```cuda\n{root[TOPK]}}}\n```\n")
    (replies / f"{ATTENTION}-1" / "0001-reply.md").write_text(f"PLAN: x\n\n```cuda\n{root[ATTENTION]}// 1\n```\n")
    assert turn(pytestconfig.rootpath, tmp_path, *chosen).returncode == WAITING_EXIT
    assert not (tmp_path / "judge" / "request").exists()
    assert "build_error.compile" in (replies / f"{TOPK}-1" / "0002-prompt.md").read_text()
    assert "no kernel has wgmma" in (replies / f"{ATTENTION}-1" / "0002-prompt.md").read_text()
    (replies / f"{TOPK}-1" / "0002-reply.md").write_text(f"PLAN: x\n\n```cuda\n{root[TOPK]}// 2\n```\n")
    assert turn(pytestconfig.rootpath, tmp_path, *chosen).returncode == WAITING_EXIT
    (request,) = (tmp_path / "judge" / "request").iterdir()
    assert b"// 2" in request.read_bytes()


def test_the_best_kernel_is_asked_for_once_more(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """By the trajectories of made-up chains; its text comes from the request that was judged then."""
    slow, fast = (numbered(DESIGN.root(TOPK), number) for number in (1, 2))
    folder = BatchFolder(tmp_path / "judge")
    for source in (slow, fast):
        folder.submit(JudgeRequest(case=DESIGN.case(TOPK), source=source, platform="sm90", settings={}))
    events = [begun(arm="cards", target=TOPK, repeat="1", case=DESIGN.case(TOPK).id)]
    for call, (source, speedup) in enumerate([(slow, 0.6), (fast, 0.9)], 1):
        message = VerdictMessage(verdict=verdict(speedup, source.digest), feedback="")
        note = Noted(topic=VERDICT_TOPIC, text=to_json(message).decode())
        events += [note, Judged(source_digest=source.digest, code=message.verdict.code, verdict="", call=call)]
    path = tmp_path / "trajectories" / "skill_effect-sm90" / "effect" / "cards" / f"{TOPK}-1.jsonl"
    path.parent.mkdir(parents=True)
    lines = [TrajectoryLine(at="2026-11-28T00:00:00Z", event=event) for event in events]
    path.write_bytes(b"".join(to_json(line) + b"\n" for line in lines))
    before = set((tmp_path / "judge" / "request").iterdir())
    done = turn(pytestconfig.rootpath, tmp_path, "test_best.py", "-k", f"{TOPK} and cards")
    assert done.returncode == WAITING_EXIT, done.stdout[-3000:]
    (path,) = set((tmp_path / "judge" / "request").iterdir()) - before
    request = from_json(path.read_bytes(), JudgeRequest)
    assert request.source.digest == fast.digest
    assert request.settings["also_policies"] == ["do_bench"]
    assert request.settings["precision"] == 0.01


def numbered(source: KernelSource, number: int) -> KernelSource:
    (file,) = source.files
    return msgspec.structs.replace(source, files=(msgspec.structs.replace(file, text=f"{file.text}// {number}\n"),))
