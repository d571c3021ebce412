"""The references by name. Importing this imports no torch."""

from __future__ import annotations

from pytest_klineage.errors import UnknownName
from pytest_klineage.references.base import Reference
from pytest_klineage.references.torch import TorchReference

__all__ = ["REFERENCES", "Reference", "reference"]

REFERENCES: dict[str, Reference] = {chosen.name: chosen for chosen in (TorchReference(),)}


def reference(name: str) -> Reference:
    """The reference of this name. Raises UnknownName, which lists the valid ones."""
    if name not in REFERENCES:
        raise UnknownName("reference", name, REFERENCES)
    return REFERENCES[name]
