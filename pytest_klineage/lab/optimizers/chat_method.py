"""What methods that keep one chat have in common: the kernel that edits apply to, the next turn, the call's number."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.lab.llm.backend import Reply
from pytest_klineage.lab.llm.faults import Malformation, MalformedReply
from pytest_klineage.lab.llm.session import Chat, Session
from pytest_klineage.lab.optimizers.instructions import code_language
from pytest_klineage.lab.optimizers.proposal import empty_source, header_lines, proposed_source
from pytest_klineage.lab.optimizers.recording import call_number
from pytest_klineage.lab.optimizers.task import Observation, Proposal, Task
from pytest_klineage.records import KernelSource

BASES = ("best", "last", "root")
DRIFTED = (Malformation.EDIT_NOT_FOUND, Malformation.EDIT_AMBIGUOUS, Malformation.BROKEN_EDIT)
"""What a reply shows whose author no longer knows the text that its edits are for."""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A reply, read."""

    proposal: Proposal
    drifted: KernelSource | None = None
    """The kernel that the reply's edits did not fit; it is shown again."""


class Kernels:
    """The kernels that a reply may refer to."""

    def __init__(self, task: Task, *, always_last: bool = False) -> None:
        self._always_last = always_last
        self.root = task.root if task.root is not None else empty_source(task.surface)
        self.last, self.best = self.root, self.root
        self.last_step, self.best_step = 0, 0
        self._scored = task.submitted is not None and task.submitted.speedup is not None
        self._last_is_good = True

    def saw(self, seen: Observation) -> None:
        """Take note of what came of a proposal."""
        source = seen.proposal.source
        if source is None:
            return
        self.last, self.last_step = source, seen.step
        self._last_is_good = seen.speedup is not None
        if seen.is_best:
            self.best, self.best_step, self._scored = source, seen.step, True

    @property
    def default(self) -> str:
        """What edits apply to when a reply does not say: the last kernel while it needs repair, else the best."""
        return "last" if self._always_last or not (self._last_is_good and self._scored) else "best"

    def named(self, name: str) -> KernelSource:
        """The kernel that a line BASE means; the default one for any other word."""
        chosen = name if name in BASES else self.default
        return {"best": self.best, "last": self.last, "root": self.root}[chosen]

    def default_text(self) -> str:
        """The default in words, such as "the kernel of step 3"."""
        return _step_text(self.best_step if self.default == "best" else self.last_step)


def _step_text(step: int) -> str:
    return f"the kernel of step {step}" if step else "the kernel that you were given"


def read_reply(reply: Reply, kernels: Kernels, *, call: int, label: str, note: str) -> Draft:
    """The proposal in a reply; a malformed one says why there is none."""
    base = kernels.named(header_lines(reply.text).get("BASE", "").strip("`'\". ").lower())
    try:
        source = proposed_source(reply, base)
    except MalformedReply as error:
        proposal = Proposal(source=None, call=call, parent=base.digest, note=note, malformed=str(error))
        return Draft(proposal=proposal, drifted=base if error.kind in DRIFTED else None)
    source = msgspec.structs.replace(source, label=label)
    return Draft(proposal=Proposal(source=source, call=call, parent=base.digest, note=note))


def source_text(source: KernelSource) -> str:
    """A kernel for a prompt: every file in a fence of its own, and its flags where it has some."""
    return "\n\n".join(_files(source))


def _files(source: KernelSource) -> Iterator[str]:
    for file in source.files:
        if len(source.files) > 1:
            yield f"File {file.name}:"
        yield fenced(file.text, code_language(source.surface))
    if source.flags:
        yield f"FLAGS: {' '.join(source.flags)}"


def shown_again(source: KernelSource | None) -> str:
    """The text that edits did not fit, for the next turn; empty when they did."""
    if source is None:
        return ""
    return f"This is the text that your edits did not fit:\n\n{source_text(source)}"


class Asking:
    """A chat with a count of its replies, so that each proposal can name its call."""

    def __init__(self, session: Session, chat: Chat) -> None:
        self._session, self._chat = session, chat
        self._replies = 0

    def ask(self, text: str) -> tuple[Reply, int]:
        """The reply and the number of its call. Raises what `Chat.ask` raises."""
        reply = self._chat.ask(text)
        self._replies += 1
        return reply, call_number(self._session, self._chat, self._replies)
