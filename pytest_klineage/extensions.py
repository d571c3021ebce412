"""Parts that other packages register through entry points: operators, references, surfaces, platforms."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pytest_klineage.errors import UsageError

GROUPS = ("operators", "references", "surfaces", "platforms")
PREFIX = "pytest_klineage."


@dataclass(frozen=True)
class Extension:
    """One registered part, loaded when it is asked for."""

    kind: str
    """One of GROUPS."""
    name: str
    package: str
    """The distribution that registers it, with its version, such as "mylib 1.2"."""
    point: EntryPoint

    def load(self) -> Any:
        """The object. Raises UsageError with the package's name when it cannot be imported."""
        try:
            return self.point.load()
        except Exception as error:  # another package's code may raise anything at import
            raise UsageError(
                f"{self.package} registers {self.kind} {self.name} = {self.point.value}, which cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error


@functools.cache
def extensions(kind: str) -> dict[str, Extension]:
    """Everything that installed packages register of a kind, by name. Raises UsageError for a name of two packages."""
    found: dict[str, Extension] = {}
    for point in sorted(entry_points(group=PREFIX + kind), key=lambda point: (point.name, point.value)):
        dist = point.dist
        package = f"{dist.name} {dist.version}" if dist is not None else point.module
        if point.name in found and found[point.name].point.value != point.value:
            raise UsageError(f"{found[point.name].package} and {package} both register {kind} {point.name!r}")
        found[point.name] = Extension(kind, point.name, package, point)
    return found
