"""Records of every kind to report on: runs, trajectories with failures and wrappers, lineages, cards. All made up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec

from pytest_klineage.records import (
    Answered,
    Asked,
    Begun,
    CardScope,
    CardStatus,
    Carrier,
    CarrierKind,
    Category,
    Code,
    Context,
    Edit,
    EditKind,
    Effect,
    Event,
    Evidence,
    Interval,
    Judged,
    KernelCase,
    Lineage,
    LineageState,
    Machine,
    Noted,
    Opened,
    Precondition,
    PreconditionClass,
    Reason,
    Rejection,
    Replacement,
    Risk,
    SkillCard,
    StateFile,
    Stopped,
    StopReason,
    Surface,
    Termination,
    Timing,
    TrajectoryLine,
    Transition,
    Trial,
    TrialOutcome,
    Usage,
    Verdict,
    to_json,
)
from pytest_klineage.results.runs import Record, RunInfo

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> & \u2028 | ` * ["
MACHINE = Machine(platform="cpu", device="Test CPU @ 3 GHz", cores=2, software={"torch": "2.13.0"})
SHAPES = {
    "gemm": {"M": 1024, "N": 1024, "K": 1024}, "topk": {"B": 64, "N": 4096, "k": 512},
    "conv2d": {"N": 1, "C": 64, "H": 56, "W": 56, "F": 128, "K": 3, "stride": 1, "pad": 1},
}  # fmt: skip
SPEEDS = {
    ("klineage", "topk"): (0.31, None, 2.4, 1.9, 8.7, 11.2), ("klineage", "conv2d"): (0.05, 0.4, None, 0.92, 1.08),
    ("generated-only", "topk"): (0.31, None, 0.9, 1.3, 1.25), ("generated-only", "conv2d"): (0.05, None, 0.21, 0.2),
    ("adaexplore", "topk"): (0.31, 0.5, 0.48, None, 0.61), ("adaexplore", "conv2d"): (None, None, None),
    ("accelopt", "topk"): (0.31, 0.7, 0.95), ("accelopt", "conv2d"): (0.05, 0.11, 0.1, 0.34),
}  # fmt: skip
FAILURES = (Code.MISMATCH, Code.COMPILE, Code.WRAPPER_FRAMEWORK, Code.TIMEOUT_RUN)


def case_of(operator: str, reference: str = "torch") -> KernelCase:
    return KernelCase(operator=operator, shape=SHAPES[operator], dtype="fp32", reference=reference)


def verdict_of(
    operator: str, speedup: float | None, *, code: Code | None = None, label: str = "expert", digest: str = "",
    surface: str = "cpp", log: str = "", reference_ms: float = 1.388, case: KernelCase | None = None,
) -> Verdict:  # fmt: skip
    timing = None
    if speedup is not None:
        timing = Timing(
            policy="paired", reference_ms=reference_ms, candidate_ms=reference_ms / speedup,
            speedup=Interval(speedup, speedup * 0.96, speedup * 1.05), reference_samples_ms=(), candidate_samples_ms=(),
            warmup=3, flush_bytes=0, statistic="median log-ratio",
        )  # fmt: skip
    found = code or (Code.ACCEPTED_FASTER if (speedup or 0) >= 1 else Code.SLOWER_THAN_REQUIRED)
    return Verdict(
        case=case or case_of(operator), status=found.status, timing=timing, label=label, machine=MACHINE,
        surface=surface, reasons=(Reason(code=found, message=f"as it was found: {log}"),), log=log,
        source_digest=digest, reference={"label": "torch", "torch": "2.13.0"}, judged_at="2026-01-02T03:04:05Z",
    )  # fmt: skip


def write_lines(path: Path, records: list[msgspec.Struct]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(to_json(record) + b"\n" for record in records))
    return path


def write_run(folder: Path, verdicts: list[Verdict], nodeid: str = "test_{}") -> Path:
    write_lines(
        folder / "records.jsonl",
        [Record(nodeid=nodeid.format(index), verdict=verdict) for index, verdict in enumerate(verdicts)],
    )
    info = RunInfo(started_at="2026-01-02T03:04:05Z", platform="cpu", name="sample", machine=MACHINE)
    (folder / "run.json").write_bytes(to_json(info))
    return folder


def write_trajectory(path: Path, method: str, operator: str, speeds: tuple[float | None, ...]) -> Path:
    """A root submission and a call for every further step; failures take turns, wrappers among them."""
    events: list[Event] = [
        Begun(name=f"{method} {operator}", backend="replay", model="a-model", budget_usd=10.0,
              settings={"method": method, "platform": "cpu", "surface": "cpp", "case": case_of(operator).id}),
        Opened(chat="main", system="s"),
    ]  # fmt: skip
    best: float | None = None
    for step, speed in enumerate(speeds):
        digest = f"{method}-{operator}-{step}"
        if step:
            reply = f"// {digest}\nint run() {{ return {step}; }} {HOSTILE}"
            usage = Usage(model="a-model", input_tokens=9, cost_usd=0.4 + 0.13 * step)
            events += [
                Asked(call=step, chat="main", digest=digest, text="?", history=0, max_output_tokens=9, reserved_usd=1),
                Answered(call=step, text=reply, stop_reason=StopReason.END, model="a-model", usage=usage),
                Noted(topic="step", text=f"step {step}: card: cpp-pack-b"),
            ]  # fmt: skip
        else:
            events.append(Noted(topic="step", text="step 0: root"))
        failed = FAILURES[step % len(FAILURES)]
        verdict = verdict_of(operator, speed, code=None if speed else failed, digest=digest, label="", log=HOSTILE)
        best = max(filter(None, (best, speed)), default=None)
        note = {"verdict": msgspec.to_builtins(verdict), "feedback": "text"}
        events += [
            Noted(topic="verdict", text=msgspec.json.encode(note).decode()),
            Judged(source_digest=digest, code=verdict.code, verdict="", call=step, speedup=speed, best_speedup=best),
        ]
    events += [Noted(topic="malformed", text=f"step {len(speeds)}: no fenced block"), Stopped(reason="budget")]
    return write_lines(path, [TrajectoryLine(event=event, at="2026-01-02T03:04:05Z") for event in events])


def write_lineage(folder: Path) -> Path:
    """Four states, naive first, with refused proposals of both kinds."""
    names, speeds = ("naive", "register-tile", "pack-b", "simd"), (0.05, 0.31, 0.92, 5.4)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "naive.cpp").write_text(f"// naive {HOSTILE}\n")
    states = tuple(
        LineageState(name=name, files=(StateFile("kernel.cpp", f"{name}.cpp"),), entry="run", source_digest=name,
                     verdict=verdict_of("gemm", speed, digest=name, reference_ms=11.1))
        for name, speed in zip(names, speeds, strict=True)
    )  # fmt: skip

    def edit(old: str, new: str) -> Edit:
        return Edit(kind=EditKind.SEARCH_REPLACE, blocks=(Replacement("kernel.cpp", f"// {old} ", f"// {new} "),))

    refused = tuple(
        Rejection(forward=forward, category=Category.PREFETCH, locus="inner loop", intent="hints", reason="is wrong",
                  verdict=verdict_of("gemm", speed, code=None if speed else Code.MISMATCH))
        for forward, speed in ((False, None), (True, 0.2))
    )  # fmt: skip
    transitions = tuple(
        Transition(category=category, locus="loop", intent="i", before=before, after=after,
                   backward=edit(after, before), forward=edit(before, after),
                   forward_verdict=verdict_of("gemm", 1.0), effect=Interval(3.0, 2.9, 3.1),
                   rejected=refused if category is Category.PACK else ())
        for category, (before, after) in zip((Category.REGISTER_TILE, Category.PACK, Category.SIMD), pairwise(names),
                                             strict=True)
    )  # fmt: skip
    record = Lineage(
        operator="gemm", platform="cpu", surface=Surface.CPP, case=case_of("gemm"), states=states,
        transitions=transitions, termination=Termination.NAIVE_REACHED, termination_reason="plain loops",
    ).sealed()  # fmt: skip
    (folder / "lineage.json").write_bytes(to_json(record))
    return folder


def write_card(folder: Path, name: str = "cpp-pack-b", lineage: str = "gemm/cpu-cpp") -> Path:
    context = Context(operator="conv2d", dtype="fp32", surface=Surface.CPP, platform="cpu")
    card = SkillCard(
        name=name, status=CardStatus.ADMITTED, category=Category.PACK, intent=f"pack B {HOSTILE}", anchor="inner loop",
        carrier=Carrier(kind=CarrierKind.SNIPPET, language="cpp", text="for (;;) {}"),
        preconditions=tuple(
            Precondition(kind=kind, condition="holds", reason="needed") for kind in PreconditionClass
        ),
        effect=Effect(summary="2x", speedup=Interval(2.0, 1.9, 2.1)), evidence=(Evidence(lineage, "0" * 64),),
        risks=(Risk(text="wrong where N is odd", code=Code.MISMATCH),), scope=CardScope(operators=("gemm",)),
        log=(
            Trial(context=context, outcome=TrialOutcome.REJECTED, held_out=True, code=Code.COMPILE),
            Trial(context=context, outcome=TrialOutcome.SUCCESS, held_out=True, speedup=Interval(1.8, 1.7, 1.9)),
        ),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "card.json").write_bytes(to_json(card))
    return folder


def write_everything(root: Path) -> Path:
    """Every kind of record below one folder."""
    write_run(root / "main", [
        verdict_of("gemm", 1.065, reference_ms=11.1), verdict_of("topk", 12.97), verdict_of("conv2d", 1.18),
        verdict_of("gemm", None, label="naive", code=Code.MISMATCH, log=HOSTILE),
        verdict_of("topk", 0.31, label="naive"),
        verdict_of("gemm", 1.01, surface="triton", reference_ms=11.1),
    ])  # fmt: skip
    for (method, operator), speeds in SPEEDS.items():
        write_trajectory(root / "head_to_head" / f"{method}-{operator}-1.jsonl", method, operator, speeds)
    write_run(root / "recovery", [verdict_of("topk", speed) for speed in (0.95, 0.97, 0.5)],
              nodeid="suites/ablations/test_roundtrip_recovery.py::test[{}]")  # fmt: skip
    held_out = [
        verdict_of(name, speed, label=label, case=case_of(name, "flaggems"))
        for label, speeds in (("idiom-only", (1.1, 0.96)), ("with settings", (1.2, 0.97)))
        for name, speed in zip(("gemm", "topk"), speeds, strict=True)
    ]
    write_run(root / "held_out", held_out)
    write_lineage(root / "experts" / "gemm" / "cpu-cpp" / "lineage")
    write_card(root / "skills" / "cpp-pack-b")
    return root
