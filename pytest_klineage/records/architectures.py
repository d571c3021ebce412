"""NVIDIA's GPUs: a row for each platform and each product, with the figures that NVIDIA publishes."""

from __future__ import annotations

import math
import re

import msgspec

TERA = 1e12
SPARSE = 2.0
"""Structured sparsity doubles the rate of a dense product: no kernel computes more."""
CACHE_BYTES = 12.0e12
"""Bytes per second that no L2 exceeds before the B200: outputs may stay there when a call has ended."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine does not exceed."""

    flops: float
    """Operations per second; infinite where that is not known."""
    bytes: float
    """Bytes read and written per second."""


class Product(msgspec.Struct, frozen=True):
    """A GPU by how its name begins, with figures of its data sheet."""

    name: str
    """As the driver says it, without what follows."""
    l2_mib: int
    """Size of the L2 cache in MiB; NVML does not report it, and asking CUDA takes a context. 0 when unknown."""
    terabytes: float
    """Bandwidth of the device memory in TB/s."""
    teraflops: dict[str, float]
    """Dense tensor-core rates in TFLOP/s (int8: TOP/s) by type, with the faster accumulator where there are two."""

    def peaks(self, dtype: str) -> Peaks:
        """What its data sheet allows on numbers of a type."""
        return Peaks(flops=rate(self.teraflops, dtype) * TERA, bytes=self.terabytes * TERA)


class GpuPlatform(msgspec.Struct, frozen=True, kw_only=True):
    """An architecture of NVIDIA GPUs that kernels are built for, from compute capability 8.0 on.

    A package registers one of its own under the entry point `pytest_klineage.platforms`.
    """

    name: str
    """Such as "sm90"."""
    capability: str
    """Compute capability, such as "9.0"."""
    target: str
    """What compilers call it, after "sm_": "90a", where "a" brings the instructions that no other architecture has."""
    title: str
    """What people call it, such as "Hopper"."""
    toolkit: tuple[int, ...]
    """The first nvcc that builds for it."""
    shared_bytes: int
    """Shared memory that one block can have."""
    instructions: frozenset[str]
    """Words of records.case.INSTRUCTIONS that its kernels may be made of."""
    products: tuple[Product, ...] = ()
    cache_bytes: float = CACHE_BYTES
    """Bytes per second that its L2 does not exceed."""

    @property
    def number(self) -> int:
        """The capability as compilers count, such as 90."""
        return int(self.capability.replace(".", ""))

    def product(self, name: str) -> Product | None:
        """The row of a product, by its driver's name; None for one that is not in the table."""
        fitting = (row for row in self.products if re.match(rf"{re.escape(row.name)}(?!\w)", name))
        return max(fitting, key=lambda row: len(row.name), default=None)

    def bound(self, name: str) -> Peaks:
        """What no such GPU exceeds on numbers of any type; of a product that is not in the table, none of the platform.

        The rate is that of sparse products in the shortest type, and bytes may come from the L2: what is faster than
        that has not been computed.
        """
        row = self.product(name)
        known = (row,) if row else self.products or ALL_PRODUCTS
        return Peaks(
            flops=SPARSE * TERA * max(max(item.teraflops.values()) for item in known),
            bytes=max(self.cache_bytes, *(item.terabytes * TERA for item in known)),
        )

    def peaks(self, name: str, dtype: str) -> Peaks:
        """What a product's data sheet allows; of one that is not in the table, the most that any of the platform's."""
        row = self.product(name)
        known = [item.peaks(dtype) for item in ((row,) if row else self.products or ALL_PRODUCTS)]
        return Peaks(flops=max(item.flops for item in known), bytes=max(item.bytes for item in known))


def rate(teraflops: dict[str, float], dtype: str) -> float:
    """TFLOP/s on numbers of a type; infinite for types that tensor cores have not, as 64-bit ones.

    fp32 is held to tf32: no kernel that is as precise is faster. A short type that the hardware lacks is computed in
    the next one that it has.
    """
    if dtype in ("int8", "uint8"):
        return teraflops["int8"]
    if dtype == "fp32":
        return teraflops["tf32"]
    if dtype.startswith("fp8"):
        return teraflops.get("fp8", teraflops["fp16"])
    return teraflops.get(dtype, math.inf)


def dense(fp16: float, tf32: float, *, bf16: float = 0.0, fp8: float = 0.0, int8: float = 0.0) -> dict[str, float]:
    """Rates by type: bf16 is as fast as fp16, and int8 twice as fast, unless said otherwise; fp8 only where said."""
    rates = {"fp16": fp16, "bf16": bf16 or fp16, "tf32": tf32, "int8": int8 or 2 * fp16}
    return rates | ({"fp8": fp8} if fp8 else {})


AMPERE = frozenset({"cp_async", "ldmatrix", "mma"})
BULK = frozenset({
    "bulk_copy", "cluster", "mbarrier", "multicast", "setmaxnreg", "stmatrix", "tma_load", "tma_prefetch",
    "tma_reduce", "tma_store",
})  # fmt: skip
"""What came with sm90, and sm100 and sm103 have as well."""
HALF_GH100, SXM_GH100 = dense(835.5, 417.7, fp8=1670.7), dense(989.4, 494.7, fp8=1978.9)
B200 = dense(2250, 1125, fp8=4500)
GB200 = dense(2500, 1250, fp8=5000)

