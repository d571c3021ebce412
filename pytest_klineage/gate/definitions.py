"""Where the trusted processes of a judgement find the files of a user's operator and references."""

from __future__ import annotations

import os
import sys

from pytest_klineage.errors import HarnessError, KlineageError, WorkerDied
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.defined import DefinedOperator
from pytest_klineage.operators.resolve import file_of
from pytest_klineage.records import DefinitionFile, KernelCase
from pytest_klineage.references.functions import reference_files


def lost_oracle(case: KernelCase, error: HarnessError) -> KlineageError:
    """What to raise when the oracle hangs or ends: a user's definition is what it was evaluating.

    An oracle that the system killed is a fault of this machine all the same: another one may have the memory.
    """
    operator = operator_of(case)
    if not isinstance(operator, DefinedOperator):
        return error
    found = operator.error(f"the definition does not come back: {error}")
    return HarnessError(str(found)) if isinstance(error, WorkerDied) and error.killed else found


def definition_file(case: KernelCase) -> DefinitionFile:
    """Where trusted processes import a case's definition, and its reference's functions, on this machine."""
    path = file_of(case)
    search = tuple(os.path.abspath(folder) for folder in sys.path if folder)
    written = (case.reference, *case.reference_variants, case.reference_prepare)
    return DefinitionFile(path=str(path or ""), search=search, files=reference_files(written))
