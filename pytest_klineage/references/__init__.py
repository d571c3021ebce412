"""The references by name. Importing this imports no torch."""

from __future__ import annotations

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.extensions import extensions
from pytest_klineage.records import KernelCase
from pytest_klineage.references.base import Reference, Trial, Variant
from pytest_klineage.references.cublas import CublasReference
from pytest_klineage.references.cudnn import CudnnReference
from pytest_klineage.references.fla import FlaReference
from pytest_klineage.references.flashinfer import FlashInferReference
from pytest_klineage.references.functions import COMPILED, DEFINITION, is_function, own_reference
from pytest_klineage.references.refusals import UnsupportedCase
from pytest_klineage.references.torch import TorchReference
from pytest_klineage.references.vendor import VendorReference

__all__ = [
    "REFERENCES", "Reference", "Trial", "UnsupportedCase", "Variant", "alternatives", "reference", "reference_of",
]  # fmt: skip

LIBRARIES = (TorchReference(), CublasReference(), CudnnReference(), FlashInferReference(), FlaReference())
REFERENCES: dict[str, Reference] = {chosen.name: chosen for chosen in (*LIBRARIES, VendorReference(LIBRARIES))}
SHIPPED = frozenset(REFERENCES)
"""Names of those that this package brings; they know its own operators only."""


def reference(name: str) -> Reference:
    """The reference of this name, shipped or of another package. Raises UnknownName, which lists the valid ones."""
    if name in REFERENCES:
        return REFERENCES[name]
    others = extensions("references")
    if name not in others:
        raise UnknownName("reference", name, [*REFERENCES, *others, COMPILED, "package.module:function"])
    found = others[name].load()
    made = found() if isinstance(found, type) else found
    if not isinstance(made, Reference):
        raise UsageError(f"{others[name].package} registers {others[name].point.value} as a reference; it is {made!r}")
    REFERENCES[name] = made
    return made


def reference_of(case: KernelCase) -> Reference:
    """The reference of a case: a shipped one, another package's, a function of the user's, or the definition itself.

    Raises UnknownName, which lists the valid ones.
    """
    if is_function(case.reference) or (case.definition is not None and case.reference in (DEFINITION, COMPILED)):
        return own_reference(case)
    return reference(case.reference)


def alternatives(case: KernelCase, platform: str) -> tuple[str, ...]:
    """Names of the references that may take a case when its own refuses it, by what is known before anything runs.

    One that would ask only those who have refused is none.
    """
    refused = reference_of(case).asks(case.operator)

    def takes(name: str) -> bool:
        chosen = REFERENCES[name]
        known = case.operator in chosen.operators() and platform in chosen.platforms
        return known and not chosen.limits(case, platform)

    def asks_another(name: str) -> bool:
        return any(member not in refused and takes(member) for member in REFERENCES[name].asks(case.operator))

    return tuple(name for name in REFERENCES if takes(name) and asks_another(name))
