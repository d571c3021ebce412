"""Replies from Anthropic's Messages API through its own SDK: streamed, retried by the SDK, with the prefix cached."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_klineage.errors import MissingDependency
from pytest_klineage.lab.llm.backend import Backend, Reply
from pytest_klineage.lab.llm.conversation import Conversation
from pytest_klineage.lab.llm.faults import BackendFailed, Failure, NoKey
from pytest_klineage.lab.llm.prices import CacheLife, Prices
from pytest_klineage.records import StopReason, Usage

if TYPE_CHECKING:
    import anthropic

KEY = "ANTHROPIC_API_KEY"
TOKEN = "ANTHROPIC_AUTH_TOKEN"
DEADLINE_S = 1800.0
SILENCE_S = 300.0
"""How long the stream may say nothing; the API sends pings in between."""
RETRIES = 4
STOP_REASONS = {
    "end_turn": StopReason.END,
    "stop_sequence": StopReason.END,
    "max_tokens": StopReason.MAX_TOKENS,
    "model_context_window_exceeded": StopReason.MAX_TOKENS,
    "refusal": StopReason.REFUSAL,
}
FAILURES_BY_TYPE = {
    "overloaded_error": Failure.OVERLOADED,
    "rate_limit_error": Failure.RATE_LIMITED,
    "authentication_error": Failure.AUTHENTICATION,
    "permission_error": Failure.AUTHENTICATION,
    "billing_error": Failure.AUTHENTICATION,
    "invalid_request_error": Failure.REJECTED,
    "not_found_error": Failure.REJECTED,
    "request_too_large": Failure.REJECTED,
    "timeout_error": Failure.TIMEOUT,
    "api_error": Failure.SERVER,
}
FAILURES_BY_STATUS = {
    401: Failure.AUTHENTICATION,
    403: Failure.AUTHENTICATION,
    429: Failure.RATE_LIMITED,
    529: Failure.OVERLOADED,
}
COUNT_MARGIN = 1.05
"""The provider calls its count of tokens an estimate."""


class AnthropicBackend(Backend):
    """A model behind the Messages API.

    The system prompt, the last block of context and the newest turn are marked for the cache, so that the next call of
    a chat reads all of it. Below a model's minimum length nothing is cached: check `cache_read_tokens`.

    Args:
        model: a name of the price table.
        prices: what tokens cost.
        api_key: ANTHROPIC_API_KEY, else ANTHROPIC_AUTH_TOKEN, where not given. Raises NoKey without one.
        base_url: a gateway; ANTHROPIC_BASE_URL, else the provider's, where not given.
        cache_life: of the cached prefix.
        cache_turns: cache the newest turn too; off for chats of a single turn.
        parameters: further fields of the request's body, such as {"temperature": 1.0}.
        max_retries: of the SDK: 408, 409, 429, 5xx, connections lost before the stream.
        deadline_s: seconds for the whole reply.
        silence_s: longest pause in the stream, in seconds.
    """

    name = "anthropic"

    def __init__(
        self,
        model: str,
        prices: Prices,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        cache_life: CacheLife = CacheLife.FIVE_MINUTES,
        cache_turns: bool = True,
        parameters: Mapping[str, Any] | None = None,
        max_retries: int = RETRIES,
        deadline_s: float = DEADLINE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.model, self.prices, self.cache_life = model, prices, cache_life
        prices.of(model)
        if not (api_key or os.environ.get(KEY) or os.environ.get(TOKEN)):
            raise NoKey(KEY)
        self.cache_turns, self.parameters = cache_turns, dict(parameters or {})
        self.deadline_s = deadline_s
        self._options = {"api_key": api_key, "base_url": base_url, "max_retries": max_retries, "timeout": silence_s}
        _sdk()

    def worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """Dollars for as many input tokens as there are bytes, at their dearest, and all of the output."""
        return self._bounded_usd(conversation.most_tokens, max_output_tokens)

    def _bounded_usd(self, input_tokens: int, max_output_tokens: int) -> float:
        return self.prices.of(self.model).worst_case_usd(input_tokens, max_output_tokens, self.cache_life)

    def counted_worst_case_usd(self, conversation: Conversation, max_output_tokens: int) -> float:
        """Dollars at most with the provider's own count of the input, which is free."""
        sdk = _sdk()
        try:
            with sdk.Anthropic(**self._options) as client:
                count = client.messages.count_tokens(**self._body(conversation))
        except sdk.APIError:
            return self.worst_case_usd(conversation, max_output_tokens)
        bound = self._bounded_usd(round(count.input_tokens * COUNT_MARGIN) + 1, max_output_tokens)
        return min(bound, self.worst_case_usd(conversation, max_output_tokens))

    def reply(self, conversation: Conversation, *, max_output_tokens: int, call: int) -> Reply:
        """Ask the model. The SDK retries what is worth it before the stream begins, and waits as the server asks."""
        body = {**self._body(conversation), "max_tokens": max_output_tokens, "extra_body": self.parameters or None}
        stop_at = time.monotonic() + self.deadline_s
        started = False
        try:
            with _sdk().Anthropic(**self._options) as client, client.messages.stream(**body) as stream:
                for _ in stream:
                    started = True
                    if time.monotonic() > stop_at:
                        detail = f"the reply was not complete after {self.deadline_s:g} s"
                        raise BackendFailed(Failure.TIMEOUT, detail, billed=True)
                return self._reply(stream.get_final_message(), stream.response.headers.get("request-id") or "")
        except BackendFailed:
            raise
        # A stream comes from outside of this process: whatever the SDK makes of a malformed one is a failed call.
        except Exception as error:
            raise _failed(error, started=started) from error

    def _body(self, conversation: Conversation) -> dict[str, Any]:
        prefix = conversation.prefix
        blocks = [{"type": "text", "text": text} for text in (prefix.system, *prefix.context) if text.strip()]
        messages: list[dict[str, Any]] = [
            {"role": turn.role.value, "content": [{"type": "text", "text": turn.text}]} for turn in conversation.turns
        ]
        marked: list[dict[str, Any]] = [*blocks[:1], *blocks[1:][-1:]]
        if self.cache_turns:
            marked.append(messages[-1]["content"][-1])
        if self.cache_life is not CacheLife.NONE:
            for block in marked:
                block["cache_control"] = {"type": "ephemeral", "ttl": self.cache_life.value}
        return {"model": self.model, "messages": messages, **({"system": blocks} if blocks else {})}

    def _reply(self, message: anthropic.types.Message, request_id: str) -> Reply:
        if message.stop_reason is None:
            raise BackendFailed(Failure.BROKEN_STREAM, "the stream ended before the reply did", billed=True)
        return Reply(
            text="".join(block.text for block in message.content if block.type == "text"),
            usage=self.prices.priced(_usage(message), self.model),
            stop_reason=STOP_REASONS.get(message.stop_reason, StopReason.OTHER),
            model=message.model,
            ids={"message": message.id, "request": request_id, "stop_reason": message.stop_reason},
        )


