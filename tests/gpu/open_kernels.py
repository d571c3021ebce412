"""Kernels for the operators in definitions.py, by language: which are honest, and what must reject the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pytest_klineage.operators import make_case
from pytest_klineage.records import KernelCase, KernelSource, SourceFile, Surface

FOLDER = Path(__file__).parent / "open"
FILES = {
    Surface.CUDA: ("kernels.cu", "rows.cuh"), Surface.TRITON: ("rows_triton.py",),
    Surface.TILELANG: ("rows_tilelang.py",),
}  # fmt: skip
NUMBERS = {
    "softmax": 0, "add_norm": 1, "layer_norm": 2, "quantise": 3, "dequantise": 4, "classify": 5, "iterated": 6,
    "unwritten row": 10, "memo by pointer": 11, "stream escape": 12, "mutated input": 13, "lower precision": 14,
    "residual left": 15, "memo in place": 16, "memo by samples": 17, "memo by contents": 18,
}  # fmt: skip
"""KERNEL of kernels.cu."""
HONEST = ("softmax", "add_norm", "layer_norm", "quantise", "dequantise", "classify")


COMPILER_LIMITS = {"load_timeout_s": 60.0, "run_timeout_s": 60.0}
"""TileLang is imported in seconds, and the first call of a kernel may include a compiler."""


class Attack(msgspec.Struct, frozen=True, kw_only=True):
    """A generic attack on an operator of a user's file."""

    generic: str
    """What it does, in words that other machines' tables share."""
    name: str
    surface: Surface
    operator: str
    codes: tuple[str, ...]
    """Which must decide."""
    at_least: float = 1e-4

    @property
    def case(self) -> KernelCase:
        return case_of(self.operator, at_least=self.at_least)

    @property
    def source(self) -> KernelSource:
        return source_of(self.surface, self.name)


def case_of(
    operator: str, shape: tuple[int, ...] = (512, 1000), reference: str = "torch", at_least: float = 1e-4
) -> KernelCase:
    """An operator of definitions.py in bf16; `at_least` is the speedup that is required."""
    name = f"{FOLDER}/definitions.py:{operator}"
    return make_case(name, shape, "bf16", reference, at_least=at_least, also_shapes=[(3, 77)])


def source_of(surface: Surface, name: str) -> KernelSource:
    """The kernel of this name in a language."""
    files = tuple(SourceFile(name=file, text=(FOLDER / file).read_text()) for file in FILES[surface])
    given: dict[str, Any] = {"entry": name.replace(" ", "_")}
    if surface is Surface.TILELANG:
        files += (SourceFile(name="wanted.py", text=f"ENTRY = {given['entry']!r}\n"),)
    if surface is Surface.CUDA:
        given = {"entry": "run", "flags": (f"-DKERNEL={NUMBERS[name]}",)}
    return KernelSource(surface=surface, files=files, label=name, **given)


REPLAYED = ("wrong_value.mismatch", "cheat.replay")
EVERYWHERE = {
    "unwritten row": ("unwritten output", "softmax", ("wrong_value.unwritten", "cheat.replay")),
    "memo by pointer": ("memo by pointer", "softmax", REPLAYED),
    "memo by samples": ("memo by contents", "softmax", REPLAYED),
    "stream escape": ("late work", "softmax", ("cheat.late_work",)),
    "mutated input": ("input mutation", "softmax", ("wrong_value.input_mutated",)),
    "lower precision": ("lower precision", "softmax", REPLAYED),
    "residual left": ("in-place tensor left alone", "add_norm", REPLAYED),
    "memo in place": ("memo by pointer", "add_norm", REPLAYED),
}
ATTACKS = [
    Attack(generic=generic, name=name, surface=surface, operator=operator, codes=codes)
    for surface in FILES
    for name, (generic, operator, codes) in EVERYWHERE.items()
]
ATTACKS.append(
    Attack(
        generic="memo by contents", name="memo by contents", surface=Surface.CUDA, operator="iterated",
        codes=("slower.than_required",), at_least=1,
    )
)  # fmt: skip
