"""One chain of the experiment: begun, gone on with or replayed; built here before it costs time on a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from design import CARDS, LABELS, NONE, PLACEBO, Design, Frozen, card_digest, digest_of

from pytest_klineage import GateSettings, KernelCase, KernelSource, KlineageSession, Verdict
from pytest_klineage.errors import Waiting
from pytest_klineage.executors.batch import ARTIFACTS
from pytest_klineage.lab.llm.exchange import ExchangeBackend
from pytest_klineage.lab.llm.prices import Prices
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.instructions import instructions_for
from pytest_klineage.lab.optimizers.klineage import CardMethod
from pytest_klineage.lab.optimizers.session import Judge, OptimizationResult, optimize
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.lab.plugin import Models
from pytest_klineage.records import Asked, Code, Reason, SkillCard
from pytest_klineage.results.runs import append_record

NAME = "skill_effect"
METHODS = {NONE: "generated-only", LABELS: "labels-only", CARDS: "klineage", PLACEBO: "klineage"}
"""The method whose words an arm's prompts have."""
REFERENCE = "another kernel for the same case"
BUILT = {"stage": "compile"}
LIBRARY_FLAG = "--include=cutlass"


def goal(design: Design, case: KernelCase) -> str:
    """The sentence on what is wanted, which every arm's prompt has."""
    words = f", with {', '.join(case.requires)} in its machine code" if case.requires else ""
    return (
        f"A success is a right kernel with {case.at_least:g}x of the reference's speed at least{words}. What counts "
        "most is whether your first kernel is one, then how fast your best one is. Write CUDA C++ and inline PTX; "
        "headers of CUTLASS and CuTe are refused."
    )


def task_of(design: Design, name: str) -> Task:
    """What a target's chains begin with, in every arm."""
    case, root = design.case(name), design.root(name)
    text = instructions_for(
        case, root.surface, design.platform, root.entry, root.flags, machine=design.machine,
        reference=design.targets[name].described,
    )  # fmt: skip
    return Task(case=case, platform=design.platform, surface=root.surface, root=root, instructions=text)


def method_of(design: Design, arm: str, case: KernelCase, cards: tuple[SkillCard, ...], steps: int) -> CardMethod:
    """The method of an arm, with the cards that were chosen for it."""
    return CardMethod(METHODS[arm], cards=cards, goal=goal(design, case), max_steps=steps)


def frozen_now(design: Design) -> Frozen:
    """What follows from the design and the repository as they are."""
    cards = {
        name: {arm: [card_digest(card) for card in design.cards(name, arm)] for arm in design.arms if arm != NONE}
        for name in design.targets
    }
    prompts = {name: {arm: prompt_digest(design, name, arm) for arm in design.arms} for name in design.targets}
    return Frozen(design=digest_of(), cards=cards, prompts=prompts)


def prompt_digest(design: Design, name: str, arm: str) -> str:
    """SHA-256 of everything that the first prompt of a chain shows."""
    task = task_of(design, name)
    method = method_of(design, arm, task.case, design.cards(name, arm), design.shots)
    with tempfile.TemporaryDirectory() as folder:
        return _asked(task, method, Path(folder))


def _asked(task: Task, method: CardMethod, folder: Path) -> str:
    """The digest of a chain's first prompt, which is written to a folder and not answered."""
    backend = ExchangeBackend(folder / "asked", Prices.load(), model="unbilled", waits=False)
    with Session.begin(folder / "chain.jsonl", backend, limit_usd=1.0, name="frozen") as session:
        try:
            optimize(task, method, session, _never, max_steps=1, submit_root=False)
        except Waiting:
            return next(event.digest for event in session.events if isinstance(event, Asked))
    raise AssertionError("a prompt without a reply is waited for")


def _never(case: KernelCase, source: KernelSource) -> Verdict:
    raise AssertionError("nothing is judged before the first reply")


class Runner:
    """Runs chains of one pytest session. Tests are skipped without a model, and for what is done."""

    def __init__(
        self, session: KlineageSession, models: Models, request: pytest.FixtureRequest, tell: Callable[[str], None]
    ) -> None:
        self.session, self.models, self.request, self.tell = session, models, request, tell

    @property
    def folder(self) -> Path:
        """Where trajectories lie; verdicts with their samples are in a file beside it."""
        return self.models.trajectories / f"{NAME}-{self.session.platform}"

    @property
    def verdicts(self) -> Path:
        """The file of verdicts with their samples."""
        return self.folder.with_name(f"{self.folder.name}.verdicts.jsonl")

    def run(
        self, name: str, task: Task, method: CardMethod, settings: dict[str, str], *, steps: int, budget_usd: float,
        gate: dict[str, float], against: KernelSource | None = None, submit_root: bool = False,
    ) -> OptimizationResult:  # fmt: skip
        """One chain, as far as it gets today. Raises Waiting where a reply or a verdict has not come."""
        models, path = self.models, f"{NAME}-{task.platform}/{name}"
        if models.backend == "none" or (models.is_replay and not models.is_recorded(path)):
            pytest.skip("asks a language model: --klineage-llm=exchange; or replays what is recorded")
        if models.is_done(path):
            pytest.skip(f"{path} is done")
        opened = models.session(path, limit_usd=budget_usd, settings=settings | {"root": task.root.digest})  # type: ignore[union-attr]
        judge = self.replaying(against) if models.is_replay else self.judging(gate, against)
        try:
            return optimize(
                task, method, opened, judge, max_steps=steps, submit_root=submit_root,
                on_step=lambda step: self.tell(f"{name}: {step.line}"),
            )  # fmt: skip
        finally:
            models.close()

    def judging(self, settings: dict[str, float], against: KernelSource | None = None) -> Judge:
        """Builds here first: what is not built, or lacks an instruction, is refused without a GPU, and says why."""
        given = self.session.settings.gate
        batch = self.session.settings.batch
        ahead = {"artifacts": batch.absolute() / ARTIFACTS} if batch is not None else {}
        cache = {"cache_dir": given["cache_dir"]} if "cache_dir" in given else {}

        def judge(case: KernelCase, source: KernelSource) -> Verdict:
            if LIBRARY_FLAG in source.flags:
                return refused(case, source)
            with self.session.gate_with(GateSettings(**(BUILT | ahead | cache))) as builder:
                built = builder.judge(case, source)
            if not built.ok or given.get("stage") == "compile":
                return built
            with self.session.gate_with(GateSettings(**(settings | given))) as gate:
                return self.kept(gate.judge(case, source, reference_source=against))

        return judge

    def replaying(self, against: KernelSource | None = None) -> Judge:
        """Sees whether kernels are still right."""
        gate = self.request.getfixturevalue("quick_gate")
        return lambda case, source: gate.judge(case, source, reference_source=against)

    def kept(self, verdict: Verdict) -> Verdict:
        """The verdict, written down with its samples."""
        self.session.remember(self.request.node.nodeid, verdict)
        append_record(self.verdicts, self.request.node.nodeid, verdict)
        return verdict


def refused(case: KernelCase, source: KernelSource) -> Verdict:
    """The verdict on a kernel that is written with a library of kernels."""
    reason = Reason(code=Code.FLAG_REFUSED, message=f"{LIBRARY_FLAG}: write CUDA C++ and inline PTX")
    return Verdict(
        case=case, status=reason.code.status, reasons=(reason,), surface=source.surface.value,
        source_digest=source.digest, label=source.label,
    )  # fmt: skip
