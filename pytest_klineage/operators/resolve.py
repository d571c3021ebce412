"""From what a case says to its operator: a shipped one, one of another package, an object, or "file.py:name".

A process knows the definitions that it has met. A trusted worker gets the place to import one from; the digest in the
case must be that of the file.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.extensions import Extension, extensions
from pytest_klineage.operators.base import Operator
from pytest_klineage.operators.defined import MADE, DefinedOperator, shown
from pytest_klineage.operators.signature_line import EXAMPLE
from pytest_klineage.records import Definition, DefinitionFile, KernelCase, definition_digest

CARRIED = "klineage-carried"
"""Folder, with one below it by digest, for files that a request carried. What lies beside those is not searched."""
FILE_AND_NAME = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_]\w*)")

_known: dict[tuple[str, str], tuple[Operator, Path]] = {}
"""By source and digest of their definition: operators that this process has met, and their files."""

_registered: dict[int, Definition] = {}
"""By the identity of an operator that a package registers, which is kept for good: its definition."""


def find_operator(
    wanted: str | Operator, shipped: Mapping[str, Operator], folder: Path | None = None
) -> tuple[Operator, Definition | None]:
    """The operator that is meant, and where it was defined; None for a shipped one.

    `folder` is what a relative "file.py:name" lies in. Raises UnknownName, which lists what there is, or UsageError for
    a file that cannot be imported.
    """
    if isinstance(wanted, Operator):
        if shipped.get(wanted.name) is wanted:
            return wanted, None
        return wanted, _registered.get(id(wanted)) or remember(wanted)
    if not isinstance(wanted, str):
        raise no_operator(wanted, shipped)
    if wanted in shipped:
        return shipped[wanted], None
    if found := FILE_AND_NAME.fullmatch(wanted):
        chosen = from_file((folder or Path.cwd()) / found["file"], found["name"])
        return chosen, remember(chosen, name=found["name"])
    if wanted in extensions("operators"):
        return from_package(extensions("operators")[wanted])
    raise UnknownName("operator", wanted, [*shipped, *extensions("operators")])


def no_operator(given: object, shipped: Mapping[str, Operator]) -> UsageError:
    """The error for what is neither an operator nor a name of one."""
    if inspect.isfunction(given):
        return UsageError(
            f'{given.__name__} is a plain function: write @operator("inputs -> outputs") before it, {EXAMPLE}'
        )
    return UnknownName("operator", given, [*shipped, "file.py:name"])


def known(name: str, shipped: Mapping[str, Operator]) -> Operator | None:
    """The operator of this name: shipped, another package's, or of a file that this process has met."""
    if name in shipped or name in extensions("operators"):
        return find_operator(name, shipped)[0]
    return next((chosen for chosen, _ in _known.values() if chosen.name == name), None)


def operator_of(case: KernelCase, shipped: Mapping[str, Operator]) -> Operator:
    """The operator of a case. Raises UnknownName, or UsageError when its definition is not here or has changed."""
    definition = case.definition
    if definition is None:
        return find_operator(case.operator, shipped)[0]
    key = (definition.source, definition.digest)
    if key not in _known and definition.package:
        find_operator(case.operator, shipped)
    if key not in _known:
        file, _, name = definition.source.rpartition(":")
        remember(from_file(Path.cwd() / file, name), name=name)
    if key not in _known:
        raise changed(definition)
    return _known[key][0]


def adopt(case: KernelCase, file: DefinitionFile) -> None:
    """Import the definition of a case from a file, unless that was done. Raises UsageError for another definition."""
    definition, path = case.definition, Path(file.path)
    if definition is None or not file.path:
        return
    key, name = (definition.source, definition.digest), definition.source.rpartition(":")[2]
    if key in _known and _known[key][1] == path:
        return
    if definition_digest(path.read_text(encoding="utf-8")) != definition.digest:
        raise changed(definition)
    search_also(file.search)
    _known[key] = from_file(path, name), path


def file_of(case: KernelCase) -> Path | None:
    """The file that defines a case's operator on this machine; None for a shipped one."""
    definition = case.definition
    return None if definition is None else _known[definition.source, definition.digest][1]


def changed(definition: Definition) -> UsageError:
    """The error for a definition whose file says something else now."""
    return UsageError(
        f"the definition {definition.source} has changed: the case was made with the digest {definition.digest[:12]}"
    )


def remember(operator: Operator, path: Path | None = None, name: str = "", package: str = "") -> Definition:
    """The operator's definition, which this process knows from now on. Raises UsageError when it is in no file."""
    if isinstance(operator, DefinedOperator):
        definition, path = operator.definition, operator.file.resolve()
    else:
        path = (path or Path(inspect.getfile(type(operator)))).resolve()
        digest = definition_digest(path.read_text(encoding="utf-8"))
        definition = Definition(source=f"{shown(path)}:{name or type(operator).__name__}", digest=digest)
    if package:
        definition = _registered[id(operator)] = msgspec.structs.replace(definition, package=package)
    _known[definition.source, definition.digest] = operator, path
    return definition


def from_package(extension: Extension) -> tuple[Operator, Definition]:
    """An operator that an installed package registers: made by the decorator, or a subclass of Operator."""
    found = extension.load()
    operator = found() if inspect.isclass(found) and issubclass(found, Operator) else found
    if not isinstance(operator, Operator):
        raise UsageError(f"{extension.package} registers {extension.point.value} as an operator; it is {found!r}")
    return operator, remember(operator, name=extension.point.attr, package=extension.package)


def from_file(path: Path, name: str) -> Operator:
    """The operator of this name in a file. Raises UsageError unless importing the file makes one of that name."""
    module = import_file(path)
    found = getattr(module, name, None)
    if inspect.isclass(found) and issubclass(found, Operator):
        return found()
    made = [item for item in MADE.get((str(path.resolve()), name), []) if item.call_site.namespace is vars(module)]
    if len(made) == 1:
        return made[0]
    if made:
        raise made[-1].error(f"{path.name} makes {len(made)} operators of this name; give them others: name=")
    if isinstance(found, Operator):
        return found
    there = [other for file, other in MADE if file == str(path.resolve())]
    hint = "" if name not in there else " Define it where importing the file defines it, not inside of a test."
    raise UsageError(f"{UnknownName(f'operator in {path.name}', name, sorted({*there} - {name}))}{hint}")


def import_file(path: Path) -> ModuleType:
    """A Python file as a module: by its dotted name inside a package, else under a name of our own.

    Raises UsageError with the line at which it failed.
    """
    path = path.resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    root, names = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    try:
        if root.parent.name != CARRIED:
            search_also((str(root),))
        return importlib.import_module(".".join(names)) if len(names) > 1 else executed(path)
    except UsageError:
        raise
    except Exception as error:  # a user's file may raise anything when it is imported
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        position = f"{shown(path)}:{frames[-1].lineno}" if frames else shown(path)
        line = f" ({frames[-1].line})" if frames and isinstance(error, ImportError) else ""
        raise UsageError(f"{position}: importing it failed: {type(error).__name__}: {error}{line}") from error


def executed(path: Path) -> ModuleType:
    """A file that belongs to no package, executed once for every content."""
    name = f"_klineage_{path.stem}_{definition_digest(str(path))[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def search_also(folders: Sequence[str]) -> None:
    """Let imports of this process find what lies in these folders, after everything else."""
    sys.path.extend(folder for folder in folders if folder and folder not in sys.path)
