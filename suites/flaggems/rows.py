"""The 22 rows of the suite: operator, shapes and type on a GPU and on a CPU, and a shape beside the tiles' multiples.

Shapes that the paper does not print (heads 32, width 128, the grouped and the fused shapes) follow from its times.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pytest_klineage import KernelCase, make_case

OPERATORS = Path(__file__).with_name("operators.py")
GEMM, ATTENTION, REDUCTION = "GEMM", "Attention", "Reduction"
FAMILIES = (GEMM, ATTENTION, REDUCTION)
AT_LEAST = 1e-4
"""Arms are measured, not held to a speed; a row counts as reached where its interval's low end is REACHED or more."""
REACHED = 0.99
SPILLS = {"expert": 0}
"""Bytes per thread that kernels of an arm may spill; any number in the others."""


@dataclass(frozen=True)
class Row:
    """One instance. Shapes are in the order of the operator's axes."""

    number: int
    family: str
    operator: str
    shape: tuple[int, ...]
    tail: tuple[int, ...]
    """No size is a multiple of a tile: the kernel must be right there, and is not timed."""
    small: tuple[int, ...]
    """On a CPU, in fp32."""
    dtype: str = "bf16"

    def name(self, platform: str) -> str:
        """Name of its test, with the shape on that platform: "01-mm-2048x2048x2048"."""
        shape = self.small if platform == "cpu" else self.shape
        return f"{self.number:02d}-{self.operator}-{'x'.join(map(str, shape))}"

    def case(self, platform: str, reference: str, arm: str = "") -> KernelCase:
        """The row's case on a platform. Raises UsageError."""
        on_cpu = platform == "cpu"
        shape, dtype = (self.small, "fp32") if on_cpu else (self.shape, self.dtype)
        operator = f"{OPERATORS}:{self.operator}"
        made = make_case(operator, shape, dtype, reference, at_least=AT_LEAST, also_shapes=(self.tail,))
        return msgspec.structs.replace(made, max_spills=None if on_cpu else SPILLS.get(arm))


def attention(number: int, batch: int, tokens: int, key_heads: int = 32, operator: str = "causal_attention") -> Row:
    """32 heads of width 128 in fp16."""
    return Row(
        number, ATTENTION, operator, (batch, 32, tokens, 128, key_heads), (1, 4, 328, 128, 4 * key_heads // 32),
        (1, 4, 96 + number, 64, 4 * key_heads // 32), "fp16",
    )  # fmt: skip


def reduction(number: int, operator: str, rows: int, columns: int) -> Row:
    """On a CPU a 64th of the rows."""
    return Row(number, REDUCTION, operator, (rows, columns), (37, columns // 2 + 8), (rows // 64, columns // 4))


ROWS = (
    Row(1, GEMM, "mm", (2048, 2048, 2048), (328, 264, 520), (192, 160, 128)),
    Row(2, GEMM, "mm", (4096, 4096, 4096), (328, 264, 520), (256, 256, 256)),
    Row(3, GEMM, "mm", (8192, 8192, 8192), (328, 264, 520), (384, 320, 256)),
    Row(4, GEMM, "addmm", (4096, 4096, 4096), (328, 520, 264), (128, 160, 96)),
    Row(5, GEMM, "bmm", (16, 2048, 2048, 2048), (3, 328, 264, 520), (4, 96, 64, 80)),
    Row(6, GEMM, "bmm", (32, 1024, 1024, 1024), (3, 328, 264, 520), (8, 48, 64, 56)),
    Row(7, GEMM, "grouped_mm", (8192, 4096, 4, 4096), (520, 264, 4, 328), (256, 64, 4, 96)),
    Row(8, GEMM, "grouped_mm", (8192, 4096, 8, 4096), (520, 264, 8, 328), (256, 64, 8, 96)),
    attention(9, 4, 1024),
    attention(10, 2, 4096),
    attention(11, 1, 8192),
    attention(12, 2, 2048, operator="attention"),
    attention(13, 2, 2048, key_heads=8),
    attention(14, 1, 4096, key_heads=8),
    reduction(15, "rms_norm", 16384, 4096),
    reduction(16, "rms_norm", 8192, 8192),
    reduction(17, "rms_norm", 32768, 2048),
    reduction(18, "layer_norm", 16384, 4096),
    reduction(19, "layer_norm", 8192, 8192),
    reduction(20, "softmax", 16384, 4096),
    reduction(21, "softmax", 131072, 1024),
    reduction(22, "fused_add_rms_norm", 16384, 4096),
)
