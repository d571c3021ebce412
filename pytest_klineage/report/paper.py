"""What the KLineage paper printed, with the devices that it was measured on, in its words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pytest_klineage.report.document import Cell, Section, Table, columns
from pytest_klineage.report.table_cells import FAIL, named, times

DEVICES = {"sm90": "H100 PCIe (SM90)", "sm120": "RTX PRO 6000 Blackwell (SM120)"}
KERNELS = ("GEMM", "Conv2d", "FMHA", "GDN", "Top-K")
OPERATORS = dict(zip(("gemm", "conv2d", "fmha", "gdn", "topk"), KERNELS, strict=True))
"""Our names of its five kernels."""

SETUP = (
    ("GEMM", "CUTLASS", "M=N=K=4096 (BF16)", "cuBLAS"),
    ("Conv2d", "CUTLASS", "N=8, C=64, H=W=56, F=128, K=3, s=1, p=1 (FP16)", "cuDNN"),
    ("FMHA", "TileLang", "batch 8, heads 64, seq 2048, dim 128 (FP16)", "FlashInfer"),
    ("Top-K", "TileLang", "batch 64, seq 4096, top-k=512 (FP32)", "FlashInfer"),
    ("GDN", "FlashQLA", "h_qk=16, h_v=48, dim 128, chunk 64, seq 4096 (BF16)", "FlashInfer / FLA"),
)
"""Table 2: kernel, source of the expert, shape (type), reference."""

RECOVERY = {
    "GEMM": ("4/5", "4/5"), "Conv2d": ("5/5", "4/5"), "FMHA": ("3/5", "3/5"), "GDN": ("4/5", "4/5"),
    "Top-K": ("5/5", "5/5"), "Total": ("21/25", "20/25"),
}  # fmt: skip
"""Table 3: SM90, SM120."""

GENERATED_ONLY = (
    ("sm90", "GEMM", 0.4070, 0.3130, 1.30), ("sm90", "Conv2d", 0.2273, 0.0157, 14.48),
    ("sm90", "FMHA", 27.7556, 3.5183, 7.89), ("sm90", "GDN", 25.6522, 0.2439, 105.18),
    ("sm90", "Top-K", 0.0211, 0.0143, 1.48), ("sm120", "GEMM", 0.4781, 0.3681, 1.30),
    ("sm120", "Conv2d", 0.1369, 0.0235, 5.83), ("sm120", "FMHA", 11.8063, 3.2151, 3.67),
    ("sm120", "GDN", 23.7612, 0.6348, 37.43), ("sm120", "Top-K", 0.0147, 0.0131, 1.12),
)  # fmt: skip
"""Table 4: platform, kernel, generated-only ms, KLineage ms, slowdown as printed."""

LATENCIES = (
    ("sm90", "GEMM", 0.3130, 0.3198, 0.3190, 0.3086), ("sm90", "Conv2d", 0.0157, 0.0684, 0.0658, 0.0272),
    ("sm90", "FMHA", 3.5183, None, 5.1499, 3.3121), ("sm90", "GDN", 0.2439, 17.7673, None, 0.2816),
    ("sm90", "Top-K", 0.0143, 0.1338, 0.1276, 0.0160), ("sm120", "GEMM", 0.3681, 0.3896, 0.3933, 0.3688),
    ("sm120", "Conv2d", 0.0235, 0.0760, 0.0822, 0.0253), ("sm120", "FMHA", 3.2151, None, 3.6366, 3.1932),
    ("sm120", "GDN", 0.6348, None, None, 0.6867), ("sm120", "Top-K", 0.0131, None, 0.0192, 0.0169),
)  # fmt: skip
"""Table 5: platform, kernel, ms of KLineage, AdaExplore, AccelOpt (None: FAIL), reference."""
AUDITED = ("sm120", "Conv2d")
"""Where AdaExplore's kernel counts only by an adapter that the authors wrote afterwards."""

LANGUAGES = (
    ("sm90", "GEMM", 0.3130, 0.3431, 0.3086), ("sm90", "Conv2d", 0.0157, 0.0181, 0.0272),
    ("sm90", "FMHA", 3.5183, 3.2975, 3.3121), ("sm90", "GDN", 0.2439, 0.2805, 0.2816),
    ("sm90", "Top-K", 0.0143, 0.0167, 0.0160), ("sm120", "GEMM", 0.3681, 0.3749, 0.3688),
    ("sm120", "Conv2d", 0.0235, 0.0303, 0.0253), ("sm120", "FMHA", 3.2151, 3.0896, 3.1932),
    ("sm120", "GDN", 0.6348, 0.5569, 0.6867), ("sm120", "Top-K", 0.0131, 0.0128, 0.0169),
)  # fmt: skip
"""Table 6: platform, kernel, ms of CUDA, TileLang, reference."""

