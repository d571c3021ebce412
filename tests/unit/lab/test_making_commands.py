"""`cards lift`, `cards admit` and `lineage make` as a user starts them: recorded replies or a program as the model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.cli.main import main
from pytest_klineage.lab.induction.admit_store import read_trial
from pytest_klineage.lab.induction.lift_groups import grouped, timed_sites
from pytest_klineage.lab.library.cards import find_cards, read_card, write_card
from pytest_klineage.lab.library.lineages import FOLDER, find_all, load_lineage, read_record, save_lineage
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.making import card_of, verified_lineages
from pytest_klineage.records import Answered, CardStatus, Termination

ROOT = Path(__file__).parents[3]
CARD = "cpu-cpp-pack-weight-panels"
QUICK = ("--platform=cpu", "--time-limit=0.2", "--precision=0.3", "--busy-limit=1", "--spread-limit=1e6")
WAITS = 8


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def says(at: Path) -> Callable[[str], tuple[str, ...]]:
    """Options of a model that answers every prompt with one text."""

    def model(text: str) -> tuple[str, ...]:
        (at / "reply.md").write_text(text)
        (at / "model.py").write_text(f"import sys; sys.stdin.read(); print(open({str(at / 'reply.md')!r}).read())")
        command = f"{sys.executable} {at / 'model.py'}"
        return "--llm=command", f"--command={command}", "--model=unbilled", f"--trajectories={at / 'trajectories'}"

    return model


def candidate(skills: Path) -> Path:
    """A copy of an admitted card, as it was before anything was tried with it."""
    folder = skills / CARD
    shutil.copytree(ROOT / "skills" / CARD, folder, ignore=shutil.ignore_patterns("trials"))
    write_card(skills, msgspec.structs.replace(read_card(folder), status=CardStatus.CANDIDATE, log=()))
    return folder


def test_a_recorded_conversation_makes_its_card_again(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = sorted((ROOT / "skills" / "lifts").glob("sm90-cuda-phase-decomposition-*.jsonl"))[0]
    (at / "trajectories" / "lift").mkdir(parents=True)
    shutil.copyfile(kept, at / "trajectories" / "lift" / kept.name)
    given = [
        "--llm=replay",
        f"--trajectories={at / 'trajectories'}",
        f"--experts={ROOT / 'experts'}",
        "--skills=skills",
    ]
    assert main(["cards", "lift", kept.stem, *given]) == 0
    (card,) = find_cards(at / "skills")
    assert card.evidence in {known.evidence for known in find_cards(ROOT / "skills")}
    assert (at / "skills" / "lifts" / kept.name).is_file()
    assert card.name in capsys.readouterr().out


def test_a_retired_card_leaves_its_steps_to_be_lifted_again(at: Path) -> None:
    card = read_card(candidate(at / "skills"))
    groups, _ = grouped(timed_sites(verified_lineages(ROOT / "experts")))
    cited = {item.transition for item in card.evidence}
    group = next(group for group in groups if cited & {site.transition.digest for site in group.sites})
    assert card_of(group, at / "skills") == card
    write_card(at / "skills", msgspec.structs.replace(card, status=CardStatus.RETIRED))
    assert card_of(group, at / "skills") is None


def test_what_was_said_of_kernels_of_others_is_not_kept(at: Path, says: Callable[[str], tuple[str, ...]]) -> None:
    kept = sorted((ROOT / "skills" / "lifts").glob("cpu-cpp-pack-weights-*.jsonl"))[0]
    said = [line.event for line in read_trajectory(kept)[0] if isinstance(line.event, Answered)]
    shutil.copytree(ROOT / "experts", at / "experts", ignore=shutil.ignore_patterns("*-cuda", "*-tilelang"))
    for folder in find_all(at / "experts"):
        stored = load_lineage(folder)
        provenance = stored.lineage.provenance | {"source": "https://forge.example/somebody/theirs"}
        save_lineage(folder, msgspec.structs.replace(stored.lineage, provenance=provenance), stored.sources)
    given = [*says(said[-1].text), "--experts=experts", "--skills=skills"]
    assert main(["cards", "lift", kept.stem, *given]) == 0
    (card,) = find_cards(at / "skills")
    assert all(item.lineage.endswith("@theirs") for item in card.evidence)
    assert not (at / "skills" / "lifts").exists()


def test_a_prompt_waits_for_its_reply(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = grouped(timed_sites(verified_lineages(ROOT / "experts")))[0][0].name
    given = ["--llm=exchange", "--exchange=prompts", "--model=unbilled", f"--experts={ROOT / 'experts'}"]
    assert main(["cards", "lift", name, *given]) == WAITS
    assert main(["cards", "lift", name, *given]) == WAITS
    assert list((at / "prompts").rglob("*-prompt.md"))
    assert not (at / "skills").exists()


@pytest.mark.nightly
def test_a_trial_is_judged_stored_and_logged(at: Path, says: Callable[[str], tuple[str, ...]]) -> None:
    folder, trial = candidate(at / "skills"), sorted((ROOT / "skills" / CARD / "trials").iterdir())[-1]
    targets = at / "targets.toml"
    targets.write_text("[cpu]\nconv2d = [[1, 16, 8, 8, 16, 3, 1, 1]]\n")
    kernel = read_trial(trial).kernel.main.text
    status = main(
        ["cards", "admit", CARD, "--skills=skills", f"--experts={ROOT / 'experts'}", f"--targets={targets}",
         *says(f"```cpp\n{kernel}\n```\n"), *QUICK]
    )  # fmt: skip
    card = read_card(folder)
    assert len(card.log) == len(list((folder / "trials").iterdir())) >= 1
    assert (status == 0) == (card.status is CardStatus.ADMITTED)


def test_a_walk_is_kept_as_far_as_it_went(at: Path, says: Callable[[str], tuple[str, ...]]) -> None:
    shutil.copytree(ROOT / "experts" / "gemm" / "cpu-cpp", at / "experts" / "gemm" / "cpu-cpp",
                    ignore=shutil.ignore_patterns(FOLDER))  # fmt: skip
    assert main(["lineage", "make", "gemm/cpu-cpp", *says("I would rather not."), *QUICK]) == 1
    lineage = read_record(at / "experts" / "gemm" / "cpu-cpp" / FOLDER)
    assert not lineage.complete
    assert lineage.termination is not Termination.INTERRUPTED
    assert len(lineage.states) == 1


@pytest.mark.parametrize("command", [("cards", "lift", "x"), ("cards", "admit", "x"), ("lineage", "make", "x")])
def test_a_name_that_is_unknown(at: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    (at / "skills").mkdir()
    assert main([*command, f"--experts={ROOT / 'experts'}", *QUICK[: 1 if command[1] != "lift" else 0]]) == 2
    assert "'x'" in capsys.readouterr().err


def test_without_a_model_nothing_is_written(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = grouped(timed_sites(verified_lineages(ROOT / "experts")))[0][0].name
    assert main(["cards", "lift", name, f"--experts={ROOT / 'experts'}"]) == 2
    assert "needs a language model" in capsys.readouterr().err
    assert not list(at.iterdir())
