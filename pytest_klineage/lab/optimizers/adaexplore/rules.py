"""AdaExplore's memory of failures: rules of one sentence with a count, how they merge, and their file.

Pure but for reading and writing that file.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pytest_klineage.errors import StoreError, UsageError
from pytest_klineage.lab.library.lineages import RIGHT
from pytest_klineage.records import Code, Status

SEPARATOR = "||"
COUNT = re.compile(r"\d+(\.\d+)?")
NO_RULE = "no guidance"
"""What a model answers when a log teaches nothing."""
CERTAIN = 0.5
"""Confidence above which two rules are the same."""
RULE_CHARACTERS = 600
"""A rule is one sentence; a model may write more."""
UNSURE_CONFIDENCE = 0.7
"""Confidence of a judgement that is no JSON and yet says "true" and "duplicate"."""
NUMERICAL = (Code.MISMATCH, Code.NON_FINITE, Code.UNWRITTEN)
"""Failures that only a comparison of values shows: they teach no rule."""
LEARNT_FROM_NOTHING = (*RIGHT, Status.SKIPPED)


class MemoryRule(msgspec.Struct, frozen=True):
    """What cannot be done, in one sentence, and how often it was met."""

    text: str
    count: float = 1.0


class RuleComparison(msgspec.Struct, frozen=True):
    """A judge's answer about a new rule: which of the old ones it repeats."""

    duplicate: bool = False
    index: int | None = None
    """From 1."""
    confidence: float = 0.0


def teaches(code: Code) -> bool:
    """Whether a failure teaches a rule: it was judged, is not right, and was not only a matter of values."""
    return code.status not in LEARNT_FROM_NOTHING and code not in NUMERICAL


def extracted_rule(text: str) -> str | None:
    """The rule in a model's reply: its last line; None when it says that there is nothing to learn."""
    if NO_RULE in text.lower() or not text.strip():
        return None
    last = text.strip().splitlines()[-1].replace(SEPARATOR, " ")
    return " ".join(last.split())[:RULE_CHARACTERS].rstrip() or None


def read_comparison(text: str) -> RuleComparison:
    """A judge's reply, read as leniently as the release does; a reply that cannot be read finds no duplicate."""
    braces = re.search(r"\{[^{}]*\}", text)
    if braces is None:
        number = re.search(r"\d+", text)
        if "true" in text.lower() and "duplicate" in text.lower() and number:
            return RuleComparison(True, int(number[0]), UNSURE_CONFIDENCE)
        return RuleComparison()
    try:
        found = msgspec.json.decode(braces[0])
        index = found.get("matched_index")
        return RuleComparison(
            duplicate=found.get("is_duplicate") is True,
            index=None if index is None else int(index),
            confidence=float(found.get("confidence", 0.0)),
        )
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError):
        return RuleComparison()


def merged(rules: tuple[MemoryRule, ...], text: str, comparison: RuleComparison) -> tuple[MemoryRule, ...]:
    """The rules with a new one: an old one counted once more, with its old text, or the new one at the end."""
    index = comparison.index
    known = comparison.duplicate and comparison.confidence > CERTAIN and index is not None and 1 <= index <= len(rules)
    if not known or index is None:
        return (*rules, MemoryRule(text))
    old = rules[index - 1]
    return (*rules[: index - 1], MemoryRule(old.text, old.count + 1), *rules[index:])


def over_threshold(rules: Iterable[MemoryRule], threshold: float) -> tuple[MemoryRule, ...]:
    """The rules that a model is shown, in order."""
    return tuple(rule for rule in rules if rule.count >= threshold)


def written(rules: Iterable[MemoryRule]) -> str:
    """Rules as the text of their file: a line each, the rule and its count."""
    return "".join(f"{rule.text}{SEPARATOR}{rule.count:.12g}\n" for rule in rules)


def parsed(text: str, name: str = "rules") -> tuple[MemoryRule, ...]:
    """Rules from the text of a file. Raises UsageError with the line that is not a rule."""
    rules = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        rule, separator, count = line.rpartition(SEPARATOR)
        if not separator or not rule.strip() or not COUNT.fullmatch(count.strip()):
            raise UsageError(f"{name}, line {number}: a rule is written TEXT{SEPARATOR}COUNT, as in You cannot ...||3")
        rules.append(MemoryRule(rule.strip(), float(count)))
    return tuple(rules)


def load(path: Path, *, may_be_new: bool = False) -> tuple[MemoryRule, ...]:
    """Rules of a file; of one that `may_be_new` and is not there, none. Raises UsageError, or StoreError where it
    cannot be read.
    """
    try:
        return parsed(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        if may_be_new:
            return ()
        raise UsageError(f"there is no rule file {path}: name one that earlier runs have written") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"the rule file {path} cannot be read: {error}") from error


def save(path: Path, rules: Iterable[MemoryRule]) -> None:
    """Replace a rule file as a whole; others that save at the same time wait. Raises StoreError."""
    whole = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            whole.write_text(written(rules), encoding="utf-8")
            os.replace(whole, path)
    except OSError as error:
        raise StoreError(f"the rule file {path} cannot be written: {error}") from error
