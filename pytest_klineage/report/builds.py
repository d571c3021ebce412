"""The table of the compile stage: what each build came to, instead of times. Layout is report/tables.py's business."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_klineage.records import Code, Status, Verdict

HEADERS = ("case", "kernel", "kernels", "regs", "spill B", "instructions", "status")
ALIGNMENT = ("left", "left", "right", "right", "right", "left", "left")
SHRINKABLE = ((1, 20), (5, 30), (0, 20), (1, 14), (5, 8), (1, 6))
"""Columns that give way when a table is too wide, in turn, and what is left of each."""
BUILT = frozenset({Code.ACCEPTED_BUILT, Code.SPILLS, Code.MISSING_INSTRUCTION})


def only_built(verdicts: Sequence[Verdict]) -> bool:
    """Whether these verdicts are of a compile stage: something was built, and nothing was timed."""
    return any(verdict.code in BUILT for verdict in verdicts) and all(verdict.timing is None for verdict in verdicts)


def build_row(verdict: Verdict) -> list[str]:
    """One line: the most registers and spills of any kernel, and all instructions that matter in any of them."""
    build = verdict.build
    kernels = build.kernels if build is not None else ()
    found = {word for kernel in kernels for word in kernel.instructions or ()}
    unknown = any(kernel.instructions is None for kernel in kernels)
    return [
        verdict.case.id,
        verdict.label or "-",
        str(len(kernels)) if kernels else "-",
        str(max(kernel.registers for kernel in kernels)) if kernels else "-",
        str(max(kernel.spill_bytes for kernel in kernels)) if kernels else "-",
        "not looked for" if unknown else " ".join(sorted(found)) or "-",
        verdict.status.value,
    ]


def build_summary(verdicts: Sequence[Verdict]) -> str:
    """One line: how many were built and are as demanded."""
    skipped = sum(verdict.status is Status.SKIPPED for verdict in verdicts)
    built = sum(verdict.code is Code.ACCEPTED_BUILT for verdict in verdicts)
    return f"built {built} of {len(verdicts) - skipped}" + (f", {skipped} skipped" if skipped else "")
