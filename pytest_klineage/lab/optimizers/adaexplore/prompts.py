"""What AdaExplore says to models: contents and order of the released prompts, in our words. Nothing is asked here.

The release speaks of Triton, of PyTorch modules and of an example in them. Here a prompt names the task's own language,
and its contract takes the place of module and example: the same policy must write C++ and CUDA as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.lab.optimizers.adaexplore.rules import Rule
from pytest_klineage.lab.optimizers.adaexplore.tree import Grade, Node
from pytest_klineage.lab.optimizers.instructions import LANGUAGES, NATIVE, code_language
from pytest_klineage.lab.optimizers.published import main_text
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import KernelSource

LEGEND = """How to read a result:
- compiled: whether it could be built. Where it is "no", the text behind it is the compiler's.
- correct: whether every output was right. Where it is "no", the text behind it says what went wrong.
- speedup: the time of the standard implementation over the time of this kernel. Above 1 this kernel is faster."""

FIXED_GUIDANCE = "Look at what was reported for each attempt, and repair or improve the kernel accordingly."
"""In place of a review, where there is none."""

PROPOSER = """You write kernels in {language} that replace a standard implementation and take less time.

You decide what to optimize and how: another algorithm, fused steps, another order of computation, terms that are \
folded or computed once, as long as the result stays mathematically the same and the contract below is kept.

Answer with real, complete code that builds: the whole main file in one fenced code block. No other text, no tests.\
{flags}"""

REVISER = """You review kernels in {language} and say how to make them faster.

Look at the kernel, at its result and at the contract below. Consider the order of computation as well, not only the \
details of the code. Your review is handed to somebody who edits the kernel."""

TUNER = """You improve kernels in {language} by small local edits. The contract of the kernel is below.

Correctness is checked first; then the kernel is timed over many calls, after a warm-up. Work that a first call does \
once, such as choosing a tile size by trying, belongs to the warm-up, as far as the contract allows it.

Edits are replacements of text in the last version of the kernel. Their rules:
- the old text stands in the kernel exactly so, with every blank and every indentation;
- it stands there once: take three to five lines of context into it;
- the new text differs from the old one;
- all edits are in this one answer, and are applied in the order of their numbers.

Answer in this form, with as many numbered triples as there are edits:

<reasoning_1>
why the first edit helps
</reasoning_1>
<old_str_1>
text as it is
</old_str_1>
<new_str_1>
text as it shall be
</new_str_1>{flags}"""

FLAGS = '\n\nTo build with other flags, write a line "FLAGS: ..." with all of them before {place}.'

EXTRACTOR = """You read what was reported about failed kernels in {language}, and write down the smallest \
constraint that it proves.

Rules for your answer:
- exactly one sentence;
- it begins with "You cannot";
- it names the smallest action that is forbidden;
- no remedy and no reason;
- nothing wider than what the report shows: keep its scope, such as inside a kernel, at compile time, in a constant;
- no guesses. When the report does not make clear what is forbidden, answer exactly: no guidance"""

EXTRACTION = """Code block:

{code}

Error message:

{log}

Write the one sentence, or: no guidance"""

JUDGE = """You decide whether a new rule about kernels in {language} repeats one of a list.

Be strict: two rules are the same only if their core meaning is identical. When several are, choose the most alike.

Answer with one JSON object and nothing else, with these keys:
- "is_duplicate": true or false
- "matched_index": the number of the item that it repeats, or null
- "confidence": a number from 0 to 1
- "reason": a few words"""


def system(template: str, task: Task) -> str:
    """One of the texts above for a task's language."""
    flags = ""
    if task.surface in NATIVE:
        flags = FLAGS.format(place="the code block" if template is PROPOSER else "the first edit")
    return template.format(language=LANGUAGES[task.surface], flags=flags)


def context(task: Task) -> tuple[str, ...]:
    """The contract, and the root as a plain implementation of it: what the reference module is in the release."""
    if task.root is None or not main_text(task.root):
        return (task.instructions,)
    return (task.instructions, f"# A plain implementation\n\n{_code(task.root)}")


def pitfalls(rules: Iterable[Rule]) -> str:
    """The section that shows rules; empty without any."""
    lines = [rule.text for rule in rules]
    if not lines:
        return ""
    head = "# Common pitfalls\n\nEarlier attempts failed by these. Avoid them:"
    return "\n".join((head, *lines))


def large_step(rules: Iterable[Rule], pool: Iterable[Node]) -> str:
    """What a proposer is asked."""
    kernels = [_numbered(f"Kernel {place}", node) for place, node in enumerate(pool, start=1)]
    parts = [pitfalls(rules)]
    if kernels:
        parts += [
            "# Kernels by others, with their results\n\nBe faster than all of them. You may reuse and combine what "
            f"they do, or begin with the best one.\n\n{LEGEND}",
            *kernels,
        ]
    parts.append("Write the fastest kernel that you can. The contract must be kept.")
    return _joined(parts)


def review(rules: Iterable[Rule], last: Node) -> str:
    """What a reviewer is asked."""
    goal = "Give concise guidance: only the one to three improvements that matter most."
    return _joined([pitfalls(rules), LEGEND, _numbered("The kernel", last), goal])


def small_step(rules: Iterable[Rule], chain: Iterable[Node], guidance: str) -> str:
    """What a tuner is asked."""
    attempts = [_numbered(f"Attempt {place}", node) for place, node in enumerate(chain, start=1)]
    return _joined(
        [
            pitfalls(rules),
            LEGEND,
            *attempts,
            f"# Guidance\n\n{guidance.strip()}",
            "Edit the last attempt. Keep the entry point under its name.",
        ]
    )


def extraction(kernel: KernelSource, log: str) -> str:
    """What is asked about a failed kernel."""
    return EXTRACTION.format(code=_code(kernel), log=fenced(log, "text"))


def comparison(rules: Iterable[Rule], new: str) -> str:
    """What is asked about a new rule."""
    items = [f"Item {place}: {rule.text}" for place, rule in enumerate(rules, start=1)]
    return "\n".join(("Rules that there are:", *items, "", f"The new rule: {new}"))


def result_line(grade: Grade) -> str:
    """A result in one line."""
    speed = f"{grade.speedup:.3g}" if grade.correct else "none"
    words = {True: "yes", False: "no"}
    return f"compiled: {words[grade.compiled]}, correct: {words[grade.correct]}, speedup: {speed}"


def _numbered(title: str, node: Node) -> str:
    code = _code(node.kernel) if node.kernel is not None else "(the reply held no kernel)"
    return f"# {title}\n\n{code}\n\nIts result: {result_line(node.grade)}\n{node.feedback}".rstrip()


def _code(kernel: KernelSource) -> str:
    flags = f"\n\nBuilt with: {' '.join(kernel.flags)}" if kernel.flags else ""
    return fenced(main_text(kernel), code_language(kernel.surface)) + flags


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)
