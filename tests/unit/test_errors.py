"""The exception tree: what a caller can catch, and what the messages say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage import errors

NAMES = st.text(min_size=1, max_size=8)


def test_every_exception_is_a_klineage_error() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 9
    assert all(issubclass(kind, errors.KlineageError) for kind in kinds)


@pytest.mark.parametrize(
    ("kind", "parent"),
    [
        (errors.UnknownName, errors.UsageError),
        (errors.BadRecord, errors.UsageError),
        (errors.WorkerDied, errors.HarnessError),
        (errors.DeadlineExceeded, errors.HarnessError),
        (errors.StoreError, errors.HarnessError),
    ],
)
def test_kinds_stand_below_their_parent(kind: type[Exception], parent: type[Exception]) -> None:
    assert issubclass(kind, parent)


def test_misuse_and_our_own_faults_are_distinguished() -> None:
    assert not issubclass(errors.HarnessError, errors.UsageError)
    assert not issubclass(errors.MissingDependency, (errors.UsageError, errors.HarnessError))


def test_unknown_name_suggests_the_nearest() -> None:
    message = str(errors.UnknownName("operator", "gem", ["gemm", "topk"]))
    assert "Did you mean 'gemm'?" in message


def test_unknown_name_suggests_nothing_when_nothing_is_near() -> None:
    assert "Did you mean" not in str(errors.UnknownName("operator", "xyzzy", ["gemm", "topk"]))


def test_unknown_name_says_when_there_is_no_valid_name() -> None:
    assert "(none)" in str(errors.UnknownName("surface", "cuda", []))


@given(kind=NAMES, name=st.one_of(NAMES, st.integers(), st.none()), valid=st.sets(NAMES, max_size=5))
def test_unknown_name_lists_every_valid_name_in_order(kind: str, name: object, valid: set[str]) -> None:
    error = errors.UnknownName(kind, name, valid)
    assert error.valid == sorted(valid)
    assert str(error).endswith(f"Valid: {', '.join(sorted(valid)) or '(none)'}.")
    assert repr(str(name)) in str(error)


def test_a_missing_dependency_says_how_to_get_it() -> None:
    error = errors.MissingDependency("torch", "pip install torch")
    assert (error.what, error.remedy) == ("torch", "pip install torch")
    assert "torch is missing" in str(error)
    assert "pip install torch" in str(error)
