"""What replies of the walk backward hold: a simplification, the word that it is done, what an audit still sees.

A reply is data. What is not exactly as it was asked for is a MalformedReply, whose message goes back to the model.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.edits import one_object, usable_text
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.lab.optimizers.proposal import proposed_source
from pytest_klineage.records import Category, KernelSource

JSON_BLOCK = re.compile(
    r"^ {0,3}(?P<mark>`{3,}|~{3,})[ \t]*json[^\n]*\n(?P<text>.*?)^ {0,3}(?P=mark)[ \t]*$", re.M | re.S
)
LOCUS_LIMIT, INTENT_LIMIT, REASON_LIMIT = 160, 1000, 600
"""Characters; the prompt asks for somewhat less. An intent that is longer would be the kernel in words."""
MOST_REMAINING = 20


class Simplification(msgspec.Struct, frozen=True, kw_only=True):
    """One optimization taken out of a kernel."""

    category: Category
    locus: str
    intent: str
    source: KernelSource
    """The simpler kernel."""


class ProposerDone(msgspec.Struct, frozen=True):
    """The proposer sees nothing that could be taken out."""

    reason: str


class RemainingOptimization(msgspec.Struct, frozen=True):
    """An optimization that is still in a kernel which was said to be naive."""

    category: str
    locus: str
    why: str

    def __str__(self) -> str:
        return f"{self.category} in {self.locus}: {self.why}"


def proposal_in(reply: Reply, kernel: KernelSource) -> Simplification | ProposerDone:
    """What a reply proposes for `kernel`. Raises MalformedReply."""
    fields, rest = _head(usable_text(reply))
    if fields.get("done") is True:
        return ProposerDone(_text(fields, "reason", REASON_LIMIT))
    category, locus = _category(fields), _text(fields, "locus", LOCUS_LIMIT)
    intent = _text(fields, "intent", INTENT_LIMIT)
    if not rest.strip():
        raise MalformedReply(Malformation.NO_EDIT, "there is no kernel behind the JSON object; send the edited kernel")
    source = kernel_in(msgspec.structs.replace(reply, text=rest), kernel, label=f"without {category.value}")
    return Simplification(category=category, locus=locus, intent=intent, source=source)


def kernel_in(reply: Reply, base: KernelSource, *, label: str) -> KernelSource:
    """The kernel that a reply makes of `base`; build flags are never a reply's to choose. Raises MalformedReply."""
    source = proposed_source(reply, base)
    source = msgspec.structs.replace(source, flags=base.flags, label=label)
    if source.digest == base.digest:
        raise MalformedReply(Malformation.EDIT_CHANGES_NOTHING, "the kernel is the one that was shown, unchanged")
    return source


def remaining_in_reply(reply: Reply) -> tuple[RemainingOptimization, ...]:
    """What an audit still sees; empty for a naive kernel. Raises MalformedReply."""
    found = one_object(usable_text(reply)).get("remaining")
    if not isinstance(found, list) or any(not isinstance(item, dict) for item in found):
        raise _unfit('send {"remaining": [...]}, a list of objects, or an empty list')
    return tuple(
        RemainingOptimization(
            _category(item).value, _text(item, "locus", LOCUS_LIMIT), _text(item, "why", REASON_LIMIT)
        )
        for item in found[:MOST_REMAINING]
    )


def _head(text: str) -> tuple[dict[str, Any], str]:
    """The JSON object of a reply, and everything else. Raises MalformedReply unless there is exactly one."""
    blocks = list(JSON_BLOCK.finditer(text))
    if len(blocks) > 1:
        raise MalformedReply(
            Malformation.SEVERAL_BLOCKS, f"the reply has {len(blocks)} ```json blocks; send one, for one step"
        )
    if blocks:
        found = blocks[0]
        return one_object(found["text"]), text[: found.start()] + text[found.end() :]
    bare = text.strip()
    if not bare.startswith("{"):
        raise MalformedReply(Malformation.NO_BLOCK, "the reply has no ```json block; begin with the JSON object")
    try:
        _, end = json.JSONDecoder().raw_decode(bare)
    except (ValueError, RecursionError) as error:
        raise MalformedReply(Malformation.NOT_JSON, f"the object at the beginning is no JSON: {error}") from error
    return one_object(bare[:end]), bare[end:]


def _category(fields: dict[str, Any]) -> Category:
    value = fields.get("category")
    if value not in [category.value for category in Category]:
        raise _unfit(f"`category` is {value!r}; it must be one of: {', '.join(Category)}")
    return Category(value)


def _text(fields: dict[str, Any], name: str, limit: int) -> str:
    """A field's text on one line. Raises MalformedReply when it is missing, too long, or holds code."""
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise _unfit(f"`{name}` is missing, or not a text")
    line = " ".join(value.split())
    if len(line) > limit:
        raise _unfit(f"`{name}` has {len(line)} characters; say it in {limit}")
    if "```" in line:
        raise _unfit(f"`{name}` holds a block of code; say it in prose")
    return line


def _unfit(what: str) -> MalformedReply:
    return MalformedReply(Malformation.NOT_AN_OBJECT, f"the JSON object is not as asked for: {what}")
