"""Files of operators and references that travel with a request: what an asker adds, and what a judge imports.

A judge takes the file below its working directory where it is the same, else the text that the request carries. Text is
checked against the digest that the case, or for a reference's functions the request, names, so that a verdict is about
what it says; it is trusted like a checkout, and runs outside of the sandbox. It is imported alone: no other carried
file is found from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pytest_klineage.errors import MissingDependency, UsageError
from pytest_klineage.executors.batch import write_whole
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.resolve import CARRIED, adopt, changed, file_of
from pytest_klineage.records import Code, DefinitionFile, KernelCase, Verdict, definition_digest
from pytest_klineage.records.judging import CarriedFile, JudgeRequest
from pytest_klineage.references import reference_of
from pytest_klineage.references.functions import is_function, named_file, reference_files

IMPORT_FAILED = re.compile(r"\b(ModuleNotFound|Import)Error: ")
STEP = "start the judge in a checkout of the project that was asked from, or install what is missing, and judge again"


class DefinitionMissing(UsageError):
    """What a case or its kernel needs is not on this machine, or does not import. The message says what to do."""

    def __init__(self, why: object) -> None:
        super().__init__(f"{why}; {STEP}")


def carried_files(case: KernelCase) -> tuple[CarriedFile, ...]:
    """The files of a case's operator and its reference's functions that this machine has.

    Raises UsageError for a definition that has changed since the case was made.
    """
    found = dict([*_definition(case), *_functions(case)])
    return tuple(_carried(name, path) for name, path in found.items())


def supply(request: JudgeRequest, cache_dir: Path) -> None:
    """Have this process know the operator and the reference of a request. Raises DefinitionMissing."""
    supply_operator(request, cache_dir)
    for name in _function_files(request.case):
        file = _file_of(request, name)
        named_file(_place(name, file.digest if file else "", file, cache_dir), name)
    if request.reference_source is None:
        try:
            reference_of(request.case)
        except UsageError as error:
            raise DefinitionMissing(error) from error


def supply_operator(request: JudgeRequest, cache_dir: Path) -> None:
    """Have this process know the operator of a request. Raises DefinitionMissing."""
    case, definition = request.case, request.case.definition
    try:
        if definition is not None and not definition.package:
            name = definition.source.rpartition(":")[0]
            path = _place(name, definition.digest, _file_of(request, name), cache_dir)
            adopt(case, DefinitionFile(path=str(path)))
        operator_of(case)
    except DefinitionMissing:
        raise
    except UsageError as error:
        package = f" ({definition.package} registers it)" if definition and definition.package else ""
        raise DefinitionMissing(f"{error}{package}") from error


def import_error(error: UsageError) -> UsageError:
    """The error that ended a judgement; DefinitionMissing where a definition or a function could not import."""
    failed = not isinstance(error, DefinitionMissing) and IMPORT_FAILED.search(str(error))
    return DefinitionMissing(error) if failed else error


def check_dependencies(case: KernelCase, verdict: Verdict) -> None:
    """Raise DefinitionMissing for a case that was skipped for what this machine lacks: another one may have it."""
    if verdict.code is not Code.SKIPPED_DEPENDENCY:
        return
    message = verdict.reasons[0].message
    if is_function(case.reference) and f"for the reference {case.reference}," in message:
        message = f"the module {MissingDependency.parsed(message).what} is missing"
    raise DefinitionMissing(message)


def _definition(case: KernelCase) -> Iterator[tuple[str, Path]]:
    """Name and place of the file that defines the operator; none for one of a package, or one that is not here."""
    definition = case.definition
    if definition is None or definition.package:
        return
    try:
        operator_of(case)
    except UsageError:
        return
    path = file_of(case)
    if path is None or _digest(path) != definition.digest:
        raise changed(definition)
    yield definition.source.rpartition(":")[0], path


def _functions(case: KernelCase) -> Iterator[tuple[str, Path]]:
    """Names and places of the files that the reference's functions are in, as far as they are here."""
    for name in _function_files(case):
        found: dict[str, str] = {}
        with contextlib.suppress(UsageError):
            found = reference_files([name])
        yield from ((name, Path(path)) for name, path in found.items())


def _function_files(case: KernelCase) -> list[str]:
    written = (case.reference, *case.reference_variants, case.reference_prepare)
    names = [item.partition(":")[0] for item in written if is_function(item)]
    return [name for name in dict.fromkeys(names) if name.endswith(".py")]


def _carried(name: str, path: Path) -> CarriedFile:
    text = path.read_text(encoding="utf-8", errors="replace")
    return CarriedFile(name=name, digest=definition_digest(text), text=text)


def _file_of(request: JudgeRequest, name: str) -> CarriedFile | None:
    return next((file for file in request.files if file.name == name), None)


def _digest(path: Path) -> str:
    return definition_digest(path.read_text(encoding="utf-8", errors="replace"))


def _place(name: str, digest: str, carried: CarriedFile | None, cache_dir: Path) -> Path:
    """Where a judge imports a file from; any one below the working directory where no digest is asked for."""
    if not name.endswith(".py") or "\0" in name:
        raise DefinitionMissing(f"the file of a definition is called such as ops.py, got {name!r}")
    here = Path.cwd().resolve()
    path = (here / name).resolve()
    if path.is_relative_to(here) and path.is_file() and digest in ("", _digest(path)):
        return path
    if carried is None:
        wanted = f" with the digest {digest[:12]}" if digest else ""
        raise DefinitionMissing(f"{name} is not below {here}{wanted}, and the request does not carry it")
    if (actual := definition_digest(carried.text)) != digest:
        why = f"the request carries another {name}, with the digest {actual[:12]} instead of {digest[:12]}"
        raise DefinitionMissing(why)
    return _written(carried, cache_dir)


def _written(carried: CarriedFile, cache_dir: Path) -> Path:
    """The file of a carried text in the cache, written where it is not there, or is another. Raises StoreError."""
    data = carried.text.encode()
    path = cache_dir / CARRIED / hashlib.sha256(data).hexdigest() / PurePosixPath(carried.name).name
    if not path.is_file() or path.read_bytes() != data:
        write_whole(path, data, replace=True)
    return path
