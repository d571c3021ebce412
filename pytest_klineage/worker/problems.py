"""The oracle's stock of problems for one case: inputs of every regime with expected outputs, and their disguises."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import TYPE_CHECKING

import torch

from pytest_klineage.operators import operator_of
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase
from pytest_klineage.records.messages import OpenCase, PlannedCheck

if TYPE_CHECKING:
    from pytest_klineage.operators.base import Tensors, Undo

TWIN = "one_element_changed"
"""Name of the check whose inputs differ from the previous one's in a single element."""


def generator(secret: str, *purpose: object, device: str = "cpu") -> torch.Generator:
    """A generator seeded from the judge's secret and a purpose; knowing one stream says nothing about another.

    Everything that operators make from it lies on `device`.
    """
    digest = hashlib.sha256(repr((secret, *purpose)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


class Problem:
    """One set of inputs with its expected outputs."""

    def __init__(self, case: KernelCase, regime: str, inputs: Tensors, bounds: dict[str, float] | None = None) -> None:
        self.case, self.regime = case, regime
        self.inputs = inputs
        self.expected = Expected(operator_of(case), case, inputs, bounds)


class Disguised:
    """A problem behind a random symmetry: other bytes, same answer up to `undo`."""

    def __init__(self, problem: Problem, key: str) -> None:
        self.problem = problem
        case = problem.case
        device = next(iter(problem.inputs.values())).device.type
        random = generator(key, "disguise", device=device)
        self.inputs, self.undo = operator_of(case).disguise(case, problem.inputs, random)


class Plain:
    """A problem as it is."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.inputs = problem, problem.inputs
        self.undo: Undo = lambda outputs: outputs


NOVEL_LIMIT_S = 0.25
"""Problems that take longer to make than this are not made while timing; checking is then by disguises alone."""


class ProblemSet:
    """All problems of one case, made once and kept while the case is in use."""

    def __init__(self, request: OpenCase) -> None:
        started = time.monotonic()
        self.case, self.secret, self.device = request.case, request.secret, request.device
        chosen = operator_of(self.case)
        default = chosen.regimes[0]
        self.notes = chosen.examine(self.case, chosen.make_inputs(self.case, self.random("examine"), default))
        self.findings = lint_case(chosen, self.case, self.random("lint"))
        chosen.object_to(self.findings)
        self.has_symmetry = chosen.has_symmetry(self.case)
        self.timed = [
            Problem(self.case, default, chosen.make_inputs(self.case, self.random(default, seed), default))
            for seed in range(request.seeds)
        ]
        first = time.monotonic()
        self.novel()
        self.novel_is_cheap = time.monotonic() - first <= NOVEL_LIMIT_S
        nudged = chosen.nudge(self.case, self.timed[0].inputs, self.random(TWIN))
        self.twin = Problem(self.case, TWIN, nudged)
        self.checks = [*self.timed[:1], self.twin, *self.timed[1:]]
        for regime in chosen.regimes[1:]:
            inputs = chosen.make_inputs(self.case, self.random(regime), regime)
            self.checks.append(Problem(self.case, regime, inputs))
        for shape in self.case.also_shapes:
            other = self.case.at_shape(shape)
            inputs = chosen.make_inputs(other, self.random(str(shape)), default)
            self.checks.append(Problem(other, default, inputs))
        self.seconds = time.monotonic() - started

    def random(self, *purpose: object) -> torch.Generator:
        """The generator for a purpose, where the tensors lie."""
        return generator(self.secret, *purpose, device=self.device)

    def novel(self) -> Problem:
        """A problem of the default regime that nobody has seen, with its answer."""
        chosen = operator_of(self.case)
        inputs = chosen.make_inputs(self.case, self.random("novel", secrets.token_hex(16)), chosen.regimes[0])
        bounds = None if self.has_symmetry else self.timed[0].expected.bounds
        return Problem(self.case, chosen.regimes[0], inputs, bounds)

    def planned(self) -> tuple[PlannedCheck, ...]:
        """What the checks are, for the judge's progress."""
        shape = self.case.shape
        return tuple(
            PlannedCheck(regime=check.regime, shape={} if check.case.shape == shape else check.case.shape)
            for check in self.checks
        )
