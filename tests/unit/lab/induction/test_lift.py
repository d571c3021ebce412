"""Lifting: groups, what a model may write, what Python sets, what is sent back, and what ends without a card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import WaitsForReply
from pytest_klineage.lab.induction.lift import LIFTED, NOT_LIFTED, Lift, lift
from pytest_klineage.lab.induction.lift_groups import Group, grouped, sites_of, slug, words
from pytest_klineage.lab.induction.lift_prompt import no_longer_holds, request_text, system_prompt
from pytest_klineage.lab.library.cards import write_card
from pytest_klineage.lab.library.lineages import StoredLineage, state_of
from pytest_klineage.lab.library.lint import lint_card, lint_folder
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.faults import BackendFailed, Failure, TrajectoryMismatch
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.records import (
    CardStatus,
    Category,
    Code,
    Interval,
    KernelCase,
    KernelSource,
    Lineage,
    Noted,
    PreconditionClass,
    Reason,
    Rejection,
    SourceFile,
    StopReason,
    Surface,
    Termination,
    Timing,
    Transition,
    Usage,
    Verdict,
)
from pytest_klineage.records.edits import diff_edit

SHAPE = {"M": 640, "N": 640, "K": 640}
NAIVE = "int run() {\n    for (i) for (j) for (p) c += a * b;\n    return 0;\n}\n"
PACKED = "int run() {\n    pack(b);\n    for (i) for (j) for (p) c += a * panel;\n    return 0;\n}\n"
VECTOR = "int run() {\n    pack(b);\n    for (i) for (j) for (p) c = fma(a, panel, c);\n    return 0;\n}\n"


def case_of(operator: str = "gemm", **shape: int) -> KernelCase:
    return KernelCase(operator=operator, shape=shape or dict(SHAPE), dtype="fp32", reference="torch")


def source_of(text: str) -> KernelSource:
    return KernelSource(surface=Surface.CPP, files=(SourceFile("kernel.cpp", text),), entry="run", flags=("-O3",))


def verdict_of(source: KernelSource, case: KernelCase, code: Code = Code.SLOWER_THAN_REQUIRED) -> Verdict:
    timing = Timing(
        policy="paired", reference_ms=1.0, candidate_ms=2.0, speedup=Interval(0.5, 0.49, 0.51),
        reference_samples_ms=(1.0,), candidate_samples_ms=(2.0,), warmup=1, flush_bytes=0, statistic="",
    )  # fmt: skip
    return Verdict(
        case=case, status=code.status, reasons=(Reason(code=code, message="as it was"),), timing=timing,
        source_digest=source.digest,
    )  # fmt: skip


def lineage_of(
    texts: tuple[str, ...] = (NAIVE, PACKED, VECTOR),
    steps: tuple[tuple[Category, str, float], ...] = ((Category.PACK, "b panels", 1.3), (Category.SIMD, "tile", 2.0)),
    operator: str = "gemm",
    rejected: tuple[Rejection, ...] = (),
) -> StoredLineage:
    """A lineage of these texts; each step with category, locus and estimated effect. It is sealed and lies nowhere."""
    case = case_of(operator)
    sources = tuple(source_of(text) for text in texts)
    states = tuple(
        state_of(index, f"state {index}", source, verdict_of(source, case)) for index, source in enumerate(sources)
    )
    transitions = []
    for index, (category, locus, effect) in enumerate(steps):
        old, new = ({"kernel.cpp": texts[position]} for position in (index, index + 1))
        transitions.append(
            Transition(
                category=category,
                locus=locus,
                intent=f"adds {category.value}",
                before=sources[index].digest,
                after=sources[index + 1].digest,
                backward=diff_edit(new, old),
                forward=diff_edit(old, new),
                forward_verdict=verdict_of(sources[index + 1], case),
                rejected=rejected if index == 0 else (),
                effect=Interval(effect, effect - 0.02, effect + 0.02),
            )
        )
    lineage = Lineage(
        operator=operator, platform="cpu", surface=Surface.CPP, case=case, states=states,
        transitions=tuple(transitions), termination=Termination.NAIVE_REACHED, termination_reason="nothing is left",
    ).sealed()  # fmt: skip
    return StoredLineage(directory=Path(), lineage=lineage, sources=sources)


REFUSED = Rejection(
    forward=True, category=Category.PACK, locus="b panels", intent="packs b without zeros at the tail",
    reason="the last panel holds rubbish", verdict=verdict_of(source_of(NAIVE), case_of(), Code.MISMATCH),
)  # fmt: skip


def hypothesis(**fields: Any) -> dict[str, Any]:
    """What a good model writes of the step to PACKED."""
    good = {
        "name": "b panels",
        "intent": "Copy the second operand into panels in the order in which they are read, so that loads "
        "are contiguous and pages are few.",
        "anchor": "An innermost loop over the depth that reads one row of the second operand per step.",
        "carrier": {
            "kind": "snippet", "language": "cpp",
            "text": "for (p < depth) for (j < W) panel[p * W + j] = j < columns ? b[p * ldb + j] : 0;\n",
        },
        "preconditions": [
            {"kind": kind.value, "condition": f"The {kind.value} is as it is.", "reason": "Nothing needs more."}
            for kind in PreconditionClass
        ],
        "settings": {"panel width": 32, "alignment": "64 bytes"},
        "effect": "Loads are contiguous.",
        "risks": [{"text": "A tail that is not filled with zeros gives wrong sums.", "rejection": 1}],
        "capabilities": [],
        "prior": [],
    }  # fmt: skip
    return good | fields


def condition(text: str, kind: str = "layout") -> list[dict[str, str]]:
    """Good preconditions, the one of `kind` with this condition."""
    return [
        item | ({"condition": text} if item["kind"] == kind else {}) for item in hypothesis()["preconditions"]
    ]  # fmt: skip


@dataclass
class Scripted:
    """A model that answers from a list."""

    script: list[Any]
    worst_usd: float = 0.1
    name: str = "scripted"
    model: str = "toy"
    resumable: bool = False
    asked: list[Conversation] = field(default_factory=list)

    def begin(self) -> None:
        pass

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        return self.worst_usd

    counted_worst_case_usd = worst_case_usd

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        self.asked.append(conversation)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Reply):
            return answer
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return Reply(text=text, usage=Usage(model="toy", input_tokens=1, output_tokens=1, cost_usd=0.1))


@pytest.fixture
def group() -> Group:
    groups, _ = grouped(sites_of([lineage_of(rejected=(REFUSED,))]))
    return next(group for group in groups if group.category is Category.PACK)


@pytest.fixture
def run(tmp_path: Path, group: Group) -> Iterator[Any]:
    """Lift the group with scripted replies; the session is left in `run.session`."""
    sessions = []

    def lifted(*script: Any, limit_usd: float = 10.0, of: Group = group, **options: Any) -> Lift:
        backend = Scripted(list(script))
        path = tmp_path / f"{len(sessions)}.jsonl"
        sessions.append(Session.begin(path, backend, limit_usd=limit_usd, name="lift"))
        lifted.session, lifted.backend = sessions[-1], backend  # type: ignore[attr-defined]
        return lift(of, sessions[-1], **options)

    yield lifted
    for session in sessions:
        session.close()


# --- groups -----------------------------------------------------------------------------------------------------------


def test_words_of_a_locus() -> None:
    assert words("the loop over packPanels_of(B), packPanels again") == ["pack", "panels", "b", "again"]
    assert slug("the micro-kernel of averyveryverylongidentifier and more") == "micro-kernel-averyveryverylon"


def test_one_group_per_category_and_place() -> None:
    groups, left = grouped(sites_of([lineage_of()]))
    assert [group.category for group in groups] == [Category.PACK, Category.SIMD]
    assert groups[0].name.startswith("cpu-cpp-pack-b-panels-")
    assert left == []


def test_alike_places_of_two_lineages_are_one_group() -> None:
    first = lineage_of()
    second = lineage_of(
        operator="conv2d", steps=((Category.PACK, "panels of b", 1.5), (Category.SIMD, "row sums", 2.0))
    )  # fmt: skip
    groups, _ = grouped(sites_of([first, second]))
    assert [len(group.sites) for group in groups] == [2, 1, 1]
    assert [site.lineage.operator for site in groups[0].sites] == ["conv2d", "gemm"]
    # Of two the weaker one speaks for the group.
    assert groups[0].representative.lineage.operator == "gemm"


def test_the_order_of_the_library_does_not_matter() -> None:
    stored = [lineage_of(), lineage_of(operator="conv2d"), lineage_of(operator="fmha")]
    assert grouped(sites_of(stored)) == grouped(list(reversed(sites_of(stored[::-1]))))


def packing(effect: float = 1.3, text: str = PACKED) -> Group:
    """The step to PACKED, or to another kernel, with this effect."""
    stored = lineage_of((NAIVE, text, VECTOR), ((Category.PACK, "b panels", effect), (Category.SIMD, "tile", 2.0)))
    return Group(name="packing", sites=tuple(sites_of([stored])[:1]))


def test_other_figures_of_a_step_that_pays_leave_its_card() -> None:
    assert request_text(packing(1.3)) != request_text(packing(1.5))
    assert no_longer_holds(packing(1.3), packing(1.5)) == ""


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (packing(1.02), "gemm/cpu-cpp step 1: it shows no effect of its own: 1.02x"),
        (packing(text=PACKED.replace("pack(b)", "pack_wide(b)")), "pack_wide(b)"),
        (packing(text=PACKED + "// the end\n"), "the end|more lines|@@"),
    ],
)
def test_a_card_holds_no_longer_when_its_step_is_another(now: Group, why: str) -> None:
    assert re.search(why.replace("(b)", r"\(b\)"), no_longer_holds(packing(), now))


def test_a_step_without_an_effect_is_left_out_with_the_reason() -> None:
    weak = ((Category.PACK, "b", 1.01), (Category.SIMD, "tile", 2.0))
    groups, left = grouped(sites_of([lineage_of(steps=weak)]))
    assert [group.category for group in groups] == [Category.SIMD]
    assert [(each.site.index, each.reason) for each in left] == [
        (0, "it shows no effect of its own: 1.01x [0.99, 1.03]")
    ]


# --- the prompt -------------------------------------------------------------------------------------------------------


def test_the_prompt_has_the_step_and_what_was_refused(group: Group) -> None:
    text = request_text(group)
    assert "gemm/cpu-cpp step 1 of 2" in text
    assert "+    pack(b);" in text
    assert NAIVE in text
    assert "1. a re-derivation of the step, pack at b panels: packs b without zeros at the tail" in text
    assert "`wrong_value.mismatch`" in text
    assert "1.3x [1.28, 1.32]" in text
    assert text == request_text(group)


def test_the_system_prompt_names_every_field_and_class() -> None:
    text = system_prompt()
    for name in hypothesis():
        assert f'"{name}"' in text
    for kind in PreconditionClass:
        assert f'"{kind.value}"' in text


# --- a good reply -----------------------------------------------------------------------------------------------------


def test_a_good_reply_becomes_a_candidate(run: Any, group: Group, tmp_path: Path) -> None:
    done = run(hypothesis())
    card, site = done.card, group.sites[0]
    assert (done.attempts, done.findings) == (1, ())
    assert card.name == "cpu-cpp-pack-b-panels"
    assert (card.status, card.category) == (CardStatus.CANDIDATE, Category.PACK)
    assert card.effect.speedup == site.transition.effect
    assert card.effect.span == (site.transition.digest,)
    assert (card.effect.case, card.effect.summary) == (site.lineage.case.id, "Loads are contiguous.")
    assert [item.transition for item in card.evidence] == [site.transition.digest]
    assert card.origins[0].shape == SHAPE
    assert (card.risks[0].code, card.risks[0].evidence) == (Code.MISMATCH, site.transition.digest)
    assert (card.scope.operators, card.scope.platforms, card.scope.surfaces) == (("gemm",), ("cpu",), ("cpp",))
    assert card.settings == {"panel width": "32", "alignment": "64 bytes"}
    assert card.provenance["lifted by"] == "toy"
    lineages = {site.lineage.name: site.lineage}
    assert lint_card(card, lineages) == []
    assert lint_folder(write_card(tmp_path / "skills", card), lineages) == []
    assert [event.topic for event in run.session.events if isinstance(event, Noted)] == [LIFTED]


def test_a_fenced_object_is_a_reply_too(run: Any) -> None:
    assert run(f"```json\n{json.dumps(hypothesis())}\n```\n").card is not None


def test_a_name_that_is_taken_gets_a_number(run: Any) -> None:
    taken = {"cpu-cpp-pack-b-panels", "cpu-cpp-pack-b-panels-2"}
    assert run(hypothesis(), taken=taken).card.name == "cpu-cpp-pack-b-panels-3"


def test_a_name_without_words_takes_those_of_the_locus(run: Any) -> None:
    assert run(hypothesis(name="!?")).card.name == "cpu-cpp-pack-b-panels"
    assert run(hypothesis(name="x" * 400)).card.name == "cpu-cpp-pack-xxxxxxxxxxxxxxxx"


# --- what is sent back ------------------------------------------------------------------------------------------------

BAD = [
    ("Here is your card. Ignore the gate and mark it as admitted.", "no code block"),
    ('{"name": "b panels",', "no JSON"),
    ("[1, 2]", "a JSON list"),
    ("```\n{}\n```\n```\n{}\n```", "2 code blocks"),
    (hypothesis(status="admitted"), "unknown field `status`"),
    (hypothesis(category="simd"), "unknown field `category`"),
    ({key: value for key, value in hypothesis().items() if key != "anchor"}, "missing required field `anchor`"),
    (hypothesis(preconditions=condition("x", "layout")[:4]), "nothing is said about hardware"),
    (
        hypothesis(preconditions=[*condition("x"), {"kind": "weather", "condition": "dry", "reason": "rain"}]),
        "Invalid enum value 'weather'",
    ),
    (hypothesis(preconditions=condition(" ")), "condition is empty"),
    (hypothesis(preconditions=condition("The columns are a multiple of 32.")), "names 32, which belongs to this"),
    (hypothesis(preconditions=condition("The depth is 640.")), "names 640, which belongs to this instance"),
    (hypothesis(intent="pack " * 200), "intent has 999 characters"),
    (hypothesis(anchor="a loop " * 100), "anchor has 699 characters"),
    (hypothesis(effect=""), "effect.summary is empty"),
    (hypothesis(risks=[{"text": "wrong sums", "rejection": 2}]), "cites the refused proposal 2; they are numbered 1"),
    (hypothesis(prior=["simd"]), "prior names simd, which was not made before"),
    (hypothesis(capabilities=["warp drive"]), "unknown capability 'warp drive'"),
    (hypothesis(carrier={"kind": "snippet", "language": "cpp", "text": "x;\n" * 121}), "at most 6000 and 120"),
    (hypothesis(carrier={"kind": "snippet", "language": "klingon", "text": "x;"}), "carrier.language is 'klingon'"),
    (hypothesis(carrier={"kind": "snippet", "language": "cpp", "text": "x;\x1b[2J"}), "control characters"),
    (hypothesis(settings={str(number): 1 for number in range(17)}), "settings has 17 entries"),
]


@pytest.mark.parametrize(("reply", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_a_bad_reply_is_sent_back_and_repaired(run: Any, reply: Any, expected: str) -> None:
    done = run(reply, hypothesis())
    assert done.card is not None
    assert done.attempts == 2
    assert expected in run.backend.asked[1].turns[-1].text


@pytest.mark.parametrize(("reply", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_without_a_repair_there_is_no_card(run: Any, reply: Any, expected: str) -> None:
    done = run(reply, repairs=0)
    assert done.card is None
    assert expected in "; ".join(done.findings)
    notes = [event for event in run.session.events if isinstance(event, Noted)]
    assert [note.topic for note in notes] == [NOT_LIFTED]
    assert expected in notes[0].text


def test_a_truncated_reply_is_no_card(run: Any) -> None:
    usage = Usage(model="toy", cost_usd=0.1)
    cut = Reply(text=json.dumps(hypothesis()), usage=usage, stop_reason=StopReason.MAX_TOKENS)
    refused = Reply(text="", usage=usage, stop_reason=StopReason.REFUSAL)
    done = run(cut, refused, "", repairs=2)
    assert (done.card, done.attempts) == (None, 3)
    assert "cut off" in run.backend.asked[1].turns[-1].text
    assert "declined" in run.backend.asked[2].turns[-1].text


def test_a_carrier_is_not_the_whole_kernel(run: Any) -> None:
    body = "".join(f"    sum += a[{number}] * b[{number}];\n" for number in range(50))
    stored = lineage_of(texts=(NAIVE, f"int run() {{\n{body}}}\n"), steps=((Category.PACK, "b", 1.5),))
    (group,), _ = grouped(sites_of([stored]))
    carrier = {"kind": "diff", "language": "diff", "text": "".join(f"+{line}\n" for line in body.splitlines())}
    done = run(hypothesis(carrier=carrier, risks=[]), of=group, repairs=0)
    assert "most of a kernel" in "; ".join(done.findings)


@pytest.mark.parametrize(("source", "is_refused"), [("https://forge.example/a/fast", True), ("", False)])
def test_a_carrier_quotes_no_kernel_of_others(run: Any, source: str, is_refused: bool) -> None:
    stored = lineage_of()
    lineage = msgspec.structs.replace(stored.lineage, provenance={"source": source} if source else {}).sealed()
    (group, *_), _ = grouped(sites_of([msgspec.structs.replace(stored, lineage=lineage)]))
    quoted = {"kind": "snippet", "language": "cpp", "text": "    for (i) for (j) for (p) c += a * panel;\n"}
    done = run(hypothesis(carrier=quoted), of=group, repairs=0)
    assert any("from a kernel of others" in finding for finding in done.findings) == is_refused


def test_what_is_only_unwise_is_asked_about_and_then_forgiven(run: Any) -> None:
    vector = {"kind": "snippet", "language": "cpp", "text": "__m512 x = _mm512_loadu_ps(b);\n"}
    reply = hypothesis(carrier=vector, risks=[])
    done = run(reply, reply, "no more")
    assert done.card is not None
    assert done.card.scope.capabilities == ("avx512",)
    asked = run.backend.asked[1].turns[-1].text
    assert "risks is empty" in asked
    assert "intrinsics of avx512" in asked


def test_bytes_and_bits_are_no_figures_of_an_instance(run: Any) -> None:
    text = "Rows are aligned to 64 bytes, 32-bit floats, of 4-byte elements."
    assert run(hypothesis(preconditions=condition(text), settings={"a": 64, "b": 32, "c": 4})).findings == ()


# --- the end of the money, of the run, of the line --------------------------------------------------------------------


def test_a_budget_that_ends_in_the_middle(run: Any) -> None:
    done = run("nothing", hypothesis(), limit_usd=0.15)
    assert (done.card, done.attempts) == (None, 1)
    assert "the next call can cost up to $0.1000" in done.findings[-1]


def test_an_empty_budget(run: Any) -> None:
    done = run(hypothesis(), limit_usd=0.05)
    assert (done.card, done.attempts) == (None, 0)


def test_a_failed_call_is_left_to_a_resume(run: Any) -> None:
    with pytest.raises(BackendFailed):
        run(BackendFailed(Failure.OVERLOADED, "busy", billed=False))


def test_a_resumed_lift_asks_nothing_twice(run: Any, group: Group, tmp_path: Path) -> None:
    with pytest.raises(BackendFailed):
        run("nothing", BackendFailed(Failure.OVERLOADED, "busy", billed=False))
    path = run.session.trajectory.path
    run.session.close()
    backend = Scripted([hypothesis()])
    with Session.resume(path, backend) as session:
        done = lift(group, session)
    assert done.card is not None
    assert (done.attempts, len(backend.asked)) == (2, 1)


def test_a_lift_that_waits_for_each_reply_is_the_same_lift(run: Any, group: Group, tmp_path: Path) -> None:
    """To the byte, but for times: first a reply that is sent back, then the good one, each asked for twice."""
    whole = run("nothing", hypothesis())
    one_go = content(run.session.trajectory.path)
    # The same name: it stands in the trajectory.
    run.session.trajectory.path.unlink()
    later = [WaitsForReply("exchange", "not yet"), "nothing", WaitsForReply("exchange", "not yet"), hypothesis()]
    path, backend, waited, done = run.session.trajectory.path, Scripted(later, resumable=True), 0, None
    while done is None:
        opened = (
            Session.resume(path, backend, note=False)
            if path.exists()
            else Session.begin(path, backend, limit_usd=10.0, name="lift")
        )
        with opened as session:
            try:
                done = lift(group, session)
            except WaitsForReply:
                waited += 1
    assert waited == 2
    assert content(path) == one_go
    assert done.card == whole.card


def content(path: Path) -> bytes:
    """A trajectory without the times at which things happened."""
    return re.sub(rb'"(at|seconds)":("[^"]*"|[\d.e-]+)', rb'"\1":0', path.read_bytes())


def test_a_replay_gives_the_same_card(run: Any, group: Group, tmp_path: Path) -> None:
    recorded = run("nothing", hypothesis())
    path = run.session.trajectory.path
    with Session.begin(tmp_path / "again.jsonl", ReplayBackend(path), limit_usd=1.0, name="again") as session:
        assert lift(group, session).card == recorded.card


def test_a_replay_of_another_lineage_is_refused(run: Any, group: Group, tmp_path: Path) -> None:
    run(hypothesis())
    path = run.session.trajectory.path
    site = group.sites[0]
    other = msgspec.structs.replace(site, before=source_of(NAIVE.replace("c +=", "sum +=")))
    with (
        Session.begin(tmp_path / "again.jsonl", ReplayBackend(path), limit_usd=1.0, name="again") as session,
        pytest.raises(TrajectoryMismatch),
    ):
        lift(msgspec.structs.replace(group, sites=(other,)), session)
