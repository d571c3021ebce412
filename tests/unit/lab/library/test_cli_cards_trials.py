"""`pytest-klineage cards show --trials`: the verification log as people read it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_klineage.cli.cards import add_cards
from pytest_klineage.lab.library.cards import write_card
from pytest_klineage.records import CardStatus, Code, Context, Interval, SkillCard, Surface, Trial, TrialOutcome
from pytest_klineage.report.text import WIDTH

PLACE = Context(operator="gemm", shape={"M": 96, "N": 96, "K": 96}, dtype="fp32", surface=Surface.CPP, platform="cpu")
TRIALS = (
    Trial(
        context=PLACE, outcome=TrialOutcome.REJECTED, held_out=True, code=Code.MISMATCH, source_digest="ab" * 32,
        method="exchange:toy", tried_at="2026-11-21T12:00:00Z", note="expected 1.2x at least; " + "long " * 30,
    ),
    Trial(
        context=PLACE, outcome=TrialOutcome.SUCCESS, held_out=True, code=Code.ACCEPTED_FASTER,
        speedup=Interval(1.5, 1.4, 1.6),
    ),
)  # fmt: skip


@pytest.fixture
def shown(
    tmp_path: Path, make_card: Callable[..., SkillCard], capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What is shown of a card with these fields."""

    def call(**fields: object) -> str:
        write_card(tmp_path, make_card(**fields))
        parser = argparse.ArgumentParser()
        add_cards(parser.add_subparsers(required=True))
        parsed = parser.parse_args(["cards", "show", "gemm-simd", "--trials", "--skills", str(tmp_path)])
        assert parsed.command(parsed) == 0
        return capsys.readouterr().out

    return call


def test_every_trial_is_listed(shown: Callable[..., str]) -> None:
    text = shown(log=TRIALS)
    lines = text.splitlines()
    assert lines[0] == "gemm-simd: admitted, 2 trials, 1 held out and won"
    assert lines[1] == "  1. rejected (wrong_value.mismatch) on gemm-96x96x96-fp32 (cpu cpp)"
    assert lines[2] == "     2026-11-21T12:00:00Z; exchange:toy; abababababab; rule: square_root"
    second = "  2. success (accepted.faster) on gemm-96x96x96-fp32 (cpu cpp)"
    assert f"{second}\n     1.5x [1.4, 1.6]; rule: square_root\n" in text
    assert max(map(len, lines)) <= WIDTH


def test_a_card_without_trials_says_so(shown: Callable[..., str]) -> None:
    assert shown(log=(), status=CardStatus.CANDIDATE) == "gemm-simd: candidate, 0 trials, 0 held out and won\n"