def _usage(message: anthropic.types.Message) -> Usage:
    used = message.usage
    written = used.cache_creation_input_tokens or 0
    hour = used.cache_creation.ephemeral_1h_input_tokens if used.cache_creation else 0
    return Usage(
        model=message.model,
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        cache_read_tokens=used.cache_read_input_tokens or 0,
        cache_write_tokens=max(0, written - hour),
        cache_write_1h_tokens=hour,
    )


def _failed(error: Exception, *, started: bool) -> BackendFailed:
    """The named failure behind an exception of the SDK or of its HTTP client."""
    sdk = _sdk()
    detail = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, sdk.APIStatusError):
        inner = error.body.get("error") if isinstance(error.body, dict) else None
        kind = inner.get("type") if isinstance(inner, dict) else None
        return BackendFailed(failure_of(kind, error.status_code), detail, billed=started)
    if isinstance(error, sdk.APIConnectionError):
        unsent = _is_one_of(error.__cause__, "ConnectError", "ConnectTimeout")
        late = isinstance(error, sdk.APITimeoutError)
        return BackendFailed(Failure.TIMEOUT if late else Failure.CONNECTION, detail, billed=not unsent)
    if _is_one_of(error, "TimeoutException"):
        return BackendFailed(Failure.TIMEOUT, f"the stream fell silent: {detail}", billed=True)
    return BackendFailed(Failure.BROKEN_STREAM, detail, billed=True)


def _is_one_of(error: BaseException | None, *names: str) -> bool:
    """Whether an exception's class, or a base of it, has one of these names.

    By name, because the SDK has changed its HTTP client once (httpx, httpx2) without a change of its own errors.
    """
    return any(base.__name__ in names for base in type(error).__mro__)


def failure_of(kind: Any, status: int) -> Failure:
    """The failure behind a provider's word for an error, and the HTTP status."""
    # OpenAI's protocol has "invalid_request_error" for most errors, so that its status says more.
    if kind in FAILURES_BY_TYPE and kind != "invalid_request_error":
        return FAILURES_BY_TYPE[kind]
    return FAILURES_BY_STATUS.get(status) or (Failure.SERVER if status >= 500 else Failure.REJECTED)


def _sdk() -> Any:
    try:
        import anthropic
    except ImportError as error:
        raise MissingDependency("the package anthropic", "pip install 'pytest-klineage[llm]'") from error
    return anthropic
