"""Language models by options: which backend, where trajectories lie, and what is said when something is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.llm.faults import NoBackend, NoKey, NoPrice
from pytest_klineage.lab.llm.trajectory import read_trajectory
from pytest_klineage.lab.plugin import BACKENDS, Models
from pytest_klineage.records import Begun, Noted, Stopped

PRICES = """
[models.toy]
input = 1.0
cache_write_5m = 1.25
cache_write_1h = 2.0
cache_read = 0.1
output = 5.0
"""
ECHO = "import sys; print('reply to', len(sys.stdin.read()) > 0)"
TEST = """
def test_asks(klineage_models):
    session = klineage_models.session("folder/one", settings={"seed": "1"})
    assert session.chat().ask("hello").text.strip() == "reply to True"
"""


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return path


def models(tmp_path: Path, **settings: Any) -> Models:
    return Models(settings, trajectories=tmp_path / "trajectories", replays=lambda: tmp_path / "replays")


def echoing(tmp_path: Path, prices: Path, **settings: Any) -> Models:
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    command = f"{sys.executable} {program}"
    return models(tmp_path, llm="command", command=command, model="toy", prices=prices, **settings)


class TestOptions:
    def test_a_command_answers_and_a_replay_says_the_same(self, pytester: pytest.Pytester, prices: Path) -> None:
        (pytester.path / "echo.py").write_text(ECHO)
        pytester.makepyfile(test_it=TEST)
        paid = (f"--klineage-prices={prices}", "--klineage-model=toy", "--klineage-budget=2.5")
        command = f"--klineage-command={sys.executable} {pytester.path / 'echo.py'}"
        pytester.runpytest("--klineage-llm=command", command, *paid).assert_outcomes(passed=1)
        path = pytester.path / "results" / "trajectories" / "folder" / "one.jsonl"
        begun = read_trajectory(path)[0][0].event
        assert isinstance(begun, Begun)
        assert (begun.name, begun.model, begun.budget_usd, begun.settings) == ("folder/one", "toy", 2.5, {"seed": "1"})
        before = path.read_bytes()
        pytester.runpytest("--klineage-llm=replay").assert_outcomes(passed=1)
        assert path.read_bytes() == before
        again = pytester.runpytest("--klineage-llm=command", command, *paid)
        again.stdout.fnmatch_lines(["*exists: go on with it by --klineage-resume=folder/one, replay it by*"])
        pytester.runpytest("--klineage-llm=command", command, *paid, "--klineage-resume=folder/*").assert_outcomes(
            passed=1
        )

    def test_none_is_the_default_and_says_what_to_choose(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile(test_it=TEST)
        result = pytester.runpytest()
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*nothing is sent anywhere unless you say so*"])

    def test_an_unknown_backend_stops_at_once(self, pytester: pytest.Pytester) -> None:
        result = pytester.runpytest("--klineage-llm=antropic")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"*'antropic' is not one of: {', '.join(BACKENDS)}"])

    def test_the_ini_file_may_choose(self, pytester: pytest.Pytester) -> None:
        pytester.makeini("[pytest]\nklineage_llm = exchange\nklineage_exchange = asked\nklineage_model = unbilled\n")
        pytester.makepyfile("""
            def test_it(klineage_models, pytestconfig):
                session = klineage_models.session("a")
                assert session.backend.folder == pytestconfig.rootpath / "asked" / "a"
                assert session.budget.limit_usd == 10
        """)
        pytester.runpytest().assert_outcomes(passed=1)


class TestWhatIsMissing:
    def test_no_backend(self, tmp_path: Path) -> None:
        with pytest.raises(NoBackend):
            models(tmp_path).session("a")

    def test_no_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(NoKey, match="ANTHROPIC_API_KEY is not set"):
            models(tmp_path, llm="anthropic", model="claude-opus-4-6").session("a")

    @pytest.mark.parametrize(
        ("settings", "next_step"),
        [
            ({"llm": "anthropic"}, "--klineage-model=NAME"),
            ({"llm": "exchange", "model": "toy"}, "needs --klineage-exchange=DIR"),
            ({"llm": "command", "model": "toy"}, "needs --klineage-command=PROGRAM"),
            ({"llm": "exchange", "exchange": "there"}, "name the model that answers"),
            ({"llm": "replay"}, "a.jsonl to replay: record it with a model, or name the folder"),
        ],
    )
    def test_an_option(self, settings: dict[str, str], next_step: str, tmp_path: Path, prices: Path) -> None:
        with pytest.raises(UsageError, match=next_step):
            models(tmp_path, prices=prices, **settings).session("a")
        assert not (tmp_path / "trajectories").exists()

    def test_a_price(self, tmp_path: Path, prices: Path) -> None:
        with pytest.raises(NoPrice, match=r'Add it to a price file of your own[\s\S]*models."unheard-of"'):
            models(tmp_path, llm="exchange", exchange="x", model="unheard-of", prices=prices).session("a")

    def test_a_price_file(self, tmp_path: Path) -> None:
        gone = tmp_path / "gone.toml"
        with pytest.raises(UsageError, match=r"gone.toml cannot be read"):
            models(tmp_path, llm="exchange", exchange="x", model="toy", prices=gone).session("a")

    @pytest.mark.parametrize("name", ["", "../a", "/a"])
    def test_a_name_stays_in_the_folder(self, name: str, tmp_path: Path, prices: Path) -> None:
        with pytest.raises(UsageError, match="called by a plain name"):
            echoing(tmp_path, prices).session(name)


class TestResuming:
    @pytest.mark.parametrize(
        ("pattern", "resumed"), [("all", True), ("g*/1", True), ("gemm/1", True), ("gemm/2", False)]
    )
    def test_names_choose_what_goes_on(self, pattern: str, resumed: bool, tmp_path: Path, prices: Path) -> None:
        first = echoing(tmp_path, prices)
        first.session("gemm/1")
        first.close()
        second = echoing(tmp_path, prices, resume=pattern)
        if not resumed:
            with pytest.raises(UsageError, match="exists"):
                second.session("gemm/1")
            return
        events = second.session("gemm/1").events
        second.close()
        assert isinstance(events[-1], Noted)
        assert events[-1].topic == "resumed"

    @pytest.mark.parametrize(("given", "limit"), [({}, 3.0), ({"budget": 7.0}, 7.0)])
    def test_a_new_budget_counts_where_it_is_given(
        self, given: dict[str, float], limit: float, tmp_path: Path, prices: Path
    ) -> None:
        first = echoing(tmp_path, prices, budget=3.0)
        first.session("a")
        first.close()
        second = echoing(tmp_path, prices, resume="all", **given)
        assert second.session("a").budget.limit_usd == limit
        second.close()

    @pytest.mark.parametrize(
        ("reason", "done"),
        [
            ("finished", True), ("step_limit", True), ("budget_exhausted", True), ("target_reached", True),
            ("naive_reached", True), ("not_judged", False), ("interrupted", False), ("harness_failed", False),
            ("misuse", False), ("backend_failed", False), ("", False),
        ],
    )  # fmt: skip
    def test_what_was_cut_short_goes_on_in_the_next_turn(
        self, reason: str, done: bool, tmp_path: Path, prices: Path
    ) -> None:
        with echoing(tmp_path, prices).session("a") as session:
            session.record(Stopped(reason=reason) if reason else Noted(topic="memory", text="so far"))
        folder = tmp_path / "trajectories"
        found = Models({"llm": "command"}, trajectories=folder, replays=lambda: tmp_path / "replays", in_turns=True)
        assert (found.is_done("a"), found.is_under_way("a")) == (done, not done)

    def test_what_does_not_exist_is_begun(self, tmp_path: Path, prices: Path) -> None:
        chosen = echoing(tmp_path, prices, resume="all")
        assert len(chosen.session("new").events) == 1
        assert chosen.is_recorded("new")
        chosen.close()
