"""What the ablations share: options, the library, and where verdicts and tables go. Nothing is measured here.

results/trajectories/<ablation>-<platform>/<method>/<kernel>-<trial>.jsonl   one optimization (--klineage-trajectories)
results/ablations/<ablation>-<platform>.jsonl                                every verdict with its samples
results/ablations/<ablation>-<platform>.md                                   the table, made from the trajectories
"""

from __future__ import annotations

import pytest

from pytest_klineage.library.retrieval import DEFAULT_K


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("klineage suites")
    group.addoption("--trials", type=int, default=5, metavar="N", help="Trials of each kernel. Default: %(default)s.")
    group.addoption("--steps", type=int, default=8, metavar="N", help="Steps of each trial. Default: %(default)s.")
    group.addoption(
        "--cards", type=int, default=DEFAULT_K, metavar="K",
        help="Cards retrieved in each dimension. Default: %(default)s.",
    )  # fmt: skip
    group.addoption("--skills", metavar="DIR", help="The library of cards. Default: skills in this repository.")
    group.addoption(
        "--ablation", action="append", metavar="NAME",
        help="Methods of test_generated_only, such as labels-only; repeatable. Default: generated-only.",
    )  # fmt: skip
