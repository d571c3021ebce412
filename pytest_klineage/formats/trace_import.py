"""FlashInfer-Trace in: a definition with a workload as a case, a solution as a kernel. References are only read."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping

from pytest_klineage.formats.imported import Imported, Unsupported
from pytest_klineage.formats.reading import Reader
from pytest_klineage.formats.recognise import Found, recognised
from pytest_klineage.formats.symbols import NotStatic, Tensor, Value
from pytest_klineage.formats.trace_records import Definition, Solution, Workload
from pytest_klineage.operators import operator_of
from pytest_klineage.records import KernelSource, Signature, SourceFile, Surface

RUN = "run"
ENTRY = "klineage_run"
"""What the adapter behind a solution is called."""
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "int64", "int32": "int32"}
"""Their names of types, and ours."""
LANGUAGES = {"python": Surface.PYTHON, "triton": Surface.TRITON, "tilelang": Surface.TILELANG}
"""Languages whose solutions are functions on tensors."""
NATIVE = {"cpp": Surface.CPP, "c++": Surface.CPP, "cuda": Surface.CUDA}
OURS = "klineage.h"
"""The dependency that says that a native solution has this project's ABI."""
RANDOM, SCALAR = "random", "scalar"
INPUTS_NOTE = "inputs are drawn by the operator's own distributions"
TOLERANCE_NOTE = "the tolerance is the gate's own; the format has none"
ADAPTER = '''

def {entry}({parameters}):
    """Calls the solution in its own order of arguments{style}."""
    {call}
'''


def import_definition(definition: Definition, workload: Workload, *, reference: str = "torch") -> Imported:
    """The case of a definition at a workload's sizes.

    The definition's reference decides what is computed; it must be one call of a function that an operator here stands
    for, and give what the definition's outputs say. Raises Unsupported, which names what stands in the way.
    """
    try:
        sizes = _sizes(definition, workload)
        given = [_input(name, definition, workload, sizes) for name in definition.inputs]
        reader = Reader(definition.reference)
        function = reader.function(RUN)
        taken = [argument.arg for argument in function.args.args]
        if taken != list(definition.inputs):
            raise NotStatic(
                function.lineno, f"run takes {', '.join(taken)}, the inputs are {', '.join(definition.inputs)}"
            )
        found = recognised(reader.called(function, given), reference)
        _check_outputs(definition, sizes, operator_of(found.case).signature(found.case))
        return _imported(definition, reader, found)
    except NotStatic as error:
        raise Unsupported(definition.name, str(error)) from error


def source_of(solution: Solution, imported: Imported) -> KernelSource:
    """A solution as a kernel for an imported case.

    A solution in Python, Triton or TileLang gets an adapter behind its main file where it takes its outputs as
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
        function = Reader(text).functions.get(entry)
    except NotStatic:
        return None
    if function is None or function.args.vararg or function.args.kwarg:
        return None
    return tuple(item.arg for item in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs))


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
    parameters = ", ".join([*names, *(["out"] if passes else [])])
    adapter = ADAPTER.format(entry=ENTRY, parameters=parameters, style=style, call=call)
    return f"{text.rstrip()}\n{adapter}", ENTRY


def _sizes(definition: Definition, workload: Workload) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, axis in definition.axes.items():
        value = axis.value if axis.type == "const" else workload.axes.get(name)
        if value is None or value < 1:
            raise NotStatic(0, f"the axis {name} has no size in the workload {workload.uuid}")
        found[name] = value
    return found


def _input(name: str, definition: Definition, workload: Workload, sizes: Mapping[str, int]) -> Value:
    spec, given = definition.inputs[name], workload.inputs.get(name)
    if given is None:
        raise NotStatic(0, f"the workload {workload.uuid} says nothing of the input {name}")
    if spec.shape is None:
        if given.type != SCALAR:
            raise NotStatic(0, f"the scalar {name} is {given.type}, not a number")
        return given.value
    if given.type != RANDOM:
        raise NotStatic(0, f"the input {name} is {given.type}; inputs here are drawn at random")
    if spec.dtype not in SHORT:
        raise NotStatic(0, f"the input {name} is {spec.dtype}; types here: {', '.join(SHORT)}")
    return Tensor(name, _shape(spec.shape, sizes), SHORT[spec.dtype])


def _shape(axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    for axis in axes:
        if axis not in sizes:
            raise NotStatic(0, f"the axis {axis} is not defined")
    return tuple(sizes[axis] for axis in axes)


def _check_outputs(definition: Definition, sizes: Mapping[str, int], signature: Signature) -> None:
    theirs = [(SHORT.get(spec.dtype), _shape(spec.shape or (), sizes)) for spec in definition.outputs.values()]
    ours = [(spec.dtype, spec.shape) for spec in signature.outputs]
    if theirs != ours:
        raise NotStatic(0, f"its outputs are {theirs}, and those of its reference {ours}")


def _imported(definition: Definition, reader: Reader, found: Found) -> Imported:
    ours = {theirs: own for own, theirs in found.inputs.items()}
    missing = [name for name in definition.inputs if name not in ours]
    if missing:
        raise NotStatic(0, f"the input {missing[0]} is none of the case's")
    return Imported(
        name=definition.name, case=found.case, digest=hashlib.sha256(ast.dump(reader.tree).encode()).hexdigest(),
        arguments=tuple(ours[name] for name in definition.inputs), notes=(INPUTS_NOTE, TOLERANCE_NOTE, *found.notes),
    )  # fmt: skip
