"""The process that compiles what a Python file declares in COMPILE, ahead of any run; no other part of the package.

`python ahead.py REQUEST` imports the candidate's file, and writes cubins beside a result. It is run by its path and
imports nothing of this package. What the compiler says goes to standard error, with status 1. The candidate's module
shares this process, so what it leaves behind are claims that its reader bounds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

MODULE_NAME = "kernel"
RESULT = "result.json"
TRITON_FIELDS = ("kernel", "signature", "constexprs", "options")
TILELANG_FIELDS = ("kernel", "arguments", "options")


class Misdeclared(Exception):
    """COMPILE, or an entry of it, is not what it must be; the message says what is."""


def main(arguments: list[str]) -> int:
    """Serve the request whose file is named. Returns the exit status: 1 when nothing could be compiled."""
    request: dict[str, Any] = json.loads(Path(arguments[0]).read_text())
    sys.path[:0] = [request["files"]]
    sys.path += [path for path in request["paths"] if path not in sys.path]
    try:
        contain(request)
        result = serve(request)
    except BaseException as error:  # process boundary: whatever a candidate raises becomes the compiler's words
        sys.stderr.write(explain(error, request["files"]))
        return 1
    Path(request["out"], RESULT).write_text(json.dumps(result))
    return 0


def contain(request: dict[str, Any]) -> None:
    """Shut this process off as a worker is, as far as the system offers it: it may write below its own directory only.

    Returns in a grandchild where there are process namespaces; those above wait for it and end as it did.
    """
    # No part of the package imports the worker; its containment knows the standard library alone.
    spec = importlib.util.spec_from_file_location("containment", request["containment"])
    containment: Any = importlib.util.module_from_spec(spec) if spec else None
    if spec and spec.loader:
        spec.loader.exec_module(containment)
    containment.die_with_parent()
    if containment.enter_namespaces():
        # The first process of a namespace is shielded from signals, and its end is everyone's: it only waits.
        for _generation in range(2):
            continue_in_child()
            containment.die_with_parent()
    _soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    cpu_s = request["cpu_s"] if hard == resource.RLIM_INFINITY else min(request["cpu_s"], hard)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    containment.limit_resources()
    containment.restrict_files([*request["readable"], *(path for path in sys.path if path)], [request["directory"]])
    containment.drop_capabilities()
    containment.filter_calls(allow_processes=True)


def continue_in_child() -> None:
    """Fork; return in the child. The parent waits for it and ends with its status, or 128 and the signal's number."""
    if child := os.fork():
        _pid, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Import the file and compile its declarations for the request's platform."""
    os.environ.update(request["environment"])
    module = importlib.import_module(MODULE_NAME)
    compile_one = {"triton": compile_triton, "tilelang": compile_tilelang}[request["surface"]]
    specs = declared(module, request["platform"])
    units = [compile_one(spec, request, f"{index:02d}") for index, spec in enumerate(specs)]
    return {"entry": has_entry(module, request["entry"]), "units": units}


def has_entry(module: Any, entry: str) -> bool:
    """Whether the module has a callable of that dotted name."""
    for part in entry.split("."):
        module = getattr(module, part, None)
    return callable(module)


def declared(module: Any, platform: str) -> list[dict[str, Any]]:
    """The entries of COMPILE for a platform, else those for "*"; none where it has neither. Raises Misdeclared."""
    table = getattr(module, "COMPILE", {})
    if not isinstance(table, dict) or not all(isinstance(specs, list | tuple) for specs in table.values()):
        raise Misdeclared('COMPILE is a dict of lists by platform, such as {"sm90": [{"kernel": ...}]}')
    specs = list(table.get(platform if platform in table else "*", ()))
    for spec in specs:
        if not isinstance(spec, dict) or "kernel" not in spec:
            raise Misdeclared(f'every entry of COMPILE["{platform}"] is a dict with a "kernel", got {spec!r:.200}')
    return specs


def check_fields(spec: dict[str, Any], valid: tuple[str, ...]) -> None:
    """Raise Misdeclared for a field that no entry has."""
    if unknown := sorted(set(map(str, spec)) - set(valid)):
        raise Misdeclared(f"an entry of COMPILE has {', '.join(valid)}; it does not have {', '.join(unknown)}")


def compile_triton(spec: dict[str, Any], request: dict[str, Any], stem: str) -> dict[str, Any]:
    """Compile one declared specialisation of a Triton kernel to a cubin."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction

    check_fields(spec, TRITON_FIELDS)
    kernel = spec["kernel"]
    while not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn  # below @triton.autotune and @triton.heuristics
    if not isinstance(kernel, JITFunction):
        raise Misdeclared(f"{spec['kernel']!r:.200} is no function under @triton.jit")
    types, values = spec.get("signature", {}), spec.get("constexprs", {})
    defaults = {item.name: item.default for item in kernel.params if item.has_default and item.name not in types}
    constexprs = {item.name for item in kernel.params if item.is_constexpr}
    signature, constants, attributes = specialise(kernel.arg_names, constexprs, types, defaults | values)
    for item in kernel.params:
        if item.do_not_specialize:
            attributes.pop((item.num,), None)
    target = GPUTarget("cuda", request["arch"], 32)
    options = dict(spec.get("options", {}))
    if unknown := sorted(set(options) - set(vars(make_backend(target).parse_options({})))):
        raise Misdeclared(f"Triton has no option {', '.join(unknown)}")
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
    (Path(request["out"]) / f"{stem}.cubin").write_bytes(compiled.asm["cubin"])
    return {
        "name": compiled.metadata.name, "file": f"{stem}.cubin", "log": log.getvalue(),
        "shared_bytes": compiled.metadata.shared,
    }  # fmt: skip


Specialisation: TypeAlias = tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]
"""Type by argument, value by position of a constant, attributes by position: what Triton's ASTSource takes."""


