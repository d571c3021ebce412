"""The references under the policy do_bench against Triton's own do_bench in the same minute, and what was published.

Right before the gate judges, a process of its own prepares the same reference and has triton.testing.do_bench time it:
what the two differ by is not a matter of machines or weeks. It also times it on more inputs and a stream of its own, as
the gate does, to show which part of a difference these are; nothing is decided by that.

pytest suites/gate_quality/test_gpu_references.py --platform sm90 -k "gemm and not 8192"    a part; other rows are kept
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from evaluators.gpu import alone, process_on
from evaluators.process import ProcessEnded
from on_gpu import first_right, gpu_platform, kept_rows, machine_of, results_file, with_library
from triton_do_bench import OTHER_INPUTS, CaseToTime, DoBenched

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import make_case, paper_case
from pytest_klineage.records import KernelCase

TOLERANCE = 0.03
PUBLISHED_ON = "H200"


class Published(NamedTuple):
    """One figure that was published: the median of triton.testing.do_bench(warmup=25, rep=100) on one H200."""

    name: str
    operator: str
    reference: str
    milliseconds: float
    shape: tuple[int, ...] = ()
    """Empty for the paper's."""
    dtype: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def case(self) -> KernelCase:
        """The case, with libraries allowed."""
        paper = paper_case(self.operator, "gpu", self.reference)
        shape = self.shape or tuple(paper.shape.values())
        options = {**paper.options, **dict(self.options)}
        return with_library(make_case(self.operator, shape, self.dtype or paper.dtype, self.reference, **options))


PUBLISHED = (
    Published("gemm-4096", "gemm", "cublas", 0.1949),
    Published("gemm-2048", "gemm", "cublas", 0.0290, (2048, 2048, 2048)),
    Published("topk", "topk", "flashinfer", 0.0158),
    Published("conv2d-nchw", "conv2d", "cudnn", 0.0340),
    Published("conv2d-nhwc", "conv2d", "cudnn", 0.0182, options=(("layout", "nhwc"),)),
    Published("gdn", "gdn", "flashinfer", 0.1987),
    Published("fmha-cudnn", "fmha", "cudnn", 1.956),
    Published("fmha-fa3", "fmha", "flashinfer", 1.995),
    Published("fmha-fa3-causal", "fmha", "flashinfer", 1.135, options=(("causal", True),)),
    Published("gemm-8192", "gemm", "cublas", 1.584, (8192, 8192, 8192)),
    # Its first call tunes for about half a minute.
    Published("gdn-fla", "gdn", "fla", 0.3580),
)


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One reference as the gate times it, and as Triton does."""

    name: str
    case: str
    reference: str
    published_ms: float
    measured_ms: float
    samples_ms: tuple[float, ...]
    facts: dict[str, str]
    """Versions and the variant that was chosen."""
    machine: str
    judged_at: str
    triton: DoBenched | None = None
    """Triton's do_bench today, in another process; None where that process failed."""

    @property
    def ratio(self) -> float:
        """The gate's figure over the published one."""
        return self.measured_ms / self.published_ms

    @property
    def ratio_today(self) -> float | None:
        """The gate's figure over Triton's of the same minute; None where there is none."""
        return self.measured_ms / self.triton.milliseconds if self.triton and self.triton.milliseconds else None

    @property
    def ratio_like_the_gate(self) -> float | None:
        """The gate's figure over Triton's on other inputs and a stream of their own; None where there is none."""
        figure = self.triton.like_the_gate_ms if self.triton else None
        return self.measured_ms / figure if figure else None

    @property
    def within(self) -> bool:
        """Whether the gate agrees with Triton today; with the published figure where Triton said nothing."""
        return abs((self.ratio_today or self.ratio) - 1) <= TOLERANCE


