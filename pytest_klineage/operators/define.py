"""An operator from a definition in PyTorch: `@operator("x[M,N] -> y[M,N]")`. Importing this imports no torch.

The definition is a plain function of the inputs. Evaluated in float64 it is the oracle; run once in the case's own
precision it sets the tolerance. It is called in the judge's oracle process and, for `ref="torch"`, in the reference's;
a candidate's process never imports it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.operators import evaluation, examination, further, open_inputs, open_symmetry
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION
from pytest_klineage.operators.defined import DEFAULT_DTYPES, GENERATOR, Allclose, CallSite, DefinedOperator, Function
from pytest_klineage.operators.movement import CAST, MOVES
from pytest_klineage.records import KernelCase, Option

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo
    from pytest_klineage.operators.tolerance import Expected


def allclose(rtol: float = 0.0, atol: float = 0.0) -> Allclose:
    """A tolerance for `operator(tolerance=...)`. Raises UsageError for numbers that cannot be one."""
    return Allclose(rtol, atol)


def operator(
    signature: str,
    *,
    dtypes: Sequence[str] = DEFAULT_DTYPES,
    tolerance: Allclose | Mapping[str, Allclose] | None = None,
    options: Mapping[str, Sequence[Option]] | None = None,
    flops: str | int = 0,
    min_bytes: str | int | None = None,
    may_ignore: Sequence[str] = (),
    defaults: bool | Sequence[str] = True,
    name: str = "",
) -> Callable[[Function], OpenOperator]:
    """Make an operator of the function below: its definition, in PyTorch, with the inputs as parameters.

    signature: the tensors, such as "x[M,N], w[N]: fp32 -> y[M,N]"; see docs/reference/operators.md for the grammar.
    dtypes: types that a case may have; the first is that of examples.
    tolerance: `allclose(rtol, atol)` for all outputs, or by output; default: ten times the rounding errors that the
    definition itself makes in the case's precision.
    options: allowed values by keyword-only parameter, the default first; needed for strings, possible for numbers.
    flops, min_bytes: what the function needs at least, as a formula over axes such as "2*M*N*K".
    may_ignore: inputs that need not change an output; by default a case in which one does not is refused. And options
    that a kernel need not heed: it is made for the case's own value.
    defaults: which of the further distributions "large", "small", "shifted", "lowered", "far", "alone", "mixed",
    "constant", "zeros", "outlier", "repeated", "signed_zeros", "eighths" and, of integers and booleans,
    "integers_wide", "integers_beyond", "integers_whole", "integers_constant", "integers_zeros", "integers_last" kernels
    are checked with, where the definition allows it; False for none.
    name: in tables, and for `op="file.py:name"`; default: the function's.

    Keyword-only parameters with a default are options of a case; those without one are axes. Raises UsageError with
    the line of the file.
    """

    caller = sys._getframe(1)
    call_site = CallSite(Path(caller.f_code.co_filename), caller.f_lineno, caller.f_globals)

    def define(function: Function) -> OpenOperator:
        return OpenOperator(
            call_site,
            function, signature, dtypes=dtypes, tolerance=tolerance, options=options or {}, flops=flops,
            num_bytes=min_bytes, may_ignore=may_ignore, defaults=defaults, name=name,
        )  # fmt: skip

    if not isinstance(signature, str):
        raise UsageError('@operator needs the signature first: @operator("x[M,N] -> y[M,N]")')
    return define


class OpenOperator(DefinedOperator):
    """An operator that a user has defined. Calling it calls the definition."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The definition's own result."""
        return self.function(*arguments, **named)

    def __repr__(self) -> str:
        return f'<operator {self.name} "{self.line.text}">'

    def explanation(self) -> str:
        return f"{self.line.text}, by this definition:\n\n```python\n{inspect.getsource(self.function).strip()}\n```"

    def inputs(self, name: str) -> Callable[[Function], Function]:
        """Name another distribution of the inputs, or replace the "default" one, by the function below.

        The function takes any of the inputs by name, as standard normal float64 tensors (integers as the signature
        bounds them), any axes, options, and `generator`. It returns the inputs it took, changed, or a dict by name.
        """
        if callable(name):
            raise self.error(UsageError('name the distribution: @name.inputs("shifted")'), name)

        def add(function: Function) -> Function:
            self._check_parameters(function, f"the distribution {name!r}")
            input_distribution = DEFAULT_DISTRIBUTION if name == "default" else name
            if input_distribution in self.distributions:
                raise self.error(UsageError(f"there are two distributions {name!r}"), function)
            self.distributions[input_distribution] = function
            self.input_distributions = tuple(dict.fromkeys([*self.input_distributions, input_distribution]))
            return function

        return add

    def symmetry(self, function: Function) -> Function:
        """The function below draws an exact symmetry: inputs that differ in their bytes, and the way back.

        It takes any of the inputs by name, axes, options and `generator`, and returns the inputs it took, transformed,
        and a function from the results of the new problem (positional) to those of the old one. Without one, axes that
        the definition can be permuted along are found by trying.
        """
        self._check_parameters(function, "the symmetry")
        self.symmetry_function = function
        return function

    def _check_parameters(self, function: Function, what: str) -> None:
        known = {tensor.name for tensor in self.line.inputs} | {*self.axes, *self.options, GENERATOR}
        for parameter in inspect.signature(function).parameters:
            if parameter not in known:
                raise self.error(UnknownName(f"parameter of {what} of {self.name}", parameter, known), function)

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        return open_inputs.draw(self, case, generator, input_distribution)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        return evaluation.evaluate(self, case, inputs, in_float64=True)

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        return evaluation.evaluate(self, case, inputs, in_float64=False)

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        return evaluation.error_scales(self, case, inputs, expected)

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        return further.names(self, case)

    def elsewhere_names(self, case: KernelCase) -> tuple[str, ...]:
        return further.elsewhere(self, case)

    def further_case(self, case: KernelCase, name: str) -> KernelCase:
        return further.other_options(self, case).get(name, case)

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Expected] | str:
        return further.problem(self, case, name, generator, wrong)

    def has_symmetry(self, case: KernelCase) -> bool:
        return self.symmetry_function is not None or bool(self.permutable_axes(case))

    def permutable_axes(self, case: KernelCase) -> tuple[str, ...]:
        """Axes along which inputs may be permuted, with the outputs following: found by trying, once a case."""
        if case.id not in self.symmetric:
            self.symmetric[case.id] = open_symmetry.find_axes(self, case)
        return self.symmetric[case.id]

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        if self.symmetry_function is not None:
            return open_symmetry.declared(self, case, inputs, generator)
        return open_symmetry.permuted(self, self.permutable_axes(case), inputs, generator)

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        return open_inputs.one_redrawn(self, case, inputs, generator)

    def examine(self, case: KernelCase, inputs: Tensors) -> list[str]:
        return examination.examine(self, case, inputs)

    def calls_only_moves(self, case: KernelCase) -> bool:
        return self.calls_only(case, MOVES)

    def moves_alone(self, case: KernelCase) -> bool:
        return self.calls_only(case, MOVES - {CAST})

    def object_to(self, findings: Sequence[str]) -> None:
        if findings:
            raise self.error(examination.objection(findings))