FAMILIES = (
    ("Plain GEMM (6)", "1.01x", "1.05x", "+0.04", "4/5"), ("GroupedGEMM (2)", "1.48x", "1.48x", "0", "2/2"),
    ("Attention (6)", "1.16x", "1.33x", "+0.17", "6/6"), ("Reduction (8)", "0.96x", "0.96x", "0", "2/3"),
    ("Overall (22)", "1.07x", "1.12x", "+0.05", "14/16"), ("Compute-bound (14)", "1.13x", "1.22x", "+0.09", "12/13"),
)  # fmt: skip
"""Table 7: family, idiom-only, with the card's settings, difference, instances at or above 1.00x of each."""

MEMBERS = {
    "GEMM": ("gemm", "mm", "addmm", "bmm"),
    "Grouped GEMM": ("grouped_mm", "grouped_gemm"),
    "Attention": ("attention", "causal_attention", "fmha"),
    "Reduction": ("rms_norm", "layer_norm", "softmax", "fused_add_rms_norm"),
}
"""Our names of the held-out operators in each family of Table 7."""

CARDS = (
    ("vectorized_global_load_store", "cumsum", "3.9x over naive"), ("warp_shuffle_scan", "cumsum", "2.7x over naive"),
    ("smem_transpose", "cumsum", "2.9x over naive"), ("multi_threaded_block_parallelism", "cumsum", "1.1x over naive"),
    ("mma_ldmatrix_stmatrix_swizzle", "fused_fwd", "34x over scalar"),
    ("gemm_phase_decomposition", "fused_fwd", "194x over naive"),
    ("multi_threaded_block_parallelism", "fused_fwd", "1.6x over naive"),
    ("mma_ldmatrix_stmatrix_swizzle_tma", "kkt_solve", "16x over scalar"),
    ("multi_threaded_block_parallelism", "kkt_solve", "16x over naive"),
)  # fmt: skip
"""Table 8: skill, source sub-kernel, verification evidence."""

HELD_OUT = (
    ("MM (2048^3)", 0.077, 0.076, 0.074, 1.05), ("MM (4096^3)", 0.411, 0.401, 0.373, 1.10),
    ("MM (8192^3)", 2.839, 2.702, 2.625, 1.08), ("AddMM (4096^3)", 0.397, 0.401, 0.375, 1.06),
    ("BMM (bs=16, 2048^3)", 0.727, 0.717, 0.703, 1.03), ("BMM (bs=32, 1024^3)", 0.222, 0.229, 0.226, 0.98),
    ("GroupedGEMM (G=4)", 1.074, 0.723, 0.724, 1.48), ("GroupedGEMM (G=8)", 1.076, 0.728, 0.730, 1.47),
    ("FlashAttn (B=4,S=1024)", 0.218, 0.182, 0.158, 1.38), ("FlashAttn (B=2,S=4096)", 1.108, 0.997, 0.857, 1.29),
    ("FlashAttn (B=1,S=8192)", 2.112, 1.897, 1.617, 1.31),
    ("FlashAttn non-causal (B=2,S=2048)", 0.558, 0.490, 0.425, 1.31),
    ("GQA (B=2,S=2048, 4:1)", 0.354, 0.293, 0.265, 1.34), ("GQA (B=1,S=4096, 4:1)", 0.648, 0.534, 0.477, 1.36),
    ("RMSNorm (16384x4096)", 0.184, 0.188, 0.187, 0.99), ("RMSNorm (8192x8192)", 0.188, 0.221, 0.221, 0.85),
    ("RMSNorm (32768x2048)", 0.186, 0.188, 0.186, 1.00), ("LayerNorm (16384x4096)", 0.186, 0.188, 0.188, 0.99),
    ("LayerNorm (8192x8192)", 0.189, 0.217, 0.217, 0.87), ("Softmax (16384x4096)", 0.188, 0.188, 0.186, 1.01),
    ("Softmax (131072x1024)", 0.375, 0.369, 0.370, 1.01), ("FusedAddRMSNorm", 0.370, 0.379, 0.379, 0.98),
)  # fmt: skip
"""Table 9: instance, ms of FlagGems' Triton, idiom-only, with the card's settings, speedup as printed."""
BOTH = " and ".join(DEVICES.values())
"""Whose figures most tables show."""


