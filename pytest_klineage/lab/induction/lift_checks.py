"""What is wrong with a lifted card: the linter's findings, and what a model may get wrong about its own transitions.

Nothing is corrected here: a finding is shown to the model, or is the reason why there is no card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from pytest_klineage.errors import UnknownName
from pytest_klineage.lab.induction.lift_groups import Group
from pytest_klineage.lab.induction.lift_hypothesis import Hypothesis
from pytest_klineage.lab.library.lint import BY_MACHINE, LintRule, lint_card
from pytest_klineage.lab.library.normalise import canonical_capability, traces_in
from pytest_klineage.records import KernelSource, SkillCard

CARRIER_CHARACTERS, CARRIER_LINES = 6000, 120
KERNEL_SHARE = 0.6
"""Share of a kernel's lines that a carrier may hold, where the kernel is long enough to tell."""
KERNEL_LINES = 40
QUOTED = 24
"""Characters from which on a line that a carrier shares with a kernel of others is a quotation."""
TEXT_LIMIT = 600
"""Characters of an anchor, a condition, a reason, an effect or a risk."""
SETTINGS_LIMIT = 16
LEAST_SIZE = 16
"""Sizes of the case below this are no sign of an instance: there are 4 bytes in a float, whatever the shape."""
LANGUAGES = ("cpp", "cuda", "python", "diff", "text")
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.]*\w)(?!\s*-?\s*(?:byte|bit|B\b))")
"""A number of its own; not one of bytes or bits, which are properties of types and machines."""
PERSISTING = frozenset({LintRule.RISK_MISSING})
"""Findings that a model is asked about, and that are no reason to have no card."""


