"""What is said when the process that evaluates definitions hangs or ends."""

from __future__ import annotations

import re

import pytest
import torch

from pytest_klineage import UsageError, make_case, operator
from pytest_klineage.errors import DeadlineExceeded, HarnessError, WorkerDied
from pytest_klineage.gate.definitions import lost_oracle


@operator("x[N] -> y[N]", dtypes=("fp32",))
def endless(x: torch.Tensor) -> torch.Tensor:
    return x


def test_a_definition_of_a_users_own_is_named_with_its_line() -> None:
    hung = DeadlineExceeded("the oracle process did not answer within 600 s")
    found = lost_oracle(make_case(endless, (4,), "fp32", "torch"), hung)
    assert isinstance(found, UsageError)
    assert re.fullmatch(rf"\S*test_lost_oracle\.py:\d+: operator endless: .*{hung}", str(found))


def test_of_a_shipped_operator_it_is_a_fault_of_the_harness() -> None:
    hung = DeadlineExceeded("the oracle process did not answer within 600 s")
    assert lost_oracle(make_case("gemm", (4, 4, 4), "fp32", "torch"), hung) is hung


@pytest.mark.parametrize(("killed", "kind"), [(True, HarnessError), (False, UsageError)])
def test_a_definition_is_not_blamed_for_want_of_memory(killed: bool, kind: type[Exception]) -> None:
    """What the system killed is tried again elsewhere; what ended by itself ends so on every machine."""
    died = WorkerDied("the oracle process ended", killed=killed)
    found = lost_oracle(make_case(endless, (4,), "fp32", "torch"), died)
    assert isinstance(found, kind)
    assert re.fullmatch(rf"\S*test_lost_oracle\.py:\d+: operator endless: .*{died}", str(found))
