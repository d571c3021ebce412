"""What can be seen of a simplification without building it: tricks, changes that are none, leftovers. By text alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pytest_klineage.lab.induction.replies import RemainingOptimization
from pytest_klineage.records import Category, KernelSource, Surface

C_LIKE = (Surface.CPP, Surface.CUDA)
COMMENTS = {
    True: re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.S),
    False: re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|#[^\n]*"""),
}
"""Comments, and strings, which may look like them: C and C++, then Python."""
TRICKS = {
    "volatile": r"\bvolatile\b",
    "a sleep": r"\b(?:u|nano)?sleep(?:_for|_until)?\s*\(",
    "a barrier against the optimizer": r"\b(?:asm|__asm__)\b",
    "a switch against the optimizer": r"\boptnone\b|\bnoinline\b|optimize\s*\(|#pragma GCC optimize",
    "a wait": r"\b(?:_mm_pause|sched_yield|yield)\s*\(",
    "a clock": r"\b(?:clock_gettime|rdtscp?|__rdtsc|steady_clock|high_resolution_clock)\b",
}
"""What makes code slow without making it simpler, by a pattern that a proposal may not use more often than before."""
REMAINING_PATTERNS = (
    (Category.SIMD, r"#include\s*<(?:immintrin|x86intrin|arm_neon)\.h>", "an include of intrinsics"),
    (Category.SIMD, r"\b_mm\d*_\w+|\b__m(?:128|256|512)\w*\b|\bvector_size\b", "vector intrinsics or types"),
    (Category.SIMD, r"__builtin_cpu_supports|\btarget\s*\(\s*\"", "a choice of instruction set"),
    (Category.SIMD, r"#pragma\s+omp\s+(?:\w+\s+)*simd\b", "a simd pragma"),
    (Category.BLOCK_PARALLEL, r"#pragma\s+omp\s+(?!simd)|\bstd::thread\b|\bomp_get_\w+", "threads"),
    (Category.PREFETCH, r"__builtin_prefetch|\b_mm_prefetch\b", "a prefetch"),
    (Category.TEMPLATIZE, r"#pragma\s+(?:GCC\s+)?unroll", "an unrolled loop"),
)
"""What no naive C++ kernel has."""


def code_of(source: KernelSource) -> str:
    """The text of all files without comments and blanks."""
    pattern = COMMENTS[source.surface in C_LIKE]
    return "\n".join(" ".join(pattern.sub(lambda found: found[1] or " ", file.text).split()) for file in source.files)


def objection(simpler: KernelSource, kernel: KernelSource, earlier: Iterable[str]) -> str:
    """Reason why an edit of `kernel` is no simplification, in a sentence; empty if it is one.

    `earlier` are digests of the states that the walk has left behind.
    """
    before, after = code_of(kernel), code_of(simpler)
    if before == after:
        return "it changes comments and blanks only"
    if simpler.digest in set(earlier):
        return "it is a state that the walk has left behind"
    for name, pattern in TRICKS.items():
        if len(re.findall(pattern, after)) > len(re.findall(pattern, before)):
            return f"it adds {name}, which makes a kernel slow and not simple"
    return ""


def remaining_in_source(source: KernelSource) -> tuple[RemainingOptimization, ...]:
    """Optimizations that can be seen by their words alone; only C++ kernels have a list of them."""
    if source.surface is not Surface.CPP:
        return ()
    code = "\n".join(COMMENTS[True].sub(lambda found: found[1] or " ", file.text) for file in source.files)
    found = [(category, why, re.search(pattern, code)) for category, pattern, why in REMAINING_PATTERNS]
    return tuple(
        RemainingOptimization(category.value, f"`{' '.join(match[0].split())}`", f"it has {why}")
        for category, why, match in found
        if match
    )
