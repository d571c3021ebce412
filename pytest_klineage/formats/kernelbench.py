"""KernelBench problems as cases, and their candidates as kernels. A problem's file is read, and never executed.

A problem is a Python file with a class Model, get_inputs() and get_init_inputs(); a candidate is one with ModelNew. A
problem becomes a case when its forward is one call of a function that an operator here stands for.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.formats.imported import Imported, Unsupported
from pytest_klineage.formats.reading import Reader
from pytest_klineage.formats.recognise import Found, recognised
from pytest_klineage.formats.symbols import Constant, NotStatic, Tensor, Value
from pytest_klineage.operators import operator_of
from pytest_klineage.records import KernelSource, SourceFile, Surface

MODEL, CANDIDATE, BASE = "Model", "ModelNew", "torch.nn.Module"
ENTRY = "klineage_run"
"""What the adapter behind a candidate is called."""
MAIN = "model_new.py"
INPUTS_NOTE = "inputs are drawn by the operator's own distributions, not by get_inputs"
WEIGHTS_NOTE = "{name} is an input here, not a parameter of a module"
FLOATS = ("fp64", "fp32", "fp16", "bf16")
ADAPTER = '''

_klineage_model = None


def {entry}({arguments}):
    """Calls the module as a function: made once, its parameters replaced by the tensors that are given."""
    global _klineage_model
    if _klineage_model is None:
        _klineage_model = {candidate}(*{constructor})
{weights}    return _klineage_model({given})
'''


def read_problem(path: Path, *, reference: str = "torch", precision: str = "") -> Imported:
    """The case of a problem's file; see `import_problem`. Raises UsageError when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the problem {path} cannot be read: {error}") from error
    return import_problem(text, path.stem, reference=reference, precision=precision)


def import_problem(text: str, name: str, *, reference: str = "torch", precision: str = "") -> Imported:
    """The case of a problem. `precision`, such as "fp16", is the type that its inputs are cast to, as there.

    Raises Unsupported, which names what stands in the way: another function, a bias, code that is not straight-line.
    """
    try:
        reader = Reader(text)
        reader.module_class(MODEL, BASE)
        constructor = _listed(reader, "get_init_inputs")
        inputs = [_cast(value, precision) for value in _listed(reader, "get_inputs")]
        attributes = reader.constructed(MODEL, constructor)
        forward = reader.function("forward", MODEL)
        found = recognised(reader.called(forward, inputs, attributes), reference)
        return _imported(name, reader, found, constructor, forward, len(inputs))
    except NotStatic as error:
        raise Unsupported(name, str(error)) from error


def candidate_of(text: str, imported: Imported, label: str = "") -> KernelSource:
    """A candidate of an imported problem as a kernel: its file, and behind it an adapter that calls ModelNew.

    The adapter makes ModelNew once, with what get_init_inputs gives, and puts the case's inputs in the place of its
    parameters. It runs where every kernel runs; a parameter of another name is an error there. Raises Unsupported for
    text that has no class ModelNew.
    """
    try:
        reader = Reader(text)
    except NotStatic as error:
        raise Unsupported(label or imported.name, str(error)) from error
    if CANDIDATE not in reader.classes:
        raise Unsupported(label or imported.name, f"a class {CANDIDATE} is not there")
    names = [spec.name for spec in operator_of(imported.case).signature(imported.case).inputs]
    weights = "".join(
        f'    _klineage_model.get_parameter("{parameter}").data = {name}\n'
        for parameter, name in imported.weights.items()
    )
    adapter = ADAPTER.format(
        entry=ENTRY, arguments=", ".join(names), candidate=CANDIDATE, constructor=repr(imported.constructor),
        weights=weights, given=", ".join(imported.arguments),
    )  # fmt: skip
    surface = Surface.TRITON if _imports(reader.tree, "triton") else Surface.PYTHON
    return KernelSource(
        surface=surface, files=(SourceFile(MAIN, f"{text.rstrip()}\n{adapter}"),), entry=ENTRY,
        label=label or imported.name,
    )  # fmt: skip


def _listed(reader: Reader, name: str) -> tuple[Value, ...]:
    value = reader.called(reader.function(name), ())
    if not isinstance(value, tuple):
        raise NotStatic(reader.function(name).lineno, f"{name} does not return a list")
    return value


def _cast(value: Value, precision: str) -> Value:
    if isinstance(value, Tensor) and precision and value.dtype in FLOATS:
        return msgspec.structs.replace(value, dtype=precision)
    return value


def _imported(
    name: str, reader: Reader, found: Found, constructor: Sequence[Value], forward: ast.FunctionDef, num_inputs: int
) -> Imported:
    taken = [argument.arg for argument in forward.args.args[1:]]
    ours = {theirs: own for own, theirs in found.inputs.items()}
    weights = {theirs: own for theirs, own in ours.items() if theirs not in taken}
    plain = tuple(_constant(value) for value in constructor)
    arguments = tuple(ours[argument] for argument in taken if argument in ours)
    if len(arguments) < num_inputs:
        raise NotStatic(forward.lineno, "an input that does not go into the function")
    notes = (INPUTS_NOTE, *found.notes, *(WEIGHTS_NOTE.format(name=theirs) for theirs in weights))
    return Imported(
        name=name, case=found.case, digest=hashlib.sha256(ast.dump(reader.tree).encode()).hexdigest(),
        arguments=arguments, weights=weights, constructor=plain, notes=notes,
    )  # fmt: skip


def _constant(value: Value) -> Constant:
    if value is None or isinstance(value, int | float | bool | str):
        return value
    raise NotStatic(0, "get_init_inputs gives something else than numbers and words")


def _imports(tree: ast.Module, package: str) -> bool:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] == package for name in names)
