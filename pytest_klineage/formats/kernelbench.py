"""KernelBench problems as operators, and their candidates as kernels.

A problem is a Python file with a class Model, get_inputs() and get_init_inputs(); a candidate is one with ModelNew. The
problem is run once, to see what it takes and gives; a candidate's text is only looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_klineage.errors import UsageError
from pytest_klineage.formats.describing import Answer, Request, ask
from pytest_klineage.formats.imported import HEAD, Imported, Unsupported, identifier, keywords, write_file
from pytest_klineage.operators import make_case, operator_of
from pytest_klineage.operators.distributions import TORCH_DTYPES
from pytest_klineage.operators.modules import Described
from pytest_klineage.operators.resolve import from_file
from pytest_klineage.records import KernelSource, SourceFile, Surface

CANDIDATE = "ModelNew"
ENTRY = "klineage_run"
"""The function of the adapter that follows a candidate."""
MAIN = "model_new.py"
DEFINITION = """
from pytest_klineage import operator
from pytest_klineage.operators.modules import ModuleDefinition

_problem = ModuleDefinition(globals(), {arguments!r}, {state!r}, training={training})


@operator(
    "{signature}",
    dtypes=({dtype!r},), min_bytes={min_bytes}, may_ignore={weights!r},
)
def {name}({inputs}{numbers}):
    return _problem({named})


@{name}.inputs("default")
def _spread(generator):
    return _problem.inputs(generator.device)


@{name}.inputs("as_written")
def _as_written(generator):
    return _problem.inputs(generator.device, as_written=True)
"""
ADAPTER = '''

_klineage_model = None


def {entry}({arguments}):
    """Calls the module as a function: made once, its parameters replaced by the tensors that are given."""
    global _klineage_model, _klineage_state
    import torch
    if _klineage_model is None:
        _klineage_model = {candidate}(*{constructor}).train({training}).to({first}.device, torch.{dtype})
        _klineage_state = {{**dict(_klineage_model.named_parameters()), **dict(_klineage_model.named_buffers())}}
{weights}    with torch.no_grad():
        return _klineage_model({given})
'''


def read_problem(path: Path, into: Path, **settings: Any) -> Imported:
    """A problem as an operator in a file of the folder `into`, with a case of it; see `read_problems`.

    Raises Unsupported, which names what stands in the way, and UsageError when the file cannot be read.
    """
    [found] = read_problems([path], into, **settings)
    if isinstance(found, UsageError):
        raise found
    return found


def read_problems(
    paths: Sequence[Path], into: Path, *, sizes: Mapping[str, Any] | None = None, at_most: int = 0,
    precision: str = "", training: bool = True, reference: str = "torch",
) -> list[Imported | UsageError]:  # fmt: skip
    """Problems as operators: each is executed once, in a process with limits, to see what it takes and gives.

    sizes: other values of names at the file's top, numbers or tuples, or their text.
    at_most: what all other such sizes become at most; 0 leaves them.
    precision: the type, such as "fp16", that parameters and inputs are cast to; default: as they are.
    training: the mode of the module. KernelBench's is that of training.
    """
    texts = [_text(path) for path in paths]
    asked = {
        position: Request(text=text, sizes=dict(sizes or {}), at_most=at_most, precision=precision, training=training)
        for position, text in enumerate(texts) if isinstance(text, str)
    }  # fmt: skip
    answers = dict(zip(asked, ask(list(asked.values())), strict=True)) if asked else {}
    return [
        text if isinstance(text, UsageError) else _imported(path, into, answers[position], training, reference)
        for position, (path, text) in enumerate(zip(paths, texts, strict=True))
    ]


def candidate_of(text: str, imported: Imported, label: str = "") -> KernelSource:
    """A candidate of an imported problem as a kernel: its file, and after it an adapter that calls ModelNew.

    The adapter makes ModelNew once, with what get_init_inputs gives, and puts the case's inputs in the place of its
    parameters. It runs where every kernel runs; a parameter of another name is an error there. Raises Unsupported for
    text that has no class ModelNew.
    """
    name = label or imported.name
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unsupported(name, f"it is not valid Python: {error}") from None
    if not any(isinstance(node, ast.ClassDef) and node.name == CANDIDATE for node in tree.body):
        raise Unsupported(name, f"a class {CANDIDATE} is not there")
    surface = Surface.TRITON if _imports(tree, "triton") else Surface.PYTHON
    files = (SourceFile(MAIN, f"{text.rstrip()}\n{_adapter(imported)}"),)
    return KernelSource(surface=surface, files=files, entry=ENTRY, label=name)


def _adapter(imported: Imported) -> str:
    case = imported.case
    names = [spec.name for spec in operator_of(case).signature(case).inputs]
    numbers = [name for name in imported.arguments if name not in names]
    weights = "".join(f"    _klineage_state[{theirs!r}].data = {ours}\n" for theirs, ours in imported.weights.items())
    return ADAPTER.format(
        entry=ENTRY, arguments=", ".join([*names, *(["*", *numbers] if numbers else [])]), candidate=CANDIDATE,
        constructor=imported.constructor, training=imported.training, first=names[0],
        dtype=TORCH_DTYPES[case.dtype], weights=weights, given=", ".join(imported.arguments),
    )  # fmt: skip


def _text(path: Path) -> str | UsageError:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return UsageError(f"the problem {path} cannot be read: {error}")


def _imported(path: Path, into: Path, answer: Answer, training: bool, reference: str) -> Imported | UsageError:
    found = answer.found
    if found is None:
        return Unsupported(path.stem, answer.error)
    try:
        name = identifier("kb", path.stem)
        file = write_file(into, name, _defining(name, path.stem, answer, found, training))
        case = make_case(from_file(file, name), found.shape, found.dtype, reference)
    except UsageError as error:
        return Unsupported(path.stem, str(error))
    return Imported(
        name=path.stem, case=case, file=file, arguments=found.arguments, weights=found.state,
        constructor=found.constructor, training=training, sizes=answer.sizes,
    )  # fmt: skip


def _defining(name: str, problem: str, answer: Answer, found: Described, training: bool) -> str:
    """The text of the file that defines the operator."""
    inputs = [*(item for item in found.arguments if item not in found.numbers), *found.state.values()]
    sizes = "; ".join(f"{size} = {value}" for size, value in answer.sizes.items())
    origin = f"KernelBench{f', with {sizes}' if sizes else ''}"
    definition = DEFINITION.format(
        arguments=found.arguments, state=found.state, training=training, signature=found.signature, dtype=found.dtype,
        min_bytes=found.min_bytes, weights=tuple(found.state.values()), name=name, inputs=", ".join(inputs),
        numbers=keywords(found.numbers), named=", ".join(f"{item}={item}" for item in (*inputs, *found.numbers)),
    )  # fmt: skip
    return f"{HEAD.format(name=problem, origin=origin)}\n{answer.text.strip()}\n\n{definition}"


def _imports(tree: ast.Module, package: str) -> bool:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] == package for name in names)
