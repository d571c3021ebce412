"""The oracle's stock of problems for one case: inputs of every input distribution with expected outputs, and their
symmetry transforms."""

from __future__ import annotations

import hashlib
import math
import random
import secrets
import time
from typing import TYPE_CHECKING

import torch

from pytest_klineage.operators import operator_of
from pytest_klineage.operators.distributions import torch_dtype
from pytest_klineage.operators.movement import is_cast, is_rearrangement, is_truncation
from pytest_klineage.operators.null_models import lint_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase
from pytest_klineage.records.messages import OpenCase, PlannedCheck
from pytest_klineage.worker.host.arena import same_bits
from pytest_klineage.worker.redrawn import Redrawn

if TYPE_CHECKING:
    from pytest_klineage.operators.base import Tensors, Undo

PERTURBED = "one_element_changed"
"""Name of the check whose inputs differ from the previous one's in a single element."""


def generator(secret: str, *purpose: object, device: str = "cpu") -> torch.Generator:
    """A generator seeded from the judge's secret and a purpose; knowing one stream says nothing about another.

    Everything that operators make from it lies on `device`.
    """
    digest = hashlib.sha256(repr((secret, *purpose)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


class Problem:
    """One set of inputs with its expected outputs."""

    def __init__(
        self, case: KernelCase, input_distribution: str, inputs: Tensors, expected: Expected | None = None
    ) -> None:
        self.case, self.input_distribution = case, input_distribution
        self.inputs = inputs
        self.expected = expected or Expected(operator_of(case), case, inputs)


class TransformedProblem:
    """A problem under a random symmetry transform: other bytes, same answer up to `undo`."""

    def __init__(self, problem: Problem, key: str) -> None:
        self.problem = problem
        case = problem.case
        device = next(iter(problem.inputs.values())).device.type
        random = generator(key, "disguise", device=device)
        self.inputs, self.undo = operator_of(case).symmetry_transform(case, problem.inputs, random)


class Remade:
    """An undeclared check that is made when it is due."""

    def __init__(self, case: KernelCase, input_distribution: str) -> None:
        self.case, self.input_distribution = case, input_distribution


class Plain:
    """A problem as it is."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.inputs = problem, problem.inputs
        self.undo: Undo = lambda outputs: outputs


NOVEL_LIMIT_S = 0.02
"""On a CPU, problems that take longer to make than this are not made while timing, but before: see STOCK. A pair takes
about as long: making one of 0.15 s for every fourth took most of the time limit for attention and gated delta rules.
On a GPU a pair is two blocks of many calls, and every one is made when it is due."""
STOCK, LEAST_STOCK, STOCK_LIMIT_S = 14, 12, 60.0
"""How many problems are made before timing, once for all kernels of a case: 12 timed pairs on new problems show an
answer from memory. Where that takes longer than the limit there is no stock, and all timed inputs are transforms."""
KEPT_ELEMENTS = 1 << 25
"""Undeclared checks, and those of further shapes, of tensors with more elements than this in all are made again when
they are due: 8 of them would take more than 4 GB in float64."""
KEPT_IN_ALL, KEPT_SHARE = 1 << 27, 1 / 10
"""So are those that come once so many elements are kept of them together, about 2 GB, or on a GPU such a share of its
free memory."""
IDLE_DRAWS, MOST_TWINS, SLOW_S, TWIN_SHARE = 16, 4, 1.0, 1 / 40
"""An operator draws which input differs: it is asked for twins of as many inputs, until so many draws in a row bring no
new one. Where a problem takes longer to make, or more of a GPU's free memory, there is one of a drawn input."""
ELSEWHERE_S, LEAST_ELSEWHERE = 1.0, 2
"""What the checks of all further shapes may take to make, and how many distributions beside the default are checked
at each of them anyhow."""
FURTHER_ELSEWHERE = 2
"""How many undeclared checks are drawn for each of them, beside one of several kinds of inputs."""


class ProblemSet:
    """All problems of one case, made once and kept while the case is in use."""

    def __init__(self, request: OpenCase) -> None:
        self.case, self.secret, self.device = request.case, request.secret, request.device
        chosen = operator_of(self.case)
        default = chosen.input_distributions[0]
        self.notes = chosen.examine(self.case, chosen.make_inputs(self.case, self.random("examine"), default))
        self.findings = lint_case(chosen, self.case, self.random("lint"))
        chosen.object_to(self.findings)
        self.has_symmetry = chosen.has_symmetry(self.case)
        self.timed = [
            Problem(self.case, default, chosen.make_inputs(self.case, self.random(default, seed), default))
            for seed in range(request.seeds)
        ]
        first, before = time.monotonic(), allocated_bytes(self.device)
        drawn = self.novel()
        seconds, size = time.monotonic() - first, allocated_bytes(self.device) - before
        self.seconds = seconds
        """What making one of the default distribution took."""
        self.novel_is_cheap = self.device != "cpu" or seconds <= NOVEL_LIMIT_S
        self.stock: list[Problem] = []
        self.among: list[Problem] = []
        """Checks that may come among timed pairs: what those, whose inputs are of the default distribution, leave
        out."""
        self.redrawn = Redrawn(self.redraw)
        wanted = self.has_symmetry and not self.novel_is_cheap
        free = free_bytes(self.device)
        self.stock_size = self.size_of_stock(seconds) if wanted else 0
        self.twins = self.make_twins(most_twins(seconds, size, free))
        self.checks: list[Problem | Remade] = [*self.timed[:1], *self.twins, *self.timed[1:]]
        for input_distribution in chosen.input_distributions[1:]:
            inputs = chosen.make_inputs(self.case, self.random(input_distribution), input_distribution)
            self.checks.append(Problem(self.case, input_distribution, inputs))
        self.kept_elements, self.most_allocated = 0, allocated_bytes(self.device) + KEPT_SHARE * free
        self.add_further()
        began, shapes = time.monotonic(), self.case.also_shapes
        for number, shape in enumerate(shapes, start=1):
            self.add_shape(self.case.at_shape(shape), began + ELSEWHERE_S * number / len(shapes))
        self.only_moves = self.device == "cpu" and self.moves(drawn)

    def make_twins(self, most: int) -> list[Problem]:
        """Problems that differ from the first one in a single element, each of another input, as far as drawn."""
        chosen, first, began = operator_of(self.case), self.timed[0].inputs, time.monotonic()
        found: dict[str, Tensors] = {}
        draw = idle = 0
        while len(found) < min(most, len(first)) and idle < IDLE_DRAWS:
            if found and time.monotonic() - began > SLOW_S:
                break
            inputs = chosen.perturb(self.case, first, self.random(PERTURBED, draw))
            changed = " ".join(name for name in inputs if not same_bits(inputs[name], first[name]))
            draw, idle = draw + 1, idle + 1 if changed in found else 0
            found.setdefault(changed, inputs)
        return [Problem(self.case, PERTURBED, inputs) for inputs in found.values()]

    def add_shape(self, other: KernelCase, until: float) -> None:
        """Checks of another shape: every distribution and a few undeclared ones, or those first in an order that is
        drawn, where it gets late.

        The same secret draws the same order, of which a faster machine makes more.
        """
        chosen, order = operator_of(other), random.Random(repr((self.secret, "elsewhere", other.shape)))
        default, *others = chosen.input_distributions
        self.add(self.distributed(other, default))
        names = chosen.elsewhere_names(other)
        others += order.sample(names[1:], min(FURTHER_ELSEWHERE, len(names[1:])))
        for count, name in enumerate((*names[:1], *order.sample(others, len(others)))):
            if count >= LEAST_ELSEWHERE and time.monotonic() > until:
                break
            if not isinstance(found := self.named(other, name), str):
                self.add(found)

    def named(self, case: KernelCase, name: str, *again: str) -> Problem | str:
        """The check of a shape with this distribution, declared or not, or why there is none."""
        known = name in operator_of(case).input_distributions
        return self.distributed(case, name, *again) if known else self.further(case, name, *again)

    def distributed(self, other: KernelCase, input_distribution: str, *again: str) -> Problem:
        """The check of a shape with this distribution, the same one every time, or with `again` another one."""
        draw = self.random(str(other.shape), input_distribution, *again)
        return Problem(other, input_distribution, operator_of(other).make_inputs(other, draw, input_distribution))

    def add(self, check: Problem) -> None:
        """Plan a check, and keep its tensors unless they are large, or those that are kept are many."""
        size = sum(tensor.numel() for tensor in (*check.inputs.values(), *check.expected.outputs.values()))
        fits = size <= KEPT_ELEMENTS and self.kept_elements + size <= KEPT_IN_ALL
        if fits and allocated_bytes(self.device) <= self.most_allocated:
            self.kept_elements += size
            self.checks.append(check)
        else:
            self.checks.append(Remade(check.case, check.input_distribution))

    def add_further(self) -> None:
        """Checks that the user has not declared, and a note that says which of them are left out, and why."""
        chosen = operator_of(self.case)
        absent: dict[str, list[str]] = {}
        for name in chosen.further_names(self.case):
            found = self.further(self.case, name)
            if isinstance(found, str):
                absent.setdefault(found, []).append(name)
                continue
            self.add(found)
        absent.pop("", None)
        self.notes = [*self.notes, *(f"not checked with {', '.join(names)}: {why}" for why, names in absent.items())]

    def moves(self, novel: Problem) -> bool:
        """Whether an answer consists of input elements, perhaps cast, so that copies are all of it."""
        alike = [novel, *(one for one in self.checks if isinstance(one, Problem) and one.case == self.case)]
        answers = [(problem.inputs, problem.expected.outputs) for problem in alike]
        chosen = operator_of(self.case)
        types = {spec.name: torch_dtype(spec.dtype) for spec in chosen.signature(self.case).outputs}
        return chosen.calls_only_moves(self.case) or any(
            (is_rearrangement(answers), is_truncation(answers), is_cast(answers, types))
        )

    def further(self, case: KernelCase, name: str, *again: str) -> Problem | str:
        """An undeclared check of a shape, the same one every time or with `again` another, or why there is none."""
        chosen, draw = operator_of(case), self.random("further", str(case.shape), name, *again)
        found = chosen.further_problem(case, name, draw, self.usual_answer(case))
        return found if isinstance(found, str) else Problem(chosen.further_case(case, name), name, *found)

    def usual_answer(self, case: KernelCase) -> Tensors:
        """The answer to inputs of a shape's default distribution."""
        if case == self.case:
            return self.timed[0].expected.outputs
        chosen, draw = operator_of(case), self.random(str(case.shape), "usual")
        return chosen.oracle(case, chosen.make_inputs(case, draw, chosen.input_distributions[0]))

    def check(self, index: int, *, again: bool = False) -> Problem:
        """A planned check; when it comes `again`, where it can on a CPU, with other inputs. Raises ValueError for one
        that cannot be made once more."""
        if again and self.device == "cpu":
            if index in self.redrawn.checks:
                return self.redrawn.checks[index]
            if isinstance(self.checks[index], Remade):
                return self.redraw(index)
        return self.made(self.checks[index])

    def redraw(self, index: int) -> Problem:
        """A check of the same kind as a planned one, whose inputs no kernel has seen; that one where none is found."""
        planned = self.checks[index]
        found = self.named(self.planned_at(planned), planned.input_distribution, secrets.token_hex(16))
        return self.made(planned) if isinstance(found, str) else found

    def planned_at(self, planned: Problem | Remade) -> KernelCase:
        """The case whose check it is: one with another value of an option is this case's."""
        return self.case if planned.case.shape == self.case.shape else planned.case

    def made(self, planned: Problem | Remade) -> Problem:
        """The same check with its tensors. Raises ValueError for one that cannot be made again."""
        if not isinstance(planned, Remade):
            return planned
        found = self.named(self.planned_at(planned), planned.input_distribution)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def layouts(self) -> list[KernelCase]:
        """The cases that tensors and scalars are laid out for in shared memory: this one, at others of its shapes, and
        with other values of its options."""
        cases = [self.case.at_shape(shape) for shape in (self.case.shape, *self.case.also_shapes)]
        return [*cases, *(check.case for check in self.checks if check.case.options != self.case.options)]

    def layout_of(self, problem: Problem) -> int:
        """The place of a problem's case among them."""
        return self.layouts().index(problem.case.at_shape(problem.case.shape))

    def size_of_stock(self, seconds: float) -> int:
        """How many new problems are made for timing, where one takes so many seconds."""
        count = min(STOCK, int(STOCK_LIMIT_S / seconds))
        if count >= LEAST_STOCK:
            return count
        self.notes = [*self.notes, f"making a problem takes {seconds:.1f} s, so none is made for timing"]
        return 0

    def make_stock(self, *, checks: bool = True) -> None:
        """Make them, once: the first kernel that is to be timed waits for them, one that is wrong does not.

        With `checks`, redraw those that come among and after the timing.
        """
        while len(self.stock) < self.stock_size:
            self.stock.append(self.novel())
        if self.device == "cpu" and checks:
            self.redraw_checks()

    def redraw_checks(self) -> None:
        """Choose what comes among timed pairs, and after them, for another kernel.

        Among them come checks of the case itself with other distributions: a kernel knows another shape or option when
        it sees it. Large ones do that were redrawn, since they are not kept.
        """
        untamed = [
            place for place, one in enumerate(self.checks)
            if one.case != self.case or one.input_distribution not in (self.timed[0].input_distribution, PERTURBED)
        ]  # fmt: skip
        among = [place for place in untamed if self.checks[place].case == self.case]
        others = [place for place in untamed if place not in among]
        large = [place for place in untamed if isinstance(self.checks[place], Remade)]
        self.redrawn.draw(among, others, large, self.seconds)
        here = [self.redrawn.checks.get(place, self.checks[place]) for place in among]
        self.among = [one for one in here if isinstance(one, Problem)]

    def random(self, *purpose: object) -> torch.Generator:
        """The generator for a purpose, where the tensors lie."""
        return generator(self.secret, *purpose, device=self.device)

    def novel(self) -> Problem:
        """A problem of the default input distribution that no kernel has seen, with its answer and its own bounds."""
        chosen = operator_of(self.case)
        inputs = chosen.make_inputs(
            self.case, self.random("novel", secrets.token_hex(16)), chosen.input_distributions[0]
        )
        return Problem(self.case, chosen.input_distributions[0], inputs)

    def planned(self) -> tuple[PlannedCheck, ...]:
        """What the checks are, for the judge's progress."""
        shape = self.case.shape
        return tuple(
            PlannedCheck(
                input_distribution=check.input_distribution, shape={} if check.case.shape == shape else check.case.shape
            )
            for check in self.checks
        )


def most_twins(seconds: float, size: int, free: float) -> int:
    """How many twins there may be, where a problem takes so many seconds, and bytes of the free ones."""
    return 1 if seconds > SLOW_S or size > TWIN_SHARE * free else MOST_TWINS


def allocated_bytes(device: str) -> int:
    """What PyTorch's tensors take of a GPU's memory; 0 on a CPU, whose memory no stock is measured against."""
    return 0 if device == "cpu" else torch.cuda.memory_allocated()


def free_bytes(device: str) -> float:
    """What is free of a GPU's memory."""
    if device == "cpu":
        return math.inf
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info()[0])
