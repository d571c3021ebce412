"""References in a user's words: a function of theirs, the definition of their operator, and the definition compiled."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from pytest_klineage.errors import KlineageError, MissingDependency, UsageError
from pytest_klineage.records import PLATFORMS, KernelCase, definition_digest
from pytest_klineage.references.base import COMPILERS, TrialTensors, Variant
from pytest_klineage.references.choose import Choice, choose, chosen_before
from pytest_klineage.references.device import DeviceReference, torch_versions

if TYPE_CHECKING:
    from pytest_klineage.references.base import Call, Convert, Tensors

FUNCTION = re.compile(r"(?P<module>[^:]+):(?P<name>[A-Za-z_][\w.]*)")
"""How a function is written: "package.module:function" or "file.py:function"."""
DEFINITION, COMPILED = "torch", "torch.compile"
COMPILE_MODE = "max-autotune-no-cudagraphs"
CPU_REPS = 7
"""Calls of every variant on a CPU, when they are compared."""


class OutOfPlace(dict[str, Any]):
    """Results of a reference by name, new contents of inout tensors among them: they are copied there, untimed."""


class OwnReference(DeviceReference):
    """A reference that takes whatever case names it, on any platform, after trying it on tensors of the case."""

    platforms: ClassVar[tuple[str, ...]] = PLATFORMS
    remedy: ClassVar[str] = "pip install 'pytest-klineage[cpu]'"
    needs_trial: ClassVar[bool] = True

    def __init__(self, case: KernelCase) -> None:
        super().__init__()
        self.case, self.name = case, case.reference  # type: ignore[misc]  # differs by case, not by class

    def operators(self) -> tuple[str, ...]:
        return (self.case.operator,)

    def prepare(self, case: KernelCase, trial: TrialTensors | None = None) -> Call:
        """The fastest variant, warmed up. Raises UsageError without tensors to try it on."""
        if trial is None:
            raise UsageError(f"the reference {case.reference} is tried on tensors of the case; give it a trial")
        variants = self._planned(case, trial)
        on_cpu = trial.device.type == "cpu"
        choice = chosen_on_cpu(variants, trial) if on_cpu else choose(variants, trial)
        self._choices[case.id] = choice
        return choice.variant

    def label(self, case: KernelCase) -> str:
        return case.reference

    def versions(self) -> dict[str, str]:
        import torch

        return torch_versions() if torch.cuda.is_available() else {
            "torch": str(torch.__version__), "threads": str(torch.get_num_threads())
        }  # fmt: skip


class DefinitionReference(OwnReference):
    """The definition of a user's operator in the case's own precision: eager, or compiled with autotuning."""

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        if trial.definition is None:
            raise UsageError(
                f"the reference {self.name} needs an operator with a definition, which {case.operator} is not"
            )
        names, definition = list(trial.outputs), trial.definition
        if case.reference == DEFINITION:
            return {"eager": Variant(returning(definition, names))}
        return {"compiled": Variant(returning(compiled(definition), names))}

    def ahead(self, case: KernelCase) -> tuple[str, ...]:
        return COMPILERS if case.reference == COMPILED else ()

    def label(self, case: KernelCase) -> str:
        how = "eager" if case.reference == DEFINITION else f"torch.compile, {COMPILE_MODE}"
        return f"the definition, {how}"


class FunctionReference(OwnReference):
    """A user's function, called like a kernel in Python: inputs in order, options by name, `out` where it has one."""

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        convert = None
        if case.reference_prepare:
            convert = converting(load_function(case.reference_prepare, trial.files))
        return {
            written: Variant(calling(load_function(written, trial.files), trial), convert)
            for written in dict.fromkeys((case.reference, *case.reference_variants))
        }

    def describe(self, case: KernelCase) -> dict[str, str]:
        facts = super().describe(case)
        for written in (case.reference, *case.reference_variants):
            module = written.partition(":")[0]
            loaded = sys.modules.get(module) or sys.modules.get(module_name(module))
            facts |= package_version(module) or file_digest(written, loaded)
        return facts


def returning(function: Callable[..., Any], names: list[str]) -> Call:
    """A call that returns the function's results under these names."""

    def call(inputs: Tensors, outputs: Tensors) -> Tensors:
        return OutOfPlace(zip(names, function(*inputs.values()), strict=True))

    return call


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under torch.compile. It is compiled when it is first called."""
    import torch

    found: Callable[..., Any] = torch.compile(function, mode=COMPILE_MODE, dynamic=False, fullgraph=False)
    return found


def calling(function: Callable[..., Any], trial: TrialTensors) -> Call:
    """A call of a user's function: None where it fills its outputs or works in place, else its results by name."""
    accepted = keyword_names(function)
    named = {name: value for name, value in trial.named.items() if name in accepted}
    names, inputs_too = list(trial.outputs), set(trial.inputs)
    separate = [name for name in names if name not in inputs_too]
    fills = "out" in accepted and bool(separate)

    def call(inputs: Tensors, outputs: Tensors) -> Tensors | None:
        if fills:
            given = tuple(outputs[name] for name in separate)
            function(*inputs.values(), out=given if len(given) > 1 else given[0], **named)
            return None
        result = function(*inputs.values(), **named)
        if result is None:
            return None
        values = list(result) if isinstance(result, tuple | list) else [result]
        return OutOfPlace(zip(names if len(values) == len(names) else separate, values, strict=True))

    return call


