"""First shots: what the first kernel of every trial of an experiment was worth, paired between two arms."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from pytest_klineage.lab.studies.paired import Pair
from pytest_klineage.records import Verdict

TRIAL = re.compile(r"\[(?:.*-)?(?P<target>[a-z0-9_]+)-(?P<repeat>\d+)\]$")
"""How the tests of an ablation end: the target and the number of the trial."""
ROOT = "naive"
"""Label of the kernel that a trial begins with; it is no shot."""
SUCCESS = 0.5
"""Share of the reference's speed from which a right kernel is a success."""
Trial = tuple[str, int]


def first_shots(judged: Iterable[tuple[str, Verdict]]) -> dict[Trial, Verdict]:
    """The first verdict of each trial that is not of its root, from node ids and verdicts in any order."""
    shots: dict[Trial, Verdict] = {}
    for node, verdict in judged:
        found = TRIAL.search(node)
        if found is None or verdict.label == ROOT:
            continue
        trial = (found["target"], int(found["repeat"]))
        if trial not in shots or verdict.judged_at < shots[trial].judged_at:
            shots[trial] = verdict
    return shots


def is_success(verdict: Verdict, least: float = SUCCESS) -> bool:
    """Whether a kernel is right and fast enough to count."""
    timing = verdict.timing
    return verdict.scored and timing is not None and timing.speedup.estimate >= least


def successes(first: Mapping[Trial, Verdict], second: Mapping[Trial, Verdict]) -> list[Pair]:
    """Whether both arms' first shots succeeded, for the trials that both have."""
    return [
        Pair(trial[0], float(is_success(first[trial])), float(is_success(second[trial])))
        for trial in sorted(first.keys() & second.keys())
    ]


def speeds(first: Mapping[Trial, Verdict], second: Mapping[Trial, Verdict]) -> list[Pair]:
    """Logarithms of both first shots' speedups, for the trials in which both succeeded."""
    pairs = []
    for trial in sorted(first.keys() & second.keys()):
        one, other = first[trial].timing, second[trial].timing
        if one is not None and other is not None and is_success(first[trial]) and is_success(second[trial]):
            pairs.append(Pair(trial[0], math.log(one.speedup.estimate), math.log(other.speedup.estimate)))
    return pairs
