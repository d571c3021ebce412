"""The references under the policy do_bench against Triton's own do_bench in the same minute, and what was published.

Right before the gate judges, a process of its own prepares the same reference and has triton.testing.do_bench time it:
what the two differ by is not a matter of machines or weeks. It times one input on the default stream, as the published
figures were taken, and then more inputs on a stream of its own, as the gate does: like is held to like.

What cudnn.benchmark finds is another plan in another process. So PyTorch's own choice, which the published figures are
about, is a reference of its own here, and a plan that was searched for is held to that choice instead of to Triton.

pytest suites/gate_quality/test_gpu_references.py --platform sm90 -k "gemm and not 8192"    a part; other rows are kept
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
from evaluators.gpu import alone, process_on
from evaluators.process import ProcessEnded
from on_gpu import first_right, gpu_platform, kept_rows, machine_of, results_file, with_library
from triton_do_bench import OTHER_INPUTS, CaseToTime, DoBenched

from pytest_klineage import KlineageSession
from pytest_klineage.gate import Gate, GateSettings
from pytest_klineage.operators import make_case, paper_case
from pytest_klineage.records import KernelCase
from pytest_klineage.records.facts import MEASURED

TOLERANCE = 0.03
PUBLISHED_ON = "H200"
SEARCHED = "+benchmark"
"""How the cudnn reference's variants end whose plan cudnn.benchmark finds."""


class ReferenceToTime(NamedTuple):
    """One reference of a case, and what was published: the median of triton.testing.do_bench(warmup=25, rep=100)."""

    name: str
    operator: str
    reference: str
    published_ms: float | None
    """On one H200; None where no figure is about this."""
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


TO_TIME = (
    ReferenceToTime("gemm-4096", "gemm", "cublas", 0.1949),
    ReferenceToTime("gemm-2048", "gemm", "cublas", 0.0290, (2048, 2048, 2048)),
    ReferenceToTime("topk", "topk", "flashinfer", 0.0158),
    ReferenceToTime("conv2d-nchw", "conv2d", "torch", 0.0340),
    ReferenceToTime("conv2d-nhwc", "conv2d", "torch", 0.0182, options=(("layout", "nhwc"),)),
    ReferenceToTime("conv2d-nchw-search", "conv2d", "cudnn", None),
    ReferenceToTime("conv2d-nhwc-search", "conv2d", "cudnn", None, options=(("layout", "nhwc"),)),
    ReferenceToTime("gdn", "gdn", "flashinfer", 0.1987),
    ReferenceToTime("fmha-cudnn", "fmha", "cudnn", 1.956),
    ReferenceToTime("fmha-fa3", "fmha", "flashinfer", 1.995),
    ReferenceToTime("fmha-fa3-causal", "fmha", "flashinfer", 1.135, options=(("causal", True),)),
    ReferenceToTime("gemm-8192", "gemm", "cublas", 1.584, (8192, 8192, 8192)),
    # Its first call tunes for about half a minute.
    ReferenceToTime("gdn-fla", "gdn", "fla", 0.3580),
)


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One reference as the gate times it, and as Triton does."""

    name: str
    case: str
    reference: str
    published_ms: float | None
    measured_ms: float
    samples_ms: tuple[float, ...]
    facts: dict[str, str]
    """Versions and the variant that was chosen."""
    machine: str
    judged_at: str
    triton: DoBenched | None = None
    """Triton's do_bench today, in another process; None where that process failed."""

    @property
    def ratio(self) -> float | None:
        """The gate's figure over the published one; None where nothing was published."""
        return over(self.measured_ms, self.published_ms)

    @property
    def ratio_today(self) -> float | None:
        """The gate's figure over Triton's of the same minute; None without one."""
        return over(self.measured_ms, self.triton and self.triton.milliseconds)

    @property
    def ratio_like_the_gate(self) -> float | None:
        """The gate's figure over Triton's on other inputs and a stream of their own; None without one."""
        return over(self.measured_ms, self.triton and self.triton.like_the_gate_ms)

    @property
    def ratio_to_own_choice(self) -> float | None:
        """The gate's figure over that of the same variant without a search, from the same process; None without one."""
        return over(self.measured_ms, float(self.facts.get(MEASURED + self.variant.removesuffix(SEARCHED), 0)))

    @property
    def variant(self) -> str:
        """Which of the reference's variants is charged."""
        return self.facts.get("variant", "")

    @property
    def agrees(self) -> bool:
        """Whether the gate is within 3 % of Triton on like terms; where Triton said nothing, of the published figure.

        A plan that was searched for is another one in Triton's process: it may not be slower than PyTorch's own choice.
        """
        if self.published_ms is None:
            return (self.ratio_to_own_choice or math.inf) <= 1 + TOLERANCE
        return within(self.ratio_like_the_gate or self.ratio_today or self.ratio)


def over(figure: float, other: float | None) -> float | None:
    """The quotient; None where the other is absent."""
    return figure / other if other else None


def within(ratio: float | None) -> bool:
    """Whether there is a ratio, and it is 1 within 3 %."""
    return ratio is not None and abs(ratio - 1) <= TOLERANCE