GPU_PLATFORMS: dict[str, GpuPlatform] = {
    item.name: item
    for item in (
        # A100 data sheet, June 2021 (nvidia-a100-datasheet-us); L2 from the A100 whitepaper, table 4.
        GpuPlatform(
            name="sm80", capability="8.0", target="80", title="Ampere", toolkit=(12, 8), shared_bytes=166_912,
            instructions=AMPERE,
            products=(
                Product("NVIDIA A100-SXM4-80GB", 40, 2.039, dense(312, 156)),
                Product("NVIDIA A100-SXM4-40GB", 40, 1.555, dense(312, 156)),
                Product("NVIDIA A100 80GB PCIe", 40, 1.935, dense(312, 156)),
                Product("NVIDIA A100-PCIE-40GB", 40, 1.555, dense(312, 156)),
            ),
        ),
        # A10 and A40 data sheets, 2021; RTX 3090 from the GA102 whitepaper V2.1, table 9 (fp16 with fp16 accumulate).
        GpuPlatform(
            name="sm86", capability="8.6", target="86", title="Ampere", toolkit=(12, 8), shared_bytes=101_376,
            instructions=AMPERE,
            products=(
                Product("NVIDIA A10", 6, 0.600, dense(125, 62.5)),
                Product("NVIDIA A40", 6, 0.696, dense(149.7, 74.8, int8=299.3)),
                Product("NVIDIA GeForce RTX 3090", 6, 0.936, dense(142, 35.6, bf16=71, int8=284)),
            ),
        ),
        # L4 and L40S data sheets, 2023, halved where they are sparse; RTX 4090 and RTX 6000 Ada from the Ada
        # whitepapers (V2.1, table 2, and the professional one): the GeForce's fp16 and fp8 with fp16 accumulate.
        GpuPlatform(
            name="sm89", capability="8.9", target="89", title="Ada", toolkit=(12, 8), shared_bytes=101_376,
            instructions=AMPERE,
            products=(
                Product("NVIDIA L4", 48, 0.300, dense(121, 60, fp8=242.5, int8=242.5)),
                Product("NVIDIA L40S", 96, 0.864, dense(362.05, 183, fp8=733, int8=733)),
                Product("NVIDIA GeForce RTX 4090", 72, 1.008, dense(330.3, 82.6, bf16=165.2, fp8=660.6, int8=660.6)),
                Product("NVIDIA RTX 6000 Ada Generation", 96, 0.960, dense(364.2, 182.1, fp8=728.5, int8=728.5)),
            ),
        ),
        # H100 data sheet (H100 NVL's rates halved: they are sparse), H200 and GH200 data sheets; L2 of the H200 and
        # the GH200 as CUDA says there.
        GpuPlatform(
            name="sm90", capability="9.0", target="90a", title="Hopper", toolkit=(12, 8), shared_bytes=232_448,
            instructions=AMPERE | BULK | {"wgmma"},
            products=(
                Product("NVIDIA H100", 50, 3.350, SXM_GH100),
                Product("NVIDIA H100 PCIe", 50, 2.039, dense(756, 378, fp8=1513)),
                Product("NVIDIA H100 NVL", 50, 3.938, HALF_GH100),
                Product("NVIDIA H200", 60, 4.800, SXM_GH100),
                Product("NVIDIA H200 NVL", 60, 4.800, HALF_GH100),
                Product("NVIDIA GH200", 60, 4.900, SXM_GH100),
                Product("NVIDIA GH200 480GB", 60, 4.000, SXM_GH100),
            ),
        ),
        # Blackwell architecture technical brief, table 3: HGX B200, and a GPU of the GB200.
        GpuPlatform(
            name="sm100", capability="10.0", target="100a", title="Blackwell", toolkit=(12, 8), shared_bytes=232_448,
            instructions=AMPERE | BULK | {"tcgen05"}, cache_bytes=2 * CACHE_BYTES,
            products=(Product("NVIDIA B200", 0, 8.000, B200), Product("NVIDIA GB200", 0, 8.000, GB200)),
        ),
        # HGX B300 and GB300 NVL72 data sheets, 2025. Their int8 is far slower than B200's; what is here is no less.
        GpuPlatform(
            name="sm103", capability="10.3", target="103a", title="Blackwell Ultra", toolkit=(12, 9),
            shared_bytes=232_448, instructions=AMPERE | BULK | {"tcgen05"}, cache_bytes=2 * CACHE_BYTES,
            products=(Product("NVIDIA B300", 0, 8.000, B200), Product("NVIDIA GB300", 0, 8.000, GB200)),
        ),
        # RTX Blackwell whitepapers: GeForce (V1.1, table 2; fp16 and fp8 with fp16 accumulate) and PRO (table 2). It
        # has bulk copies too; no kernel of ours has used them, so they are not among its instructions.
        GpuPlatform(
            name="sm120", capability="12.0", target="120a", title="Blackwell, RTX", toolkit=(12, 8),
            shared_bytes=101_376, instructions=AMPERE | {"mbarrier", "stmatrix"},
            products=(
                Product("NVIDIA GeForce RTX 5090", 96, 1.792, dense(419, 104.8, bf16=209.5, fp8=838, int8=838)),
                Product("NVIDIA GeForce RTX 5080", 64, 0.960, dense(225.1, 56.3, bf16=112.6, fp8=450.2, int8=450.2)),
                Product("NVIDIA RTX PRO 6000 Blackwell", 128, 1.792, dense(503.8, 251.9, fp8=1007.6, int8=1007.6)),
            ),
        ),
    )
}  # fmt: skip
"""By name, oldest first. Judging has been run on sm90 alone; for all others kernels are built."""
ALL_PRODUCTS = tuple(product for item in GPU_PLATFORMS.values() for product in item.products)
