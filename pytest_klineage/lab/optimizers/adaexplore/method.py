"""AdaExplore as a method: asks models for what the tree has chosen, and keeps its memory of failures."""

from __future__ import annotations

import random
import re
from collections.abc import Generator

from pytest_klineage.lab.library.lineages import RIGHT
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.lab.llm.replay import ReplayBackend
from pytest_klineage.lab.llm.session import Session
from pytest_klineage.lab.optimizers.adaexplore import prompts, rules
from pytest_klineage.lab.optimizers.adaexplore.rules import MemoryRule
from pytest_klineage.lab.optimizers.adaexplore.tree import (
    Action,
    AdaExploreSettings,
    Grade,
    MemoryMode,
    Node,
    NodeOrigin,
    SearchTree,
)
from pytest_klineage.lab.optimizers.proposal import (
    FreshChat,
    NumberedReply,
    base_of,
    first_block_source,
    main_text,
    with_main_text,
)
from pytest_klineage.lab.optimizers.recording import Notebook, recording_of
from pytest_klineage.lab.optimizers.task import Observation, Proposal, Task
from pytest_klineage.records import Code, KernelSource, Status

JUDGE_TOKENS = 1000
"""Output tokens of a comparison of rules."""
START_TOPIC, RULES_TOPIC, NODE_TOPIC = "adaexplore start", "adaexplore rules", "adaexplore node"
SAVED_TOPIC = "adaexplore saved"
UNBUILT = (Status.BUILD_ERROR, Status.SKIPPED)
PAIR = re.compile(
    r"<old_str_(?P<number>\d+)>(?P<old>.*?)</old_str_(?P=number)>\s*"
    r"<new_str_(?P=number)>(?P<new>.*?)</new_str_(?P=number)>",
    re.S,
)


class AdaExplore:
    """Tree search over kernels with large and small steps, and a memory of rules about failures."""

    def __init__(self, settings: AdaExploreSettings | None = None) -> None:
        self.settings = settings if settings is not None else AdaExploreSettings()

    @property
    def name(self) -> str:
        """The memory mode is part of the name, except the released one."""
        mode = self.settings.memory
        return "adaexplore" if mode is MemoryMode.RESET else f"adaexplore-{mode.value}"

    def proposals(self, task: Task, models: Session) -> Generator[Proposal, Observation, None]:
        """One kernel per step, until `total_steps`. The root is shown to models, and is not in the tree."""
        yield from _TreeSearch(self.settings, task, models).steps()


def grade_of(seen: Observation) -> Grade:
    """What the tree learns of an observation."""
    if seen.verdict is None:
        return Grade()
    code = seen.verdict.code
    compiled = code.status not in UNBUILT and code is not Code.TIMEOUT_BUILD
    correct = code.status in RIGHT and seen.speedup is not None
    return Grade(compiled, correct, seen.speedup or 0.0 if correct else 0.0)


