"""Cards as text: SKILL.md for loaders of skills, and the nine fields for a prompt. The same card, the same text.

Nothing here depends on the time, the machine or the order in which anything was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

import msgspec

from pytest_klineage.records import (
    CardScope,
    Carrier,
    Context,
    Effect,
    Interval,
    Precondition,
    PreconditionClass,
    Risk,
    SkillCard,
    Trial,
)
from pytest_klineage.records.card import ANY
from pytest_klineage.records.verdict import SCHEMA_VERSION

NAME_LIMIT = 64
DESCRIPTION_LIMIT = 1024
"""What loaders of agent skills accept."""
CARD_TOKENS = 1500
"""What a card may take of a prompt, its carrier with it: two to four cards are read at once."""
BYTES_PER_TOKEN = 3
"""As prompts are estimated elsewhere: code runs at about three bytes per token, English at four; errs upwards."""
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
CLASS_TITLES = {
    PreconditionClass.DATA_TYPE: "Data type",
    PreconditionClass.LAYOUT: "Layout",
    PreconditionClass.STORAGE: "Storage",
    PreconditionClass.PIPELINE: "Pipeline",
    PreconditionClass.HARDWARE: "Hardware",
}
"""In the order in which every card lists them."""


def skill_markdown(card: SkillCard) -> str:
    """SKILL.md: front matter with name and description, then the whole card."""
    lines = [
        "---",
        f"name: {card.name}",
        f"description: {_yaml(description(card))}",
        "metadata:",
        f"  card: {_yaml(card.digest)}",
        f'  schema-version: "{SCHEMA_VERSION}"',
        f"  status: {card.status.value}",
        "---",
        "",
        f"# {card.name}",
        "",
    ]
    for title, text in sections(card):
        lines += [f"## {title}", "", text, ""]
    lines += ["## Provenance", "", _provenance(card)]
    return "\n".join(lines) + "\n"


def prompt_text(card: SkillCard) -> str:
    """The nine fields as they go into a prompt, the carrier verbatim in a fence that it cannot close."""
    lines = [f"# Skill {card.name}", ""]
    for title, text in sections(card):
        lines += [f"## {title}", "", text, ""]
    return "\n".join(lines)


def card_tokens(card: SkillCard) -> int:
    """Tokens of a card in a prompt, by estimate; its verification log, which grows with use, does not count."""
    text = prompt_text(msgspec.structs.replace(card, log=()))
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def description(card: SkillCard) -> str:
    """`full_description` in at most 1024 characters."""
    text = full_description(card)
    return text if len(text) <= DESCRIPTION_LIMIT else text[: DESCRIPTION_LIMIT - 3].rstrip() + "..."


def full_description(card: SkillCard) -> str:
    """One paragraph: what it does, and when to think of it."""
    scope = [
        ("operators", card.scope.operators),
        ("languages", card.scope.surfaces),
        ("platforms", card.scope.platforms),
        ("after", tuple(step.value for step in card.scope.prior)),
    ]
    positions = "; ".join(f"{name}: {', '.join(values)}" for name, values in scope if values and ANY not in values)
    return _one_line(f"{card.intent} Use when the kernel has: {card.anchor}{f' ({positions})' if positions else ''}")


def sections(card: SkillCard) -> Iterator[tuple[str, str]]:
    """The nine fields in the paper's order, as titles and Markdown."""
    yield "Intent", f"{card.intent}\n\nCategory: {card.category.value}"
    yield "Anchor", card.anchor
    yield "Carrier", _carrier(card.carrier, card.settings)
    yield "Preconditions", _preconditions(card.preconditions)
    yield "Effect", _effect(card.effect)
    yield "Evidence", _listed(f"transition `{item.transition}` of the lineage {item.lineage}" for item in card.evidence)
    yield "Risks", _listed(map(_risk, card.risks))
    yield "Scope", _scope(card.scope)
    yield "Verification log", _listed(map(_trial, card.log), none="no trial yet")


def speedup_text(interval: Interval | None) -> str:
    """A speedup with its interval, such as "1.31x [1.28, 1.34]"; "not measured" without one."""
    if interval is None:
        return "not measured"
    return f"{interval.estimate:.3g}x [{interval.low:.3g}, {interval.high:.3g}]"


