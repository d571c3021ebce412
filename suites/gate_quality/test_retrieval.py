"""What retrieval costs: one query over a library of 10,000 synthetic cards, as a table. No kernel is run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import msgspec

from pytest_klineage.lab.library.retrieval import DEFAULT_K, CardIndex, RetrievalTarget
from pytest_klineage.records import (
    CardScope,
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Context,
    Effect,
    KernelCase,
    Precondition,
    PreconditionClass,
    SkillCard,
    Surface,
    Trial,
    TrialOutcome,
)

CARDS = 10_000
QUERIES = 40
LIMIT_MS = 50.0
OPERATORS = {
    "gemm": ("M", "N", "K"), "conv2d": ("N", "C", "H", "W", "F"), "fmha": ("B", "H", "S", "D"), "topk": ("B", "N", "k"),
    "gdn": ("HQ", "HV", "T", "D"),
}  # fmt: skip
CODE = "for (int i = 0; i < n; ++i) {\n    sum += a[i] * b[i];\n}\n" * 20


class RetrievalCost(msgspec.Struct, frozen=True, kw_only=True):
    """Raw figures: milliseconds of every query, seconds to make the index."""

    cards: int
    k: int
    index_s: float
    query_ms: tuple[float, ...]
    explained_ms: tuple[float, ...]
    retrieved: tuple[int, ...]


def synthetic_context(random_source: random.Random) -> Context:
    operator = random_source.choice(sorted(OPERATORS))
    shape = {axis: 2 ** random_source.randint(3, 14) + random_source.choice((0, 0, 1)) for axis in OPERATORS[operator]}
    return Context(
        operator=operator, shape=shape, dtype=random_source.choice(("fp32", "bf16", "fp16")),
        surface=random_source.choice(list(Surface)), platform=random_source.choice(("sm90", "sm120", "cpu")),
        prior=tuple(random_source.sample(list(Category), random_source.randint(0, 6))),
    )  # fmt: skip


def synthetic_card(number: int, random_source: random.Random) -> SkillCard:
    """A card whose verified scope is as varied as it could be: nearly every shape and every set of steps is its own."""
    trials = tuple(
        Trial(context=synthetic_context(random_source), outcome=TrialOutcome.SUCCESS, held_out=True)
        for _ in range(random_source.randint(1, 3))
    )
    return SkillCard(
        name=f"card-{number:05d}",
        status=CardStatus.ADMITTED,
        category=random_source.choice(list(Category)),
        intent="A synthetic intent.",
        anchor="a loop",
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="cpp", text=CODE),
        preconditions=tuple(Precondition(kind=kind, condition="c", reason="r") for kind in PreconditionClass),
        effect=Effect(summary="faster"),
        scope=CardScope(),
        origins=(synthetic_context(random_source),),
        log=trials,
    )


def synthetic_target(random_source: random.Random) -> RetrievalTarget:
    at = synthetic_context(random_source)
    case = KernelCase(operator=at.operator, shape=at.shape, dtype=at.dtype, reference="torch")
    return RetrievalTarget(case=case, surface=at.surface, platform=at.platform, done=frozenset(at.prior))


def milliseconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def test_retrieval(publish: Callable[[str, str, list[RetrievalCost]], None], measured_here: str) -> None:
    """A query over 10,000 cards takes at most 50 ms in the median."""
    random_source = random.Random(20261121)
    cards = [synthetic_card(number, random_source) for number in range(CARDS)]
    start = time.perf_counter()
    index = CardIndex(cards)
    index_s = time.perf_counter() - start
    targets = [synthetic_target(random_source) for _ in range(QUERIES)]
    queries = tuple(milliseconds_of(lambda target=target: index.retrieve(target)) for target in targets)
    explained = tuple(milliseconds_of(lambda target=target: index.retrieve(target, explain=True)) for target in targets)
    figures = RetrievalCost(
        cards=CARDS, k=DEFAULT_K, index_s=index_s, query_ms=queries, explained_ms=explained,
        retrieved=tuple(len(index.retrieve(target).matches) for target in targets),
    )  # fmt: skip
    rows = [
        ("one query, median (largest)", f"{middle(queries):.1f} ms ({max(queries):.1f} ms)", f"{LIMIT_MS:.0f} ms"),
        ("one query with explanations, median", f"{middle(explained):.1f} ms", ""),
        ("making the index, once", f"{index_s:.2f} s", ""),
        ("cards per target", f"{min(figures.retrieved)} to {max(figures.retrieved)}", f"{4 * DEFAULT_K} at most"),
    ]
    lines = [
        f"# What retrieval costs\n\n{measured_here}. {CARDS} synthetic cards with 2 to 4 verified contexts each, "
        f"{QUERIES} targets, k = {DEFAULT_K}.\n",
        "| what | measured | target |",
        "|---|---|---|",
        *(f"| {what} | {value} | {target} |" for what, value, target in rows),
    ]
    publish("retrieval", "\n".join(lines) + "\n\nRaw figures: `retrieval.jsonl`.", [figures])
    assert middle(queries) <= LIMIT_MS
    assert max(figures.retrieved) <= 4 * DEFAULT_K


def middle(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]