class CardFault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, as the model is shown it."""

    text: str
    fatal: bool = True
    """Whether a card that still has it after the repairs is given up."""


def findings_about(group: Group, hypothesis: Hypothesis, card: SkillCard) -> list[CardFault]:
    """Everything that is wrong with the card of this hypothesis, fatal or not; empty for a good one."""
    fatal = [
        *_linted(group, card),
        *_references(group, hypothesis),
        *_inner_steps(group, card),
        *_lengths(card),
        *_carrier(group, card),
        *_instances(group, card),
        *_characters(card),
    ]
    found = [CardFault(text=text) for text in fatal]
    if not card.risks:
        found.append(
            CardFault(text="risks is empty: say what goes wrong when a precondition does not hold", fatal=False)
        )
    if named := sorted(traces_in(card.carrier) & BY_MACHINE):
        text = (
            f"the carrier uses intrinsics of {', '.join(named)}, so that only machines with them would ever get the "
            "card: write vectors of any width (a type vec of W lanes; load, store, broadcast, fma)"
        )
        found.append(CardFault(text=text, fatal=False))
    return found


def _linted(group: Group, card: SkillCard) -> Iterator[str]:
    lineages = {site.lineage.name: site.lineage for site in group.sites}
    for finding in lint_card(card, lineages):
        if finding.rule not in PERSISTING and not finding.warning:
            yield f"{finding.rule.value}: {finding.message}"


def _references(group: Group, hypothesis: Hypothesis) -> Iterator[str]:
    count = len(group.rejections)
    for position, risk in enumerate(hypothesis.risks):
        if risk.rejection is not None and not 1 <= risk.rejection <= count:
            valid = f"they are numbered 1 to {count}" if count else "nothing was refused here; write null"
            yield f"risks[{position}] cites the refused proposal {risk.rejection}; {valid}"
    done = set.intersection(*(set(site.done) for site in group.sites))
    for category in hypothesis.prior:
        if category not in done:
            known = ", ".join(sorted(done)) or "none; write []"
            yield f"prior names {category.value}, which was not made before every transition; those are: {known}"
    for name in hypothesis.capabilities:
        try:
            canonical_capability(name)
        except UnknownName as error:
            yield f"capabilities: {error}"


def _inner_steps(group: Group, card: SkillCard) -> Iterator[str]:
    """Steps of a span that show no effect alone: each is a condition of the card."""
    conditions = " ".join(item.condition for item in card.preconditions)
    for site in group.sites:
        for step in site.steps[:-1]:
            if step.category.value not in conditions:
                yield f"no precondition names the earlier step {step.category.value}, without which the span is none"


def _lengths(card: SkillCard) -> Iterator[str]:
    for name, text in _prose(card):
        if len(text) > TEXT_LIMIT:
            yield f"{name} has {len(text)} characters; at most {TEXT_LIMIT}"
    if len(card.settings) > SETTINGS_LIMIT:
        yield f"settings has {len(card.settings)} entries; at most {SETTINGS_LIMIT}"


def _carrier(group: Group, card: SkillCard) -> Iterator[str]:
    text, language = card.carrier.text, card.carrier.language
    if language not in LANGUAGES:
        yield f"carrier.language is {language!r}; one of {', '.join(LANGUAGES)}"
    lines = text.count("\n") + 1
    if len(text) > CARRIER_CHARACTERS or lines > CARRIER_LINES:
        yield (
            f"the carrier has {len(text)} characters in {lines} lines; at most {CARRIER_CHARACTERS} and "
            f"{CARRIER_LINES}: keep the part that the step is about"
        )
    if any(_holds(text, site.after) for site in group.sites):
        yield "the carrier holds most of a kernel: keep the part that the step is about, and sketch the rest"
    for line in sorted({line for site in group.sites if site.lineage.source for line in _quoted(text, site.after)}):
        yield f"the carrier quotes {line!r} from a kernel of others: say it with a line and names of your own"


def _holds(text: str, kernel: KernelSource) -> bool:
    own = {line for file in kernel.files for line in _code_lines(file.text)}
    return len(own) >= KERNEL_LINES and len(own & set(_code_lines(text))) > KERNEL_SHARE * len(own)


def _quoted(text: str, kernel: KernelSource) -> set[str]:
    own = {line for file in kernel.files for line in _code_lines(file.text) if len(line) >= QUOTED}
    return own & set(_code_lines(text))


def _code_lines(text: str) -> Iterator[str]:
    """Lines that say something, without their indentation and the marks of a diff."""
    for line in text.split("\n"):
        bare = line.lstrip("+ \t").rstrip()
        if len(bare) > 3:
            yield bare


def _instances(group: Group, card: SkillCard) -> Iterator[str]:
    """Figures of the instance in what must hold wherever the card is used."""
    figures = {int(number) for value in card.settings.values() for number in re.findall(r"\d+", value)}
    sizes = {size for site in group.sites for size in site.lineage.case.shape.values() if size >= LEAST_SIZE}
    for position, item in enumerate(card.preconditions):
        found = sorted({int(number) for number in NUMBER.findall(item.condition)} & ({*figures, *sizes} - {0, 1}))
        if found:
            yield (
                f"preconditions[{position}].condition names {', '.join(map(str, found))}, which belongs to this "
                f"instance: "
                "say the condition by what the number stands for (the tile's width, the number of lanes), and keep the "
                "number in settings"
            )


def _characters(card: SkillCard) -> Iterator[str]:
    texts = [*_prose(card), ("intent", card.intent), ("carrier.text", card.carrier.text)]
    texts += [(f"settings.{name}", f"{name}: {value}") for name, value in card.settings.items()]
    for name, text in texts:
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
            yield f"{name} has control characters; write plain text"


def _prose(card: SkillCard) -> Iterable[tuple[str, str]]:
    yield "anchor", card.anchor
    yield "effect", card.effect.summary
    for position, item in enumerate(card.preconditions):
        yield f"preconditions[{position}].condition", item.condition
        yield f"preconditions[{position}].reason", item.reason
    for position, risk in enumerate(card.risks):
        yield f"risks[{position}].text", risk.text
