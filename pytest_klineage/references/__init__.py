"""The references by name. Importing this imports no torch."""

from __future__ import annotations

from pytest_klineage.errors import UnknownName
from pytest_klineage.references.base import Reference, Trial, Variant
from pytest_klineage.references.cublas import CublasReference
from pytest_klineage.references.cudnn import CudnnReference
from pytest_klineage.references.fla import FlaReference
from pytest_klineage.references.flashinfer import FlashInferReference
from pytest_klineage.references.torch import TorchReference
from pytest_klineage.references.vendor import VendorReference

__all__ = ["REFERENCES", "Reference", "Trial", "Variant", "reference"]

LIBRARIES = (TorchReference(), CublasReference(), CudnnReference(), FlashInferReference(), FlaReference())
REFERENCES: dict[str, Reference] = {chosen.name: chosen for chosen in (*LIBRARIES, VendorReference(LIBRARIES))}


def reference(name: str) -> Reference:
    """The reference of this name. Raises UnknownName, which lists the valid ones."""
    if name not in REFERENCES:
        raise UnknownName("reference", name, REFERENCES)
    return REFERENCES[name]