def specialise(names: list[str], constexprs: set[str], types: dict[str, str], values: dict[str, Any]) -> Specialisation:
    """Turn a declaration into what Triton compiles. `types` are Triton's own words for run-time arguments.

    ":16" after a type says that the value is divisible by 16, ":1" that it is 1: Triton's JIT specialises on both.
    `values` are those of constants. Raises Misdeclared for an argument that is not declared, or that does not exist.
    """
    if unknown := sorted((set(types) | set(values)) - set(names)):
        raise Misdeclared(f"the kernel has no argument {', '.join(unknown)}; it has {', '.join(names)}")
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, name in enumerate(names):
        kind, _, hint = types.get(name, "").partition(":")
        if name in types and name in values:
            raise Misdeclared(f"the kernel's argument {name} is declared twice, by a type and by a value")
        if name in values or (hint == "1" and name not in constexprs):
            signature[name] = "constexpr"
            constants[(position,)] = values.get(name, 1)
        elif name in types and name not in constexprs and hint in ("", "16"):
            signature[name] = kind
            if kind[:1] in ("*", "i", "u") and kind not in ("i1", "u1"):  # what Triton's JIT looks at
                attributes[(position,)] = [["tt.divisibility", 16]] if hint else []
        else:
            wanted = "a value under constexprs" if name in constexprs else 'a type under signature, such as "*bf16:16"'
            raise Misdeclared(f"the kernel's argument {name} needs {wanted}")
    return signature, constants, attributes


def compile_tilelang(spec: dict[str, Any], request: dict[str, Any], stem: str) -> dict[str, Any]:
    """Compile one declared TileLang kernel as TileLang does when it is first called; it lands in TileLang's cache."""
    import tilelang
    from tilelang import tvm

    check_fields(spec, TILELANG_FIELDS)
    make, arguments, options = spec["kernel"], spec.get("arguments", {}), spec.get("options", {})
    if not callable(make):
        raise Misdeclared(f"{make!r:.200} is no function that makes a TileLang kernel")
    jit = hasattr(make, "get_tir")  # under @tilelang.jit, which has the options itself
    if jit and options:
        raise Misdeclared(f"options belong to @tilelang.jit of {make!r:.200}, not into COMPILE")
    function = make.get_tir(**arguments) if jit else make(**arguments)
    if not isinstance(function, tvm.tir.PrimFunc):
        raise Misdeclared(f"{make!r:.200} returned no TileLang program, but {function!r:.200}")
    cubin = Path(request["out"]) / f"{stem}.cubin"
    with tvm.target.Target({"kind": "cuda", "arch": request["arch"]}), assembled_to(cubin) as log:
        kernel = make.compile(**arguments) if jit else tilelang.compile(function, **options)
    name = str(function.attrs["global_symbol"])
    if not cubin.exists() or kernel.artifact is None:
        raise Misdeclared(f"nvcc was not called for {name}: it is declared twice, or has another execution backend")
    kernels = kernel.artifact.device_mod.functions.values()
    shared = [int(item.attrs["dyn_shared_memory_buf"]) for item in kernels if "dyn_shared_memory_buf" in item.attrs]
    return {"name": name, "file": cubin.name, "log": log.getvalue(), "shared_bytes": max(shared, default=0)}


@contextlib.contextmanager
def assembled_to(path: Path) -> Iterator[io.StringIO]:
    """Have TileLang keep the cubin that it gets from nvcc, and say what ptxas says: it has no hook for either."""
    from tilelang.contrib import nvcc

    original, log = nvcc.compile_cuda, io.StringIO()

    def compile_cuda(code: str, target_format: str = "ptx", arch: Any = None, options: Any = None, **named: Any) -> Any:
        # The assembler's report changes no code; TileLang has the same option.
        options = [*([options] if isinstance(options, str) else options or []), "--ptxas-options=--verbose"]
        with contextlib.redirect_stdout(log):
            built = original(code, target_format, arch, options=options, **{**named, "verbose": True})
        path.write_bytes(built)
        return built

    nvcc.compile_cuda = compile_cuda
    try:
        yield log
    finally:
        nvcc.compile_cuda = original


def explain(error: BaseException, files: str) -> str:
    """What went wrong, where in the candidate's files, and what caused it; the compiler's frames are left out."""
    lines: list[str] = []
    current: BaseException | None = error
    while current is not None:
        frames = [item for item in traceback.extract_tb(current.__traceback__) if item.filename.startswith(files)]
        if frames and not isinstance(current, SyntaxError):
            lines.append(f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}\n")
        lines += traceback.format_exception_only(current)
        current = current.__cause__
    return "".join(lines).replace(f"{files}/", "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
