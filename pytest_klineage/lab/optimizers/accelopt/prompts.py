"""What AccelOpt says to models: contents and order of the released prompts, in our words. Nothing is asked here.

The release states facts about Triton in every system prompt; here they are stated where the task is in Triton, and for
other languages the contract stands alone, because facts about them would be ours and not the policy's.
"""

from __future__ import annotations

from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.lab.optimizers.accelopt.beam import Candidate
from pytest_klineage.lab.optimizers.accelopt.experience import NOTHING_FOUND, Pair
from pytest_klineage.lab.optimizers.instructions import LANGUAGES, NATIVE, code_language
from pytest_klineage.lab.optimizers.published import main_text
from pytest_klineage.lab.optimizers.task import Task
from pytest_klineage.records import KernelSource, Surface

TRITON_FACTS = """Facts about Triton:
- tl.dot multiplies blocks; both operands have one type, and the accumulator is a wider one that you choose.
- A symbol that triton.autotune sets is neither defined again in the function that launches, nor passed at the launch: \
with configs that set BLOCK, write kernel[grid](x, n), not kernel[grid](x, n, BLOCK=64).
- A block cannot be sliced by indices: select parts with tl.where and a mask, as in tl.where(rows[:, None] < m, acc, 0).
- Both bounds of tl.arange are constants, and its length is a power of two.
- Shared memory is not managed by hand: the compiler places it."""

TERMS = """Terms of a profile:
- latency: the time that the kernel takes on the device, in milliseconds."""

PLANNER = """You are an expert in making kernels in {language} fast. You write plans; somebody else carries them out."""

EXECUTOR = """You are an expert in writing fast kernels in {language}. You carry out plans."""

FIXER = """You are an expert in kernels in {language}. You repair them by what was reported about them."""

SUMMARIZER = """You help people who write kernels in {language} to learn from each other's changes.

You are shown a slow kernel and a fast one that compute the same, and how much faster the second one is. Find what \
makes the difference. If the two do not differ, answer: {nothing_found}

Otherwise describe one step that turns the slow kernel into the fast one, generally enough to help with other kernels, \
with short pieces of code. Answer in this form:

**A short title**

What is done, why it helps, and where else it would.

Original code:
```
the piece that matters of the slow kernel
```

Optimized code:
```
what it becomes
```"""

PLAN = """Think of one optimization of this kernel, to be made in one step.

1. Begin with the profile: what does it say about where time goes?
2. Relate that to the code.
3. Consider the order of loops, tiles, splitting and merging loops, how long values live, reuse, reordering, taking \
work out of loops, fusing steps.
4. A compiler stands between the code and what is executed; the two need not agree.
5. Use no lower precision than the contract asks for; the kernel may use a higher one than it needs.
6. Prefer a change of structure to a change of parameters. Where parameters must be tuned, say how they shall be found.

# The kernel

{kernel}

# Its profile

{profile}

Answer with the plan alone."""

CARRY_OUT = """Somebody has studied the kernel below and made a plan. Make the plan concrete, and carry it out: change \
the entry point and all that it calls together, where that is needed. Use no lower precision than the contract \
asks for, even if the plan says so.

# The kernel

{kernel}

# The plan

{plan}

Answer with the whole main file, all functions in it, in one fenced code block.{flags}"""

FIX = """This kernel failed.

# The kernel

{kernel}

# What was reported

{log}

Answer with the repaired kernel, the whole main file, in one fenced code block.{flags}"""

COMPARE = """# The slow kernel

{slow}

# The fast kernel

{fast}

# Speedup

{speedup}"""

FLAGS = ' To build with other flags, write a line "FLAGS: ..." with all of them before the block.'


def system(template: str, task: Task) -> str:
    """One of the roles for a task's language, with the facts that the release gives that role."""
    parts = [template.format(language=LANGUAGES[task.surface], nothing_found=NOTHING_FOUND)]
    if task.surface is Surface.TRITON and template is not SUMMARIZER:
        parts.append(TRITON_FACTS)
    if template is PLANNER:
        parts.append(TERMS)
    return "\n\n".join(parts)


def plan(candidate: Candidate) -> str:
    """What a planner is asked; the same for every plan of a candidate."""
    return PLAN.format(kernel=_code(candidate.kernel), profile=candidate.profile)


def carry_out(kernel: KernelSource, text: str) -> str:
    """What an executor is asked; the same for every sample of a plan."""
    return CARRY_OUT.format(kernel=_code(kernel), plan=text.strip(), flags=_flags(kernel))


def fix(kernel: KernelSource, log: str) -> str:
    """What a fixer is asked."""
    return FIX.format(kernel=_code(kernel), log=log, flags=_flags(kernel))


def compare(pair: Pair) -> str:
    """What a summarizer is asked. The speedup is that of the fast kernel; the release leaves it out by mistake."""
    speedup = f"{max(pair.speedup, 1 / pair.speedup):.3g}"
    return COMPARE.format(slow=_code(pair.slow), fast=_code(pair.fast), speedup=speedup)


def _code(kernel: KernelSource) -> str:
    built = f"\n\nBuilt with: {' '.join(kernel.flags)}" if kernel.flags else ""
    return fenced(main_text(kernel), code_language(kernel.surface)) + built


def _flags(kernel: KernelSource) -> str:
    return FLAGS if kernel.surface in NATIVE else ""
