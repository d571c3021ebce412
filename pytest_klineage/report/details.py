"""The details of a point: verdict, kernel, reply, card and edit, gathered from records.

All of it is data: kernels' logs and models' replies stay text, whatever they say.
"""

from __future__ import annotations

from pathlib import Path

from pytest_klineage.records import Edit, Rejection, SkillCard, Transition, Verdict
from pytest_klineage.records.edits import EditError, state_texts
from pytest_klineage.report.advice import next_step
from pytest_klineage.report.collect import ReadLineage
from pytest_klineage.report.document import Detail, Details, RecordedText
from pytest_klineage.report.steps import Optimization, ReportedStep
from pytest_klineage.report.tables import interval_text, milliseconds, ratio, speedup_text

LONGEST = 60_000
"""Characters of one block; a report is a page, not an archive."""
Facts = tuple[tuple[str, str], ...]


def bounded(caption: str, text: str) -> RecordedText:
    """A block, cut where it is too long, and saying so."""
    if len(text) <= LONGEST:
        return RecordedText(caption, text)
    return RecordedText(f"{caption} (the first {LONGEST} of {len(text)} characters)", text[:LONGEST])


def verdict_facts(verdict: Verdict) -> Facts:
    """A verdict in a few words."""
    facts = [("status", verdict.status.value), ("reason", verdict.code.value)]
    if verdict.timing is not None and verdict.scored:
        timing = verdict.timing
        facts += [
            ("speedup", speedup_text(verdict)),
            ("kernel", f"{milliseconds(timing.candidate_ms)} ms"),
            ("reference", f"{milliseconds(timing.reference_ms)} ms, {verdict.reference.get('label', '')}".rstrip(", ")),
            ("timing", f"{timing.policy}, {timing.statistic}"),
        ]
    if verdict.machine is not None:
        facts.append(("device", verdict.machine.device))
    facts += [("language", verdict.surface), ("source", verdict.source_digest[:16])]
    return tuple((name, value) for name, value in facts if value)


def verdict_blocks(verdict: Verdict) -> tuple[RecordedText, ...]:
    """Reasons, and the compiler's and the kernel's own output."""
    reasons = "\n".join(f"{reason.code.value}: {reason.message}" for reason in verdict.reasons)
    blocks = [bounded("Reasons", f"{reasons}\nnext: {next_step(verdict)}")]
    if verdict.build is not None and verdict.build.log:
        blocks.append(bounded("The compiler's messages", verdict.build.log))
    if verdict.log:
        blocks.append(bounded("What the kernel printed", verdict.log))
    return tuple(blocks)


def of_verdict(verdict: Verdict, key: str, details: Details) -> str:
    """The detail of a judged kernel, with its text where a lineage or a trajectory holds it; gives back its key."""
    title = " ".join(part for part in (verdict.case.id, verdict.label) if part)
    kernel = details.kernels.get(verdict.source_digest, ())
    return details.add(Detail(key, title, verdict_facts(verdict), (*verdict_blocks(verdict), *kernel)))


def of_step(one: Optimization, step: ReportedStep, details: Details) -> str:
    """The detail of one step: what the method noted, the cards that it names, and the reply with the kernel."""
    facts: list[tuple[str, str]] = [("step", str(step.number)), ("charged until then", f"${step.cost_usd:.2f}")]
    if step.verdict is not None:
        facts += verdict_facts(step.verdict)
    else:
        facts += [("reason", step.code.value if step.code is not None else "no kernel in the reply")]
        facts += [("speedup", f"{ratio(step.speedup)}x")] if step.speedup is not None else []
    blocks = list(verdict_blocks(step.verdict)) if step.verdict is not None else []
    blocks += [bounded(f"Noted: {topic}", text) for topic, text in step.notes]
    blocks += [reply_block(step)] if step.reply else details.kernels.get(step.source_digest, ())
    mentioned = " ".join(text for _, text in step.notes)
    blocks += [block for name, block in details.cards.items() if name in mentioned]
    title = f"{one.method} on {one.case_id}, step {step.number}"
    return details.add(Detail(f"step:{one.path}:{step.number}", title, tuple(facts), tuple(blocks)))


def reply_block(step: ReportedStep) -> RecordedText:
    """What the model wrote."""
    return bounded("The model's reply, with the kernel or its edits", step.reply)


