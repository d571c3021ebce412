"""Parameters that newer models refuse, rewritten where a run asks for it, each by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pytest_klineage.errors import UnknownName

SAMPLING = ("temperature", "top_p", "top_k")


def without_sampling(body: dict[str, Any]) -> str | None:
    """Newer models take no sampling parameters: leave them out."""
    found = {name: body.pop(name) for name in SAMPLING if name in body}
    return ", ".join(f"{name}={value!r:.20} left out" for name, value in found.items()) or None


def adaptive_thinking(body: dict[str, Any]) -> str | None:
    """Newer models decide themselves how long they think: a budget for it becomes "adaptive"."""
    thinking = body.get("thinking")
    if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return None
    body["thinking"] = {"type": "adaptive"}
    return f"thinking enabled({thinking.get('budget_tokens')!r:.20}) -> adaptive"


def completion_tokens(body: dict[str, Any]) -> str | None:
    """Newer models of OpenAI's take max_completion_tokens instead of max_tokens."""
    if "messages" not in body or "max_tokens" not in body or "max_completion_tokens" in body:
        return None
    body["max_completion_tokens"] = body.pop("max_tokens")
    return "max_tokens -> max_completion_tokens"


def without_empty_system(body: dict[str, Any]) -> str | None:
    """Some clients always send a system prompt, even an empty one."""
    if body.get("system") not in ("", []):
        return None
    del body["system"]
    return "empty system left out"


REWRITES: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "sampling": without_sampling,
    "thinking": adaptive_thinking,
    "completion-tokens": completion_tokens,
    "empty-system": without_empty_system,
}
"""By the name that a run asks for it by; each returns what it changed, or None."""
OPENAI_ONLY = frozenset({"completion-tokens"})


def check_rewrites(names: Iterable[str]) -> frozenset[str]:
    """The names as a set. Raises UnknownName."""
    chosen = frozenset(names)
    for name in sorted(chosen - REWRITES.keys()):
        raise UnknownName("rewrite", name, REWRITES)
    return chosen


def rewrite(body: dict[str, Any], names: frozenset[str]) -> tuple[str, ...]:
    """Change a request in place, and return what was changed."""
    changes = (REWRITES[name](body) for name in REWRITES if name in names)
    return tuple(change for change in changes if change is not None)
