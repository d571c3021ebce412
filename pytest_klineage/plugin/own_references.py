"""References that a marker names by a function: "module:function", "file.py:function", or the function itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_klineage.errors import UnknownName, UsageError


def reference_name(given: Any, folders: Sequence[Path]) -> str:
    """What a case calls a reference; this process remembers the files of functions. Raises UsageError."""
    if callable(given):
        return function_name(given)
    if not isinstance(given, str):
        raise UnknownName("reference", given, ["torch", "package.module:function"])
    module, colon, function = given.partition(":")
    if not colon:
        return given
    if path := beside(module, folders):
        return f"{remembered(path)}:{function}"
    if module.endswith(".py"):
        raise UsageError(f"ref={given!r}: there is no file {module} beside the test or in the root directory")
    return given


def beside(module: str, folders: Sequence[Path]) -> Path | None:
    """The file of a module that lies beside the test or in the root directory, which workers cannot import."""
    name = module if module.endswith(".py") else f"{module}.py"
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def function_name(function: Any) -> str:
    """A function of a file as cases write it. Raises UsageError for one that has no name in its file."""
    plain = inspect.unwrap(function)
    name = getattr(plain, "__qualname__", "")
    try:
        path = Path(inspect.getfile(plain))
    except TypeError:
        path = Path()
    if not path.is_file() or not name.replace(".", "").isidentifier():
        raise UsageError(f"ref={function!r}: name a function that a file defines, or write 'package.module:function'")
    return f"{remembered(path)}:{name}"


def remembered(path: Path) -> str:
    """A file as cases call it: relative to its project's root."""
    from pytest_klineage.operators.defined import shown
    from pytest_klineage.references.functions import named_file

    return named_file(path, shown(path))
