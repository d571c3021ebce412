"""What a model is asked when a group is lifted: the same group, the same words. Figures come from the records alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pytest_klineage.lab.induction.derive import unnamed
from pytest_klineage.lab.induction.lift_checks import CardFault
from pytest_klineage.lab.induction.lift_groups import Group, Site, not_worth_it
from pytest_klineage.lab.induction.prompts import filled, one_line
from pytest_klineage.lab.library.lineages import edit_between
from pytest_klineage.lab.library.rendering import BYTES_PER_TOKEN, CARD_TOKENS, fenced, speedup_text
from pytest_klineage.records import Rejection, Transition

KERNEL_LIMIT = 40_000
"""Characters of a kernel that a prompt shows; of a longer one it shows the changed part alone."""
BUDGET = {"TOKENS": f"{CARD_TOKENS:,}", "BYTES": f"{CARD_TOKENS * BYTES_PER_TOKEN:,}"}
"""What a card may take of a prompt, as the words of the prompts say it."""
INTENT_LIMIT = 2000
"""Characters of an author's description of a step."""
MEASURED = "- measured, time before over time after: "
"""What a line with a figure begins with."""


def system_prompt(on_gpu: bool = False) -> str:
    """Who the model is, what a card is, and how it answers."""
    advice = filled("lift-advice-gpu", **BUDGET) if on_gpu else filled("lift-advice-cpu")
    return filled("lift-system", ADVICE=advice.rstrip("\n"))


def request_text(group: Group) -> str:
    """The transitions of a group, as the model gets them."""
    count, category = len(group.sites), group.category.value
    head = f"Lift {'this transition' if count == 1 else f'these {count} transitions'} of the category `{category}`"
    parts = [f"{head} into one card."]
    parts += [_site_text(site, number) for number, site in enumerate(group.sites, start=1)]
    parts.append(_refused_text(group))
    parts.append("Answer with the JSON object of the card and nothing else.")
    return "\n\n".join(parts) + "\n"


def no_longer_holds(then: Group, now: Group) -> str:
    """Why a card of `then` is no card of the same steps `now`; empty where it is, but for its figures.

    A step does not pay any more, or leads to another kernel: what a model is asked differs in more than figures.
    """
    if lost := [f"{site.position}: {why}" for site in now.sites if (why := not_worth_it(site))]:
        return "; ".join(lost)
    was, asked = (_without_figures(request_text(group)) for group in (then, now))
    if was == asked:
        return ""
    pairs = zip(was, asked, strict=False)
    differing = next((pair for pair in pairs if pair[0] != pair[1]), ("", f"{len(asked) - len(was)} more lines"))
    return f"what is asked of its steps is another: {differing[1]!r} instead of {differing[0]!r}"


def repair_text(findings: Iterable[CardFault]) -> str:
    """What was wrong with the last reply, and what to send now."""
    listed = "\n".join(f"- {finding.text}" for finding in findings)
    return (
        f"There is no card yet. What is wrong with your last reply:\n\n{listed}\n\n"
        "Send the whole JSON object again, corrected, and nothing else. Keep what was not criticised.\n"
    )


def _without_figures(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(MEASURED)]


def _site_text(site: Site, number: int) -> str:
    lineage = site.lineage
    sizes = ", ".join(f"{axis} = {size}" for axis, size in lineage.case.shape.items())
    before = ", ".join(category.value for category in site.done) or "none: the kernel before it is naive"
    facts = [
        f"# {'Transition' if site.first is None else 'Span'} {number}: {site.position} of {len(lineage.transitions)}",
        "",
        f"- operator: {lineage.operator}, {lineage.case.dtype}, {sizes}",
        f"- platform and language: {lineage.platform}, {lineage.surface.value}",
        *(_step_lines(site) if site.on_gpu else _locus_lines(site.transition)),
        f"- steps made before it: {before}",
        f"{MEASURED}{speedup_text(site.effect)}",
    ]
    if site.on_gpu:
        site = msgspec.structs.replace(site, before=unnamed(site.before), after=unnamed(site.after))
    return "\n".join(facts) + f"\n\n{_code_text(site)}"


def _locus_lines(step: Transition) -> Iterator[str]:
    yield f"- locus: {one_line(step.locus)}"
    yield f"- intent, as recorded: {one_line(step.intent)}"


def _step_lines(site: Site) -> Iterator[str]:
    """What the author of each step says about it."""
    for step in site.steps:
        yield f"- step: {step.category.value} at {one_line(step.locus)}"
        yield f"- intent, as recorded: {one_line(step.intent, INTENT_LIMIT)}"
        yield from (f"- needs, says its author: {one_line(text)}" for text in step.preconditions)
        yield from (f"- goes wrong, says its author: {one_line(text)}" for text in step.risks)


def _code_text(site: Site) -> str:
    diff = edit_between(site.before, site.after).diff
    change = f"## The step as a diff\n\n{fenced(diff, 'diff')}"
    main = site.before.main
    if main is None or len(main.text) > KERNEL_LIMIT:
        return change
    return f"## The kernel before the step\n\n{fenced(main.text, site.lineage.surface.value)}\n\n{change}"


def _refused_text(group: Group) -> str:
    refused = [_rejection_text(number, each) for number, (_, each) in enumerate(group.rejections, start=1)]
    if not refused:
        return "# Refused at these places\n\nNothing was refused here: write `null` for the `rejection` of every risk."
    return "# Refused at these places\n\n" + "\n".join(refused)


def _rejection_text(number: int, rejection: Rejection) -> str:
    kind = "a re-derivation of the step" if rejection.forward else "a simplification of the later kernel"
    code = f"`{rejection.code.value}`" if rejection.code is not None else "not judged"
    return (
        f"{number}. {kind}, {rejection.category.value} at {one_line(rejection.locus)}: {one_line(rejection.intent)} "
        f"Refused ({code}): {one_line(rejection.reason)}"
    )
