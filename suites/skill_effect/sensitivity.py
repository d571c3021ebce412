"""What the primary contrast becomes under other choices: without a target, by target, without pairs of two calls.

python suites/skill_effect/sensitivity.py build/effect/trajectories/skill_effect-sm90/effect

Written after the first look at the data: it describes, and decides nothing.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from design import CARDS, NONE, read_design

from pytest_klineage.lab.studies.chains import Chain, chains_below
from pytest_klineage.lab.studies.effect import both, succeeds_at_once, trials_by_arm
from pytest_klineage.lab.studies.paired import Pair, discordance, success_difference

SECOND_CALL = "2026-11-28T21:28"
"""When the second call on a GPU began, as verdicts say it."""
BROKE_A_RULE = ("grouped_mm", 5)
T_7 = 2.365
"""97.5 % quantile of Student's t with 7 degrees of freedom, for eight targets."""


def main(folder: Path) -> None:
    """Print every figure."""
    design = read_design()
    study, frozen = design.study, design.frozen.design if design.frozen else ""
    chains = [chain for chain in chains_below(folder) if chain.design == frozen]
    pairs = list(both(trials_by_arm(chains), CARDS, NONE))

    def won(chain: Chain) -> float:
        return float(succeeds_at_once(chain, study))

    def show(name: str, kept: Iterable[tuple[Chain, Chain]], first: Callable[[Chain], float] = won) -> None:
        found = discordance([Pair(one.target, first(one), won(other)) for one, other in kept])
        points, p = success_difference(found), found.p_greater
        sys.stdout.write(
            f"{name}: {found.pairs} pairs, {points.estimate:+.2f} [{points.low:+.3f}, {points.high:+.3f}], "
            f"one-sided p {p:.4f}, after Holm at most {min(3 * p, 1):.4f}\n"
        )

    show("all", pairs)
    show("without fp8_gemm", [pair for pair in pairs if pair[0].target != "fp8_gemm"])
    show("judged in one call", [(one, other) for one, other in pairs if late(one) == late(other)])
    show("a rule broken is a failure", pairs, lambda one: 0.0 if one.trial == BROKE_A_RULE else won(one))
    means = [
        statistics.mean(won(one) - won(other) for one, other in pairs if one.target == name) for name in design.targets
    ]
    mean, half = statistics.mean(means), T_7 * statistics.stdev(means) / math.sqrt(len(means))
    near = [
        abs(chain.first.speedup / study.least(chain) - 1) < 0.01
        for pair in pairs for chain in pair if chain.first is not None and chain.first.speedup is not None
    ]  # fmt: skip
    sys.stdout.write(f"by target: {mean:+.2f} [{mean - half:+.3f}, {mean + half:+.3f}]\n")
    sys.stdout.write(f"within 1 % of the threshold: {sum(near)} of {len(near)}\n")


def late(chain: Chain) -> bool:
    """Whether the first shot was judged in the second call."""
    verdict = chain.first.verdict if chain.first is not None else None
    return verdict is not None and str(verdict.judged_at) >= SECOND_CALL


if __name__ == "__main__":
    main(Path(sys.argv[1]))
