"""Replies through a folder: a numbered prompt goes out as a file, and the answering side puts the reply beside it.

NNNN-prompt.md   written here: what is asked, and how to answer; it appears whole, under its name, or not yet
NNNN-reply.md    written by the answering side: the reply and nothing else
NNNN-usage.json  optional, beside the reply: the tokens that it took, as a `Usage`; without it they are estimated

A reply may be there before it is asked for, as ahead/DIGEST.md in the folder or in one of the three above it: by the
digest in the head of the same prompt of another run, such as one that went on as if its kernels were right. It is
copied to where the prompt asks for it. Runs that are to be independent of each other must not share such a folder.
"""

from __future__ import annotations

import time
from pathlib import Path

from pytest_klineage.errors import BadRecord, StoreError, UsageError, WaitsForReply
from pytest_klineage.lab.llm.backend import EstimatedBackend, Reply
from pytest_klineage.lab.llm.conversation import Conversation, as_markdown
from pytest_klineage.lab.llm.faults import BackendFailed, Failure
from pytest_klineage.lab.llm.prices import Prices
from pytest_klineage.records import Usage, from_json
from pytest_klineage.results.storage import write_atomically

DEADLINE_S = 24 * 3600.0
POLL_S = 0.5
SETTLE_S = 1.0
"""A reply is taken when its file has not changed for this long, so that it may be saved in place."""
REPLY_LIMIT_BYTES = 4 * 1024 * 1024
DIGEST_LINE = "digest: "
HEAD_LINES = 6
AHEAD, LEVELS_UP = "ahead", 3


class ExchangeBackend(EstimatedBackend):
    """A folder through which prompts are answered by anybody. Usage is estimated unless the answering side states it.

    A prompt is numbered after its call. When a run was interrupted and asks the same prompt under the same number
    again, the prompt file stays as it is, and a reply that has come meanwhile is taken.
    """

    name = "exchange"
    resumable = True

    def __init__(
        self,
        folder: Path,
        prices: Prices,
        *,
        model: str,
        deadline_s: float = DEADLINE_S,
        poll_s: float = POLL_S,
        settle_s: float = SETTLE_S,
        waits: bool = True,
    ) -> None:
        """With `waits` off a reply that is not there yet raises WaitsForReply at once, instead of being waited for."""
        super().__init__(model, prices)
        self.waits = waits
        self.folder, self.deadline_s, self.poll_s, self.settle_s = folder, deadline_s, poll_s, settle_s
        self._is_new = False

    def begin(self) -> None:
        """From now on a prompt that is there already is another run's. Raises UsageError when the folder has one."""
        taken = next(self.folder.glob("*-prompt.md"), None) or next(self.folder.glob("*-reply.md"), None)
        if taken is not None:
            raise UsageError(
                f"{taken} belongs to another run, whose replies must not be taken for this one's: use a folder of its "
                "own for every trajectory, or resume the trajectory that this folder belongs to"
            )
        self._is_new = True

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        """Write the prompt, and wait for the reply. Raises WaitsForReply at the deadline: the call is open still."""
        prompt, answer = self.folder / f"{call:04d}-prompt.md", self.folder / f"{call:04d}-reply.md"
        self._publish(prompt, answer, conversation, max_output_tokens)
        data = self._await(answer)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise BackendFailed(Failure.NOT_TEXT, f"{answer} is no UTF-8: {error}", billed=True) from error
        usage = self._usage(self.folder / f"{call:04d}-usage.json", conversation, text)
        return Reply(text=text, usage=usage, model=usage.model, ids={"file": answer.name})

    def _publish(self, prompt: Path, answer: Path, conversation: Conversation, max_output_tokens: int) -> None:
        try:
            if prompt.exists():
                _check_same(prompt, conversation, is_new=self._is_new)
            elif answer.exists():
                raise UsageError(f"{answer} is there before its prompt: remove it, or use another folder")
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(prompt, self._text(answer, conversation, max_output_tokens).encode())
            if not answer.exists() and (known := self._ahead(conversation.digest)) is not None:
                write_atomically(answer, known.read_bytes())
        except OSError as error:
            raise StoreError(f"the exchange folder {self.folder} cannot be used: {error.strerror or error}") from error

    def _ahead(self, digest: str) -> Path | None:
        """The file that has the reply to a prompt already, once it has settled."""
        where = [self.folder, *self.folder.absolute().parents[:LEVELS_UP]]
        path = next((path for folder in where if (path := folder / AHEAD / f"{digest}.md").is_file()), None)
        if path is None or not path.stat().st_size or time.time() - path.stat().st_mtime < self.settle_s:
            return None
        return path

    def _text(self, answer: Path, conversation: Conversation, max_output_tokens: int) -> str:
        head = (
            "---",
            f"answer: {answer.name}",
            f"{DIGEST_LINE}{conversation.digest}",
            f"model: {self.model}",
            f"max_output_tokens: {max_output_tokens}",
            "---",
            "",
            f"Write the reply to everything below into the file {answer.name} in this folder, and nothing else into "
            "it. UTF-8; it is read as the model's reply once it has stopped changing.",
            "",
            "",
        )
        return "\n".join(head) + as_markdown(conversation)

    def _await(self, answer: Path) -> bytes:
        """The reply's bytes, once the file has settled."""
        started = time.monotonic()
        seen: tuple[int, int] | None = None
        since = started
        while True:
            now = time.monotonic()
            state = _state(answer)
            if state != seen:
                seen, since = state, now
            if state is not None and state[0] > REPLY_LIMIT_BYTES:
                detail = f"{answer} has more than {REPLY_LIMIT_BYTES} bytes"
                raise BackendFailed(Failure.TOO_LONG, detail, billed=True)
            if state is not None and state[0] > 0 and now - since >= self.settle_s:
                return _read(answer)
            if not self.waits and (state is None or state[0] == 0):
                raise WaitsForReply(str(self.folder), f"{answer} is not written yet")
            if now - started > self.deadline_s:
                late = f"{answer} is not written after {self.deadline_s:g} s: resume the trajectory when it is"
                raise WaitsForReply(str(self.folder), late)
            time.sleep(self.poll_s)

    def _usage(self, stated: Path, conversation: Conversation, text: str) -> Usage:
        """What the answering side states, or an estimate. Raises BadRecord for a statement that cannot be read."""
        try:
            data = stated.read_bytes()
        except FileNotFoundError:
            return self.estimated_usage(conversation, text)
        except OSError as error:
            raise StoreError(f"{stated} cannot be read: {error.strerror or error}") from error
        usage = from_json(data, Usage)
        if min(usage.total_input_tokens, usage.output_tokens, *_counts(usage)) < 0:
            raise BadRecord(f"{stated} states a negative number of tokens")
        return self.prices.priced(usage)


def _counts(usage: Usage) -> tuple[int, ...]:
    return (usage.input_tokens, usage.cache_read_tokens, usage.cache_write_tokens, usage.cache_write_1h_tokens)


def _check_same(prompt: Path, conversation: Conversation, *, is_new: bool) -> None:
    """Raises UsageError unless the file holds this conversation, as an interrupted run left it."""
    lines = prompt.read_text(encoding="utf-8").splitlines()
    if is_new or f"{DIGEST_LINE}{conversation.digest}" not in lines[:HEAD_LINES]:
        raise UsageError(
            f"{prompt} holds a prompt of another run under the same number: use a folder of its own for every "
            "trajectory, or resume the trajectory that this folder belongs to"
        )


def _state(path: Path) -> tuple[int, int] | None:
    """Size and time of change of a file; None when it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