def report_of(rows: list[Timed], platform: str) -> str:
    """The page with its table, in the order of PUBLISHED."""
    order = [published.name for published in PUBLISHED]
    lines = [
        f"# References on {platform} under `do_bench`\n",
        f"{rows[-1].machine}, {rows[-1].judged_at}. Published: figures kept in this suite, taken on one H200 "
        "before the gate judged there; medians of "
        f"`triton.testing.do_bench(warmup=25, rep=100)` on one {PUBLISHED_ON}, whose clock drifts by up to 5 % under "
        "load. Triton: the same function today, in a process of its own right before the gate's, on one input and the "
        "default stream. On the gate's inputs and stream: then, in the same process, on several inputs as the gate has "
        f"them ({OTHER_INPUTS} of other seeds, one after the other; the median of their medians) and a stream of its "
        "own. A kernel's time may depend on its input: as far as this ratio is nearer to 1 than the one before it, the "
        "two differ in inputs and stream, not in how they take the time. The last column is about the gate and Triton "
        "today, or the published figure where Triton has none.\n",
        "| case | reference | published, ms | Triton today, ms | the gate, ms | gate / published | gate / Triton "
        f"| Triton on the gate's inputs and stream, ms | gate / that | within {100 * TOLERANCE:g} % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [line_of(row) for row in sorted(rows, key=lambda row: order.index(row.name))]
    return "\n".join([*lines, "", f"Raw samples: `references-{platform}.jsonl`."])


def line_of(row: Timed) -> str:
    """One row of the table."""
    variant, other = row.facts.get("variant", ""), row.triton.variant if row.triton else ""
    shown = f"{row.reference} ({variant})" if variant else row.reference
    if other and other != variant:
        shown += f"; Triton's process chose {other}"
    today, beside = "", ""
    if row.triton is not None and row.ratio_today is not None:
        today, beside = f"{row.triton.milliseconds:.4f}", f"{row.ratio_today:.3f}"
    alike = (row.triton.like_the_gate_ms if row.triton else None, row.ratio_like_the_gate)
    like_the_gate = "- | -" if None in alike else "{:.4f} | {:.3f}".format(*alike)
    figures = f"{row.published_ms:.4f} | {today} | {row.measured_ms:.4f} | {row.ratio:.3f} | {beside} | {like_the_gate}"
    return f"| {row.case} | {shown} | {figures} | {'yes' if row.within else 'no'} |"


def by_triton(case: KernelCase, platform: str, settings: GateSettings) -> tuple[DoBenched | None, str]:
    """Triton's do_bench of the case's reference, in a process that ends before this returns; and what went wrong."""
    try:
        with alone(platform), process_on(platform, "triton_do_bench", settings) as process:
            return process.ask(CaseToTime(case=case, platform=platform), DoBenched), ""
    except ProcessEnded as ended:
        return None, str(ended)


@pytest.mark.parametrize("published", [pytest.param(item, id=item.name) for item in PUBLISHED])
def test_gpu_references(
    published: Published,
    request: pytest.FixtureRequest,
    klineage_session: KlineageSession,
    publish: Callable[[str, str, list[Timed]], None],
) -> None:
    """The gate's do_bench says what Triton's said right before, within 3 %."""
    platform = gpu_platform(klineage_session)
    settings = msgspec.structs.replace(klineage_session.gate_settings, policy="do_bench", also_policies=(), seeds=1)
    case = published.case()
    today, fault = by_triton(case, platform, settings)
    with Gate(platform, settings) as gate:
        _source, verdict = first_right(gate, case, against_itself=False)
    assert verdict.timing is not None
    row = Timed(
        name=published.name, case=case.id, reference=published.reference, published_ms=published.milliseconds,
        measured_ms=verdict.timing.reference_ms, samples_ms=verdict.timing.reference_samples_ms,
        facts=verdict.reference, machine=machine_of(verdict), judged_at=verdict.judged_at, triton=today,
    )  # fmt: skip
    name = f"references-{platform}"
    known = {item.name for item in PUBLISHED} - {published.name}
    rows = kept_rows(results_file(request.config, name), Timed, without=lambda other: other.name not in known)
    publish(name, report_of([*rows, row], platform), [*rows, row])
    assert not fault, fault
    if row.ratio_today is None and PUBLISHED_ON not in row.machine:
        absent = today.absent if today else ""
        pytest.skip(f"published for an {PUBLISHED_ON}, measured on {row.machine}; no Triton beside it: {absent}")
    assert row.within, line_of(row)
