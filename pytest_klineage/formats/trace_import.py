"""FlashInfer-Trace in: a definition with a workload as an operator with a case, a solution as a kernel.

A definition's reference is trusted: it becomes the operator's definition, and runs where the gate makes answers. A
solution's text is only looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_klineage.errors import UsageError
from pytest_klineage.formats.imported import HEAD, Imported, Unsupported, identifier, keywords, write_file
from pytest_klineage.formats.trace_records import Solution, TraceDefinition, TraceTensor, Workload
from pytest_klineage.operators import make_case, operator_of
from pytest_klineage.operators.resolve import from_file
from pytest_klineage.records import KernelSource, Option, SourceFile, Surface

RUN = "run"
ENTRY = "klineage_run"
"""The function of the adapter that follows a solution."""
SHORT = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
    "int64": "int64", "int32": "int32", "int16": "int16", "int8": "int8", "bool": "bool",
}  # fmt: skip
"""Their names of types, and ours."""
FLOATS = ("fp32", "fp16", "bf16")
LANGUAGES = {"python": Surface.PYTHON, "triton": Surface.TRITON, "tilelang": Surface.TILELANG}
"""Languages whose solutions are functions on tensors."""
NATIVE = {"cpp": Surface.CPP, "c++": Surface.CPP, "cuda": Surface.CUDA}
OURS = "klineage.h"
"""The dependency that says that a native solution has this project's ABI."""
RANDOM, SCALAR = "random", "scalar"
DEFINITION = """
from pytest_klineage import operator


@operator("{signature}", dtypes=({dtype!r},))
def {name}({inputs}{numbers}):
    return {run}({given})
"""
ADAPTER = '''

def {entry}({parameters}):
    """Calls the solution in its own order of arguments{style}."""
    {call}
'''


def import_definition(
    definition: TraceDefinition, workload: Workload, into: Path, *, reference: str = "torch"
) -> Imported:
    """The definition as an operator in a file of the folder `into`, with the case of a workload's sizes and scalars.

    Raises Unsupported, which names what stands in the way: a type, an axis without a size, inputs that lie in files.
    """
    try:
        shape = _shape(definition, workload)
        numbers = _numbers(definition, workload)
        name = identifier("fi", definition.name)
        dtype, text = _defining(name, definition, numbers)
        file = write_file(into, name, text)
        case = make_case(from_file(file, name), shape, dtype, reference, **numbers)  # type: ignore[arg-type]  # options
    except UsageError as error:
        raise Unsupported(definition.name, str(error)) from error
    return Imported(name=definition.name, case=case, file=file, arguments=tuple(definition.inputs))


def source_of(solution: Solution, imported: Imported) -> KernelSource:
    """A solution as a kernel for an imported case.

    A solution in Python, Triton or TileLang gets an adapter after its main file where it takes its outputs as
    arguments, or its inputs in another order. A native one must have been written for klineage.h. Raises Unsupported.
    """
    spec = solution.spec
    path, _, entry = spec.entry_point.partition("::")
    sources = {file.path: file.content for file in solution.sources}
    language = spec.language.lower()
    if path not in sources or not entry:
        raise Unsupported(solution.name, f"the entry point {spec.entry_point!r} is not among its files")
    if any("/" in name for name in sources):
        raise Unsupported(solution.name, "files in folders; a kernel's files lie beside one another")
    native = NATIVE.get(language)
    if native is not None and OURS not in (spec.dependencies or ()):
        bound = spec.binding or "tvm-ffi"
        raise Unsupported(solution.name, f"{language} that is bound by {bound}; a kernel here includes {OURS}")
    surface = native or LANGUAGES.get(language)
    if surface is None:
        raise Unsupported(solution.name, f"the language {spec.language!r}; known: {', '.join([*LANGUAGES, *NATIVE])}")
    text = sources.pop(path)
    if native is None:
        text, entry = _adapted(text, entry, imported, spec.destination_passing_style)
    files = (SourceFile(path, text), *(SourceFile(name, other) for name, other in sources.items()))
    flags = tuple(word for word in spec.dependencies or () if word != OURS) if native is not None else ()
    return KernelSource(surface=surface, files=files, entry=entry, flags=flags, label=solution.name)


