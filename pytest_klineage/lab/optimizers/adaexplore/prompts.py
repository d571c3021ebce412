"""What AdaExplore says to models: contents and order of the released prompts, in our words.

The release speaks of Triton, of PyTorch modules and of an example in them. Here a prompt names the task's own language,
and its contract takes the place of module and example: the same policy must write C++ and CUDA as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.lab.optimizers.adaexplore.rules import MemoryRule
from pytest_klineage.lab.optimizers.adaexplore.tree import Grade, Node
from pytest_klineage.lab.optimizers.instructions import LANGUAGES, NATIVE
from pytest_klineage.lab.optimizers.prompts import paragraphs, prompt
from pytest_klineage.lab.optimizers.proposal import built_text, main_text
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import KernelSource

FIXED_GUIDANCE = "Look at what was reported for each attempt, and repair or improve the kernel accordingly."
"""In place of a missing review."""

FLAGS = '\n\nTo build with other flags, write a line "FLAGS: ..." with all of them before {position}.'


def system(role: str, task: Task) -> str:
    """The system prompt of a role for a task's language."""
    flags = ""
    if task.surface in NATIVE:
        flags = FLAGS.format(position="the code block" if role == "proposer" else "the first edit")
    return prompt(f"adaexplore_{role}", language=LANGUAGES[task.surface], flags=flags)


def context(task: Task) -> tuple[str, ...]:
    """The contract, and the root as a plain implementation of it: what the reference module is in the release."""
    if task.root is None or not main_text(task.root):
        return (task.instructions,)
    return (task.instructions, f"# A plain implementation\n\n{built_text(task.root)}")


def pitfalls(rules: Iterable[MemoryRule]) -> str:
    """The section that shows rules; empty without any."""
    lines = [rule.text for rule in rules]
    if not lines:
        return ""
    head = "# Common pitfalls\n\nEarlier attempts failed by these. Avoid them:"
    return "\n".join((head, *lines))


def large_step(rules: Iterable[MemoryRule], pool: Iterable[Node]) -> str:
    """What a proposer is asked."""
    kernels = [_numbered(f"Kernel {position}", node) for position, node in enumerate(pool, start=1)]
    parts = [pitfalls(rules)]
    if kernels:
        parts += [
            "# Kernels by others, with their results\n\nBe faster than all of them. You may reuse and combine what "
            f"they do, or begin with the best one.\n\n{prompt('adaexplore_legend')}",
            *kernels,
        ]
    parts.append("Write the fastest kernel that you can. The contract must be kept.")
    return paragraphs(*parts)


def review(rules: Iterable[MemoryRule], last: Node) -> str:
    """What a reviewer is asked."""
    goal = "Give concise guidance: only the one to three improvements that matter most."
    return paragraphs(pitfalls(rules), prompt("adaexplore_legend"), _numbered("The kernel", last), goal)


def small_step(rules: Iterable[MemoryRule], chain: Iterable[Node], guidance: str) -> str:
    """What a tuner is asked."""
    attempts = [_numbered(f"Attempt {position}", node) for position, node in enumerate(chain, start=1)]
    return paragraphs(
        pitfalls(rules),
        prompt("adaexplore_legend"),
        *attempts,
        f"# Guidance\n\n{guidance.strip()}",
        "Edit the last attempt. Keep the entry point under its name.",
    )


def extraction(kernel: KernelSource, log: str) -> str:
    """What is asked about a failed kernel."""
    return prompt("adaexplore_extraction", code=built_text(kernel), log=fenced(log, "text"))


def comparison(rules: Iterable[MemoryRule], new: str) -> str:
    """What is asked about a new rule."""
    items = [f"Item {position}: {rule.text}" for position, rule in enumerate(rules, start=1)]
    return "\n".join(("Rules that there are:", *items, "", f"The new rule: {new}"))


def result_line(grade: Grade) -> str:
    """A result in one line."""
    speed = f"{grade.speedup:.3g}" if grade.correct else "none"
    words = {True: "yes", False: "no"}
    return f"compiled: {words[grade.compiled]}, correct: {words[grade.correct]}, speedup: {speed}"


def _numbered(title: str, node: Node) -> str:
    code = built_text(node.kernel) if node.kernel is not None else "(the reply held no kernel)"
    return f"# {title}\n\n{code}\n\nIts result: {result_line(node.grade)}\n{node.feedback}".rstrip()