def report_of(rows: list[Timed], platform: str) -> str:
    """The page with its table, in the order of TO_TIME."""
    order = [item.name for item in TO_TIME]
    lines = [
        f"# References on {platform} under `do_bench`\n",
        f"{rows[-1].machine}, {rows[-1].judged_at}. Published: figures kept in this suite, taken on one H200 "
        "before the gate judged there; medians of "
        f"`triton.testing.do_bench(warmup=25, rep=100)` on one {PUBLISHED_ON}, whose clock drifts by up to 5 % under "
        "load. Triton: the same function today, in a process of its own right before the gate's, on one input and the "
        "default stream. On the gate's inputs and stream: then, in the same process, on several inputs as the gate has "
        f"them ({OTHER_INPUTS} of other seeds, one after the other; the median of their medians) and a stream of its "
        "own. A kernel's time may depend on its input; the gate draws its own. The last column is about the "
        "gate and Triton on the gate's inputs and stream. What cudnn.benchmark finds is another plan in another "
        "process: such a row has no published figure, and is held to be no slower "
        f"({100 * TOLERANCE:g} %) than PyTorch's own choice in the same process.\n",
        "| case | reference | published, ms | Triton today, ms | on the gate's inputs and stream, ms | the gate, ms "
        "| gate / published | gate / Triton | gate / Triton on its inputs and stream "
        f"| within {100 * TOLERANCE:g} % of the published | agrees |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [line_of(row) for row in sorted(rows, key=lambda row: order.index(row.name))]
    return "\n".join([*lines, "", f"Raw samples: `references-{platform}.jsonl`."])


def line_of(row: Timed) -> str:
    """One row of the table."""
    other = row.triton.variant if row.triton else ""
    shown = f"{row.reference} ({row.variant})" if row.variant else row.reference
    if other and other != row.variant:
        shown += f"; Triton's process chose {other}"
    today, alike = (row.triton.milliseconds, row.triton.like_the_gate_ms) if row.triton else (None, None)
    times = [row.published_ms, today, alike, row.measured_ms]
    ratios = [row.ratio, row.ratio_today, row.ratio_like_the_gate]
    published = "-" if row.ratio is None else yes_or_no(within(row.ratio))
    agrees = yes_or_no(row.agrees)
    if row.published_ms is None:
        agrees += f": {shown_or_dash(row.ratio_to_own_choice, 3)} of PyTorch's own choice"
    figures = [shown_or_dash(time, 4) for time in times] + [shown_or_dash(ratio, 3) for ratio in ratios]
    return f"| {' | '.join([row.case, shown, *figures, published, agrees])} |"


def shown_or_dash(number: float | None, digits: int) -> str:
    """The number with so many digits after the point; a dash without one."""
    return f"{number:.{digits}f}" if number else "-"


def yes_or_no(answer: bool) -> str:
    """In words."""
    return "yes" if answer else "no"


def by_triton(case: KernelCase, platform: str, settings: GateSettings) -> tuple[DoBenched | None, str]:
    """Triton's do_bench of the case's reference, in a process that ends before this returns; and what went wrong."""
    try:
        with alone(platform), process_on(platform, "triton_do_bench", settings) as process:
            return process.ask(CaseToTime(case=case, platform=platform), DoBenched), ""
    except ProcessEnded as ended:
        return None, str(ended)


@pytest.mark.parametrize("item", [pytest.param(item, id=item.name) for item in TO_TIME])
def test_gpu_references(
    item: ReferenceToTime,
    request: pytest.FixtureRequest,
    klineage_session: KlineageSession,
    publish: Callable[[str, str, list[Timed]], None],
) -> None:
    """The gate's do_bench says what Triton's said right before, within 3 %; a search made nothing slower."""
    platform = gpu_platform(klineage_session)
    settings = msgspec.structs.replace(
        klineage_session.gate_settings, policy="do_bench", also_policies=(), seeds=OTHER_INPUTS
    )
    case = item.case()
    today, fault = by_triton(case, platform, settings)
    with Gate(platform, settings) as gate:
        _source, verdict = first_right(gate, case, against_itself=False)
    assert verdict.timing is not None
    row = Timed(
        name=item.name, case=case.id, reference=item.reference, published_ms=item.published_ms,
        measured_ms=verdict.timing.reference_ms, samples_ms=verdict.timing.reference_samples_ms,
        facts=verdict.reference, machine=machine_of(verdict), judged_at=verdict.judged_at, triton=today,
    )  # fmt: skip
    name = f"references-{platform}"
    known = {other.name for other in TO_TIME} - {item.name}
    rows = kept_rows(results_file(request.config, name), Timed, without=lambda other: other.name not in known)
    publish(name, report_of([*rows, row], platform), [*rows, row])
    assert not fault, fault
    if row.published_ms is not None and row.ratio_today is None and PUBLISHED_ON not in row.machine:
        absent = today.absent if today else ""
        pytest.skip(f"published for an {PUBLISHED_ON}, measured on {row.machine}; no Triton beside it: {absent}")
    assert row.agrees, line_of(row)