class _TreeSearch:
    """One search: the tree, the chats, the rules."""

    def __init__(self, settings: AdaExploreSettings, task: Task, models: Session) -> None:
        self._settings, self._task, self._models = settings, task, models
        self._tree = SearchTree(settings, random.Random(task.seed))
        self._notes = Notebook(models)
        self._chats: dict[str, FreshChat] = {}
        self._rules = self._first_rules()

    def steps(self) -> Generator[Proposal, Observation, None]:
        """The whole search; after it, what is learnt at its end."""
        online = self._settings.memory is MemoryMode.ONLINE
        failed: list[tuple[KernelSource, Observation]] = []
        for _ in range(self._settings.total_steps):
            action = self._tree.next_action()
            proposal = self._proposal(action)
            seen = yield proposal
            node = self._tree.record(action, proposal.source, grade_of(seen), seen.feedback)
            self._note_node(node)
            if proposal.source is None or seen.verdict is None or not rules.teaches(seen.verdict.code):
                continue
            if online:
                self._learn(proposal.source, seen)
            else:
                failed.append((proposal.source, seen))
        if self._settings.update_memory:
            for source, seen in failed:
                self._learn(source, seen)
            self._save()

    # --- steps --------------------------------------------------------------------------------------------------------

    def _proposal(self, action: Action) -> Proposal:
        answer, base = self._asked(action)
        parent = action.shown[-1].kernel if action.origin is NodeOrigin.SMALL else None
        source, malformed = None, ""
        try:
            source = self._edited(answer, base) if parent is not None else first_block_source(answer, base)
        except MalformedReply as error:
            malformed = str(error)
        return Proposal(
            source=source,
            call=answer.call,
            parent=parent.digest if parent is not None else "",
            note=f"{action.origin.value} step from node {action.at.number}",
            malformed=malformed,
        )

    def _asked(self, action: Action) -> tuple[NumberedReply, KernelSource]:
        """The reply to a step's prompts, and the kernel that it goes into."""
        shown = rules.over_threshold(self._rules, self._settings.threshold)
        if action.origin is NodeOrigin.LARGE:
            return self._chat("proposer").ask(prompts.large_step(shown, action.shown)), base_of(self._task)
        guidance = prompts.FIXED_GUIDANCE
        if any(node.grade.correct for node in action.shown):
            guidance = self._chat("reviser").ask(prompts.review(shown, action.shown[-1])).text
        prompt = prompts.small_step(shown, action.shown, guidance or prompts.FIXED_GUIDANCE)
        return self._chat("tuner").ask(prompt), action.shown[-1].kernel or base_of(self._task)

    def _edited(self, answer: NumberedReply, base: KernelSource) -> KernelSource:
        head = answer.text.partition("<")[0]
        return with_main_text(head, base, edited(main_text(base), answer.text))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _first_rules(self) -> tuple[MemoryRule, ...]:
        """The rules to begin with: those of the file, or those that a recorded run began with; noted down."""
        found: tuple[MemoryRule, ...] = ()
        if (path := self._settings.rules_path) is not None:
            recorded, learns = recording_of(self._models).first(START_TOPIC), self._settings.update_memory
            found = rules.load(path, may_be_new=learns) if recorded is None else rules.parsed(recorded)
        self._notes.note(START_TOPIC, rules.written(found))
        return found

    def _learn(self, kernel: KernelSource, seen: Observation) -> None:
        """Take the rule out of a failure, and merge it with those there are."""
        log = f"{prompts.result_line(grade_of(seen))}\n{seen.feedback}"
        rule = rules.extracted_rule(self._chat("extractor").ask(prompts.extraction(kernel, log)).text)
        if rule is None:
            self._notes.note(RULES_TOPIC, f"step {seen.step}: nothing learnt")
            return
        comparison = rules.RuleComparison()
        if self._rules:
            prompt = prompts.comparison(self._rules, rule)
            comparison = rules.read_comparison(self._chat("judge").ask(prompt, max_output_tokens=JUDGE_TOKENS).text)
        before, self._rules = self._rules, rules.merged(self._rules, rule, comparison)
        what = "new" if len(self._rules) > len(before) else f"again rule {comparison.index}"
        self._notes.note(RULES_TOPIC, f"step {seen.step}: {what}: {rule}")

    def _save(self) -> None:
        """Write the rules to their file, once, unless the run is a replay."""
        path = self._settings.rules_path
        saved = recording_of(self._models).first(SAVED_TOPIC) is not None
        if path is not None and not saved and not isinstance(self._models.backend, ReplayBackend):
            rules.save(path, self._rules)
        self._notes.note(SAVED_TOPIC, f"{len(self._rules)} rules")

    # --- chats and notes ----------------------------------------------------------------------------------------------

    def _chat(self, role: str) -> FreshChat:
        """The chat of a role, opened when it is first needed. Rules are made without the contract."""
        if role not in self._chats:
            about_task = role in ("proposer", "reviser", "tuner")
            self._chats[role] = FreshChat(
                self._models,
                f"adaexplore-{role}",
                system=prompts.system(role, self._task),
                context=prompts.context(self._task) if about_task else (),
                max_output_tokens=self._settings.max_output_tokens,
            )
        return self._chats[role]

    def _note_node(self, node: Node) -> None:
        parent = node.parent.number if node.parent is not None else 0
        shown = ", ".join(str(number) for number in node.shown) or "none"
        self._notes.note(
            NODE_TOPIC,
            f"node {node.number} ({node.origin.value}) below {parent}, depth {node.depth}, shown {shown}; reward "
            f"{node.grade.reward:.6g}; best is node {self._tree.best.number}",
        )


def edited(text: str, reply: str) -> str:
    """The text after all edits of a reply, in order; one that fits nowhere, or in several places, is skipped.

    Raises MalformedReply when none applies. The release judges the unchanged kernel once more then.
    """
    applied, pairs = 0, list(PAIR.finditer(reply))
    for pair in pairs:
        old, new = pair["old"].strip("\r\n"), pair["new"].strip("\r\n")
        span = _span(text, old)
        if span is not None and text[slice(*span)] != new:
            text = text[: span[0]] + new + text[span[1] :]
            applied += 1
    if not pairs:
        raise MalformedReply(Malformation.NO_EDIT, "the reply has no pair of old_str and new_str")
    if not applied:
        raise MalformedReply(
            Malformation.EDIT_NOT_FOUND, f"none of {len(pairs)} edits applies: the old text must stand there once"
        )
    return text


def _span(text: str, old: str) -> tuple[int, int] | None:
    """Where the old text stands: literally; else without blanks at ends of lines; else also without empty lines."""
    for wanted in (re.escape(old), _loose(old), _loose(_without_empty_ends(old))):
        found = [match.span() for match in re.finditer(wanted, text)] if old.strip() else []
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _loose(old: str) -> str:
    return r"[ \t]*\n".join(re.escape(line.rstrip()) for line in old.split("\n"))


def _without_empty_ends(old: str) -> str:
    lines = old.split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    return "\n".join(lines)