def parameters_of(text: str, entry: str) -> tuple[str, ...] | None:
    """Names of a function's parameters; None where a file's text does not say."""
    try:
        found = [node.args for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == entry]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not found or found[-1].vararg or found[-1].kwarg:
        return None
    return tuple(item.arg for item in (*found[-1].posonlyargs, *found[-1].args, *found[-1].kwonlyargs))


def _adapted(text: str, entry: str, imported: Imported, writes_outputs: bool | None) -> tuple[str, str]:
    """The main file's text and entry, with an adapter where the calls differ."""
    signature = operator_of(imported.case).signature(imported.case)
    names = [spec.name for spec in signature.inputs]
    taken = parameters_of(text, entry)
    if writes_outputs is None and taken is not None:  # a file of before there was a choice
        writes_outputs = len(taken) > len(imported.arguments)
    passes = writes_outputs is not False
    as_ours = taken is not None and taken[len(names) :] == (("out",) if passes else ()) and len(signature.outputs) == 1
    if tuple(names) == imported.arguments and (as_ours or not passes):
        return text, entry
    call = f"return {entry}({', '.join(imported.arguments)})"
    style = ""
    if passes:
        outputs = "*out" if len(signature.outputs) > 1 else "out"
        call, style = f"{entry}({', '.join([*imported.arguments, outputs])})", ", outputs behind the inputs"
    numbers = [name for name in imported.arguments if name not in names]
    parameters = ", ".join([*names, *(["out"] if passes else []), *(["*", *numbers] if numbers else [])])
    adapter = ADAPTER.format(entry=ENTRY, parameters=parameters, style=style, call=call)
    return f"{text.rstrip()}\n{adapter}", ENTRY


def _shape(definition: TraceDefinition, workload: Workload) -> dict[str, int]:
    """Sizes of the axes that a tensor has."""
    tensors = (*definition.inputs.values(), *definition.outputs.values())
    found: dict[str, int] = {}
    for name in dict.fromkeys(axis for spec in tensors for axis in spec.shape or ()):
        axis = definition.axes.get(name)
        if axis is None:
            raise UsageError(f"the axis {name} is not defined")
        value = axis.value if axis.type == "const" else workload.axes.get(name)
        if value is None or value < 1:
            raise UsageError(f"the axis {name} has no size in the workload {workload.uuid}")
        found[name] = value
    return found


def _numbers(definition: TraceDefinition, workload: Workload) -> dict[str, Option]:
    """Scalars by name. Raises UsageError for inputs that are neither those nor drawn at random."""
    found: dict[str, Option] = {}
    for name, spec in definition.inputs.items():
        given = workload.inputs.get(name)
        if given is None:
            raise UsageError(f"the workload {workload.uuid} says nothing of the input {name}")
        if spec.shape is not None and given.type != RANDOM:
            raise UsageError(f"the input {name} is {given.type}; inputs here are drawn at random")
        if spec.shape is None:
            if given.type != SCALAR or given.value is None:
                raise UsageError(f"the scalar {name} is {given.type}, not a number")
            found[name] = given.value
    return found


def _defining(name: str, definition: TraceDefinition, numbers: Mapping[str, Option]) -> tuple[str, str]:
    """The case's type, and the text of the file that defines the operator."""
    inputs = [item for item in definition.inputs if item not in numbers]
    types = {item: _type(item, spec) for item, spec in (*definition.inputs.items(), *definition.outputs.items())}
    dtype = next((types[item] for item in (*definition.outputs, *inputs) if types[item] in FLOATS), "fp32")

    def line(names: Sequence[str], specs: Mapping[str, TraceTensor]) -> str:
        return ", ".join(f"{item}[{','.join(specs[item].shape or ())}]: {types[item]}" for item in names)

    signature = f"{line(inputs, definition.inputs)} -> {line([*definition.outputs], definition.outputs)}"
    text = DEFINITION.format(
        signature=signature, dtype=dtype, name=name, inputs=", ".join(inputs), numbers=keywords(numbers), run=RUN,
        given=", ".join(definition.inputs),
    )  # fmt: skip
    head = HEAD.format(name=definition.name, origin="FlashInfer-Trace")
    return dtype, f"{head}\n{definition.reference.strip()}\n\n{text}"


def _type(name: str, spec: TraceTensor) -> str:
    if spec.dtype not in SHORT:
        raise UsageError(f"{name} is {spec.dtype}; types here: {', '.join(SHORT)}")
    return SHORT[spec.dtype]
