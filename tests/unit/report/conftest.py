"""Verdicts to aggregate and to print, and a folder with records of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.records import Code, Interval, KernelCase, Machine, Reason, Timing, Verdict

MACHINE = Machine(platform="cpu", device="Test CPU @ 3 GHz", cores=2, software={"torch": "2.13.0"})


def build_verdict(
    code: Code = Code.ACCEPTED_FASTER,
    speedup: float | None = 2.0,
    *,
    operator: str = "gemm",
    label: str = "expert",
    message: str = "as it should be",
    **fields: Any,
) -> Verdict:
    """A verdict with a timing when `speedup` is given."""
    timing = None
    if speedup is not None:
        timing = Timing(
            policy="paired",
            reference_ms=1.5,
            candidate_ms=1.5 / speedup,
            speedup=Interval(speedup, speedup * 0.99, speedup * 1.01),
            reference_samples_ms=(1.4, 1.5, 1.6),
            candidate_samples_ms=(1.4 / speedup, 1.5 / speedup, 1.6 / speedup),
            warmup=3,
            flush_bytes=1 << 25,
            statistic="median log-ratio",
        )
    shape = fields.pop("shape", {"M": 64, "N": 64, "K": 64})
    return Verdict(
        case=KernelCase(operator=operator, shape=shape, dtype="fp32", reference="torch"),
        status=code.status,
        reasons=(Reason(code=code, message=message),),
        label=label,
        machine=MACHINE,
        timing=timing,
        **fields,
    )


@pytest.fixture
def make_verdict() -> Callable[..., Verdict]:
    """`build_verdict`, for tests that cannot import it."""
    return build_verdict


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, trajectories, a lineage and a card below one folder. Read it only."""
    from report_sample import write_everything

    return write_everything(tmp_path_factory.mktemp("records"))