def with_paper(section: Section) -> Section:
    """A section with what the paper printed of the same kind at its end."""
    return replace(section, tables=(*section.tables, *printed().get(section.key, ())))


def printed() -> dict[str, tuple[Table, ...]]:
    """The paper's tables by the section that they stand in."""
    kernels, others = ("device", "kernel"), ("AdaExplore", "AccelOpt")
    setup = ("kernel", "expert from", "shape (type)", "reference")
    skills = ("skill", "source sub-kernel", "verification evidence")
    arms = ("idiom-only", "with card's settings", "difference", "at or above 1x, idiom / card")
    alone = ("without cards ms", "with cards ms", "slowdown")
    instances = ("Triton ms", "idiom-only ms", "with card's settings ms", "speedup over Triton")
    ratios = "Ratios of the latencies in the paper's Table 5, which are medians of do_bench."
    audit = "*: counted by an adapter that the authors wrote afterwards. FAIL: no correct kernel within $10."
    methods = tuple(f"{name} ms" for name in ("KLineage", *others, "reference"))
    languages = ("CUDA ms", "TileLang ms", "reference ms")
    one, gdn = DEVICES["sm120"], "GDN; the device is not stated"
    trials = _printed("Table 3", ("kernel",), (*DEVICES.values(),), _trials())
    return {
        "speedups": (_printed("Figure 3 as numbers", kernels, ("KLineage", *others), _ratios(), note=ratios),),
        "latencies": (
            _printed("Table 5, ms", kernels, methods, _latencies(), note=audit),
            _printed("Table 6, ms", kernels, languages, _languages()),
        ),
        "cards": (_printed("Table 8", skills, (), CARDS, whose=gdn),),
        "recovery": (replace(trials, rows=trials.rows[:-1], foot=trials.rows[-1:]),),
        "generated-only": (_printed("Table 4", kernels, alone, _generated()),),
        "held-out": (
            _printed("Table 7", ("family (n)",), arms, FAMILIES, whose=one),
            _printed("Table 9", ("instance",), instances, _held_out(), whose=one),
        ),
        "setup": (_printed("Table 2", setup, (), SETUP),),
    }


Row = Sequence[str | Cell]


def _printed(
    title: str, words: Sequence[str], figures: Sequence[str], rows: Iterable[Row], *, note: str = "", whose: str = BOTH
) -> Table:
    cells = (tuple(named(item) if isinstance(item, str) else item for item in row) for row in rows)
    heads = columns(*words, *figures, numeric=figures)
    return Table(f"The paper's {title}", heads, tuple(cells), notes=(note,) if note else (), paper=whose)


def _ratios() -> Iterable[Row]:
    """Figure 3 as numbers: ratios of the latencies in Table 5."""
    for platform, kernel, *values, reference in LATENCIES:
        yield _device(platform), kernel, *(times(reference / value) if value else FAIL for value in values)


def _latencies() -> Iterable[Row]:
    for platform, kernel, *values in LATENCIES:
        audited = [(platform, kernel, position) == (*AUDITED, 1) for position in range(len(values))]
        yield _device(platform), kernel, *map(_ms, values, audited)


def _languages() -> Iterable[Row]:
    for platform, kernel, *values in LANGUAGES:
        yield _device(platform), kernel, *map(_ms, values)


def _trials() -> Iterable[Row]:
    for kernel, both in RECOVERY.items():
        yield kernel, *map(Cell, both)


def _generated() -> Iterable[Row]:
    for platform, kernel, alone, skilled, slowdown in GENERATED_ONLY:
        yield _device(platform), kernel, _ms(alone), _ms(skilled), Cell(f"{slowdown:.2f}x", slowdown)


def _held_out() -> Iterable[Row]:
    for instance, *values, speedup in HELD_OUT:
        yield instance, *(Cell(f"{value:.3f}", value) for value in values), Cell(f"{speedup:.2f}x", speedup)


def _device(platform: str) -> Cell:
    return Cell(DEVICES[platform], platform)


def _ms(value: float | None, audited: bool = False) -> Cell:
    """A latency as it was printed, with the mark of the one that was audited."""
    return FAIL if value is None else Cell(f"{value:.4f}{'*' if audited else ''}", value)