def state_blocks(read: ReadLineage) -> dict[str, tuple[RecordedText, ...]]:
    """The files of every state by its source's digest; where they cannot be made, a block that says why."""
    states = read.record.states
    first = {file.name: _text_of(read.path / file.path) for state in states[:1] for file in state.files}
    found: dict[str, tuple[RecordedText, ...]] = {}
    try:
        for state, files in zip(states, state_texts(read.record, first), strict=False):
            found[state.source_digest] = tuple(bounded(name, text) for name, text in files.items())
    except EditError as error:
        found |= {state.source_digest: (RecordedText("cannot be made", str(error)),) for state in states[len(found) :]}
    return found


def card_block(card: SkillCard) -> RecordedText:
    """A card's nine fields as one text."""
    conditions = "\n".join(f"  {item.kind.value}: {item.condition} ({item.reason})" for item in card.preconditions)
    risks = "\n".join(f"  {risk.text} [{risk.code.value if risk.code else 'expected'}]" for risk in card.risks)
    scope = "; ".join(
        f"{name}: {', '.join(map(str, value))}"
        for name in ("operators", "shape_classes", "dtypes", "surfaces", "platforms", "capabilities", "prior")
        if (value := getattr(card.scope, name))
    )
    evidence = "\n".join(f"  {item.lineage}, transition {item.transition[:16]}" for item in card.evidence)
    log = "\n".join(
        f"  {trial.outcome.value}{', held out' if trial.held_out else ''}: {trial.context.operator} on "
        f"{trial.context.platform}, {trial.context.surface.value}"
        + (f", {ratio(trial.speedup.estimate)}x" if trial.speedup else "")
        for trial in card.log
    )
    text = (
        f"intent: {card.intent}\nanchor: {card.anchor}\n"
        f"carrier ({card.carrier.kind.value}, {card.carrier.language}):\n{card.carrier.text}\n"
        f"preconditions:\n{conditions}\neffect: {card.effect.summary}\nevidence:\n{evidence}\nrisks:\n{risks}\n"
        f"scope: {scope or 'no restriction'}\nverification log:\n{log or '  empty'}"
    )
    return bounded(f"Card {card.name} ({card.status.value})", text)


def of_card(card: SkillCard, details: Details) -> str:
    """The detail of a card."""
    facts = (("status", card.status.value), ("category", card.category.value), ("digest", card.digest[:16]))
    return details.add(Detail(f"card:{card.name}", f"Card {card.name}", facts, (card_block(card),)))


def of_state(read: ReadLineage, index: int, details: Details) -> str:
    """The detail of one state of a lineage: its files, and the step that leads to it."""
    state = read.record.states[index]
    blocks = list(details.kernels.get(state.source_digest, ()))
    facts: Facts = verdict_facts(state.verdict) if state.verdict is not None else (("status", "not judged"),)
    if index:
        step = read.record.transitions[index - 1]
        facts = (*facts, *_transition_facts(step))
        blocks.insert(0, bounded("The forward edit that gives this state", edit_text(step.forward)))
    title = f"{read.record.name}: {state.name}"
    return details.add(Detail(f"state:{read.record.name}:{index}", title, facts, tuple(blocks)))


def of_rejection(read: ReadLineage, position: int, number: int, rejection: Rejection, details: Details) -> str:
    """The detail of a proposal that was not taken."""
    what = "re-derivation" if rejection.forward else "simplification"
    facts: Facts = (("refused", what), ("category", rejection.category.value), ("where", rejection.locus),
                    ("intent", rejection.intent), ("because", rejection.reason))  # fmt: skip
    blocks = verdict_blocks(rejection.verdict) if rejection.verdict is not None else ()
    if rejection.edit is not None:
        blocks = (*blocks, bounded("The edit", edit_text(rejection.edit)))
    key = f"rejected:{read.record.name}:{position}:{number}"
    return details.add(Detail(key, f"{read.record.name}: a refused {what}", facts, blocks))


def edit_text(edit: Edit) -> str:
    """An edit as people read it."""
    if edit.diff:
        return edit.diff
    return "\n".join(
        f"{block.file}\n<<<<<<< SEARCH\n{block.search}\n=======\n{block.replace}\n>>>>>>> REPLACE"
        for block in edit.blocks
    )


def _transition_facts(step: Transition) -> Facts:
    measured = interval_text(step.effect) if step.effect is not None else ""
    facts = (("adds", step.category.value), ("where", step.locus), ("intent", step.intent), ("effect", measured))
    return tuple((name, value) for name, value in facts if value)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}; restore it from version control"