def fenced(text: str, language: str = "") -> str:
    """A fenced block around text that may hold fences itself; the text stands in it unchanged."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    end = "" if text.endswith("\n") else "\n"
    return f"{fence}{language}\n{text}{end}{fence}"


def _carrier(carrier: Carrier, settings: dict[str, str]) -> str:
    text = f"A {carrier.kind.value} to instantiate, not to run:\n\n{fenced(carrier.text, carrier.language)}"
    if not settings:
        return text
    figures = _listed(f"{name}: {value}" for name, value in sorted(settings.items()))
    return f"{text}\n\nSettings of the instance that it comes from; none of them is a condition:\n\n{figures}"


def _preconditions(preconditions: Iterable[Precondition]) -> str:
    found = list(preconditions)
    parts = []
    for kind, title in CLASS_TITLES.items():
        own = [f"{item.condition} Because: {item.reason}" for item in found if item.kind is kind]
        parts.append(f"### {title}\n\n{_listed(own)}")
    return "\n\n".join(parts)


def _effect(effect: Effect) -> str:
    lines = [effect.summary, "", f"- measured: {speedup_text(effect.speedup)}"]
    if effect.speedup is not None:
        lines.append(f"- confidence: {effect.speedup.confidence:g}")
    if effect.case or effect.device:
        lines.append(f"- on: {', '.join(part for part in (effect.case, effect.device) if part)}")
    if effect.span:
        lines.append(f"- over: {', '.join(f'`{digest}`' for digest in effect.span)}")
    return "\n".join(lines)


def _risk(risk: Risk) -> str:
    """A risk with its standing: the record in which the gate saw it, or that it is only expected."""
    seen = [f"`{risk.code.value}`"] if risk.code is not None else []
    seen += [f"transition `{risk.evidence}`"] if risk.evidence else []
    standing = f"seen by the gate: {', '.join(seen)}" if seen else "expected, not seen by the gate"
    return f"{risk.text} ({standing})"


def _scope(scope: CardScope) -> str:
    fields = (
        ("operators", scope.operators),
        ("shape classes", scope.shape_classes),
        ("data types", scope.dtypes),
        ("languages", scope.surfaces),
        ("platforms", scope.platforms),
        ("capabilities", scope.capabilities),
        ("after", tuple(step.value for step in scope.prior)),
    )
    return _listed(f"{name}: {', '.join(values) if values else 'any'}" for name, values in fields)


def context_text(context: Context) -> str:
    """A context in a few words, such as "gemm-64x64x64-fp32 (cpu cpp) after simd"."""
    shape = "x".join(map(str, context.shape.values()))
    where = "-".join(part for part in (context.operator, shape, context.dtype) if part)
    after = f" after {', '.join(step.value for step in context.prior)}" if context.prior else ""
    return f"{where} ({context.platform} {context.surface.value}){after}"


def _trial(trial: Trial) -> str:
    facts = [
        trial.outcome.value,
        f"on {context_text(trial.context)}",
        "held out" if trial.held_out else "not held out",
        f"by the rule {trial.rule.value}" if not trial.imported else "",
        f"`{trial.code.value}`" if trial.code is not None else "",
        speedup_text(trial.speedup) if trial.speedup is not None else "",
        f"source `{trial.source_digest}`" if trial.source_digest else "",
        f"by {trial.method}" if trial.method else "",
        trial.tried_at,
        "imported, not judged here" if trial.imported else "",
        trial.note,
    ]
    return "; ".join(fact for fact in facts if fact)


def _provenance(card: SkillCard) -> str:
    facts = [f"{name}: {value}" for name, value in sorted(card.provenance.items())]
    origins = [f"origin: {context_text(context)}" for context in card.origins]
    return _listed([f"card: `{card.digest}`", *origins, *facts])


def _listed(items: Iterable[str], none: str = "none recorded") -> str:
    lines = [f"- {_indented(item)}" for item in items]
    return "\n".join(lines) if lines else none


def _indented(text: str) -> str:
    """Text of several lines as one item of a list."""
    return "\n  ".join(text.split("\n"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _yaml(text: str) -> str:
    """A double-quoted YAML scalar: JSON's form, with the line ends that YAML knows beyond JSON's written as escapes."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda found: f"\\u{ord(found.group()):04x}", quoted)
