"""The references by name. Importing this imports no torch."""

from __future__ import annotations

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.extensions import extensions
from pytest_klineage.records import KernelCase, covers
from pytest_klineage.references.base import Reference, TrialTensors, Variant
from pytest_klineage.references.cublas import CublasReference
from pytest_klineage.references.cudnn import CudnnReference
from pytest_klineage.references.fla import FlaReference
from pytest_klineage.references.flaggems import FlagGemsReference
from pytest_klineage.references.flashinfer import FlashInferReference
from pytest_klineage.references.functions import COMPILED, DEFINITION, is_function, own_reference
from pytest_klineage.references.refusals import UnsupportedCase
from pytest_klineage.references.torch import TorchReference
from pytest_klineage.references.vendor import VendorReference

__all__ = [
    "REFERENCES", "Reference", "TrialTensors", "UnsupportedCase", "Variant", "alternatives", "reference",
    "reference_of",
]  # fmt: skip

TORCH, LIBRARIES = TorchReference(), (CublasReference(), CudnnReference(), FlashInferReference(), FlaReference())
REFERENCES: dict[str, Reference] = {
    chosen.name: chosen for chosen in (TORCH, *LIBRARIES, VendorReference((*LIBRARIES, TORCH)))
}
SHIPPED = frozenset(REFERENCES)
"""Names of those that know this package's own operators only."""
REFERENCES["flaggems"] = FlagGemsReference()


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
    if is_own(case.reference, case.operator, shipped=case.definition is None):
        return own_reference(case)
    return reference(case.reference)


def is_own(name: str, operator: str, *, shipped: bool) -> bool:
    """Whether a reference is a function, or an operator's own definition: of one that is not shipped, or not known."""
    return is_function(name) or (name in (DEFINITION, COMPILED) and not (shipped and operator in TORCH.operators()))


def alternatives(case: KernelCase, platform: str) -> tuple[str, ...]:
    """Names of the references that may take a case when its own refuses it, by what is known before anything runs.

    Excludes references backed only by libraries that already refused.
    """
    refused = reference_of(case).asks(case.operator)

    def takes(name: str) -> bool:
        chosen = REFERENCES[name]
        known = case.operator in chosen.operators() and covers(chosen.platforms, platform)
        return known and not chosen.limits(case, platform)

    def asks_another(name: str) -> bool:
        return any(member not in refused and takes(member) for member in REFERENCES[name].asks(case.operator))

    return tuple(name for name in REFERENCES if takes(name) and asks_another(name))