def converting(function: Callable[..., Any]) -> Convert:
    """A conversion by a user's function, which takes the inputs and returns what the reference takes in their place."""

    def convert(inputs: Tensors) -> Tensors:
        result = function(*inputs.values())
        values = list(result) if isinstance(result, tuple | list) else [result]
        return {str(position): value for position, value in enumerate(values)}

    return convert


def keyword_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names that a function takes by keyword; empty when it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(item.name for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD))


def load_function(written: str, files: Mapping[str, str]) -> Callable[..., Any]:
    """The function "module:function" or "file.py:function". Raises UsageError, or MissingDependency for a package."""
    found = FUNCTION.fullmatch(written)
    if found is None:
        raise UsageError(f"a reference of your own is written 'package.module:function', got {written!r}")
    module = load_file(files[found["module"]]) if found["module"] in files else load_module(found["module"])
    function: Any = module
    for part in found["name"].split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UsageError(f"{found['module']} has no function {found['name']!r}")
    wrapped: Callable[..., Any] = getattr(function, "__wrapped__", function) if is_definition(function) else function
    return wrapped


def is_definition(function: Any) -> bool:
    """Whether a name turned out to be an operator's definition, which is called as a plain function."""
    return hasattr(function, "line_number") and hasattr(function, "distributions")


_files: dict[str, str] = {}
"""Absolute paths of files of references, by the names that cases have for them."""


def named_file(path: Path, name: str) -> str:
    """What a case calls a file that a reference is a function of; this process remembers where it lies."""
    _files[name] = str(path.resolve())
    return name


def reference_files(written: Iterable[str]) -> dict[str, str]:
    """Of functions as cases name them, the files that this process knows, or finds below the current folder.

    A judge elsewhere has read no markers: like definitions, files are looked for where it was started. Raises
    UsageError for one that is not there.
    """
    names, here = {item.partition(":")[0] for item in written}, Path.cwd()
    found = {name: path for name, path in _files.items() if name in names}
    for name in sorted(names - set(found)):
        path = (here / name).resolve()
        if not name.endswith(".py"):
            continue
        if not path.is_file() or not path.is_relative_to(here.resolve()):
            raise UsageError(
                f"{name}, the file of a reference, is not below {here}: judge in a checkout that has it, in the folder "
                "that its name begins in"
            )
        found[name] = str(path)
    return found


def load_module(name: str) -> ModuleType:
    """An importable module. Raises MissingDependency when it, or what it imports, is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise MissingDependency(missing, f"pip install {missing.partition('.')[0]}") from error


def load_file(path: str) -> ModuleType:
    """A Python file, with its folder importable. Raises ImportError with the line at which it failed."""
    name = module_name(path)
    if name not in sys.modules:
        folder = str(Path(path).parent)
        if folder not in sys.path:
            sys.path.append(folder)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"the reference's file {path} is no Python file")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (ModuleNotFoundError, KlineageError):
            raise
        except Exception as error:  # a user's file may raise anything when it is imported
            raise ImportError(import_failure(path, error)) from error
    return sys.modules[name]


def import_failure(path: str, error: Exception) -> str:
    """What a file raised when it was imported, with the last of its lines that ran."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line = f" ({frames[-1].line})" if frames else ""
    position = f"{os.path.basename(path)}:{frames[-1].lineno}" if frames else os.path.basename(path)
    return f"{position}: importing it failed: {type(error).__name__}: {error}{line}"


def module_name(path: str) -> str:
    """What a file is called among this process's modules."""
    return f"_klineage_reference_{definition_digest(os.path.basename(path))[:12]}"


def package_version(module: str) -> dict[str, str]:
    """The version of the distribution that a module belongs to, by name; empty without one."""
    packages = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    return {name: importlib.metadata.version(name) for name in packages[:1]}


def file_digest(written: str, module: ModuleType | None) -> dict[str, str]:
    """The digest of a function's file, where no package has a version to say."""
    path = getattr(module, "__file__", None)
    if not path:
        return {}
    return {f"digest.{written}": definition_digest(Path(path).read_text(encoding="utf-8", errors="replace"))[:12]}


def chosen_on_cpu(variants: Mapping[str, Variant], trial: TrialTensors) -> Choice:
    """The fastest variant on a CPU; one alone, or one that was chosen before, is only called once."""
    if len(variants) == 1 or trial.only:
        name = trial.only or next(iter(variants))
        if name not in variants:
            return chosen_before(variants, trial, timed, CPU_REPS)
        variants[name](trial.inputs, trial.outputs)
        return Choice(name, variants[name], {})
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(CPU_REPS + 1):
        for name, variant in variants.items():
            times[name].append(timed(functools.partial(variant, trial.inputs, trial.outputs)))
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    best = min(medians, key=medians.__getitem__)
    return Choice(best, variants[best], medians)


def timed(run: Callable[[], object]) -> float:
    """Milliseconds of one call on this CPU."""
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


def own_reference(case: KernelCase) -> OwnReference:
    """The reference of a case that names no shipped one. One instance each: `describe` asks the one that prepared."""
    key = msgspec.json.encode(
        (case.id, case.definition, case.reference, case.reference_variants, case.reference_prepare)
    )  # fmt: skip
    if key not in _own:
        _own[key] = FunctionReference(case) if is_function(case.reference) else DefinitionReference(case)
    return _own[key]


_own: dict[bytes, OwnReference] = {}


def is_function(reference: str) -> bool:
    """Whether a reference is written as a function."""
    return FUNCTION.fullmatch(reference) is not None
