"""Names of platforms, capabilities and shapes brought to one form; who needs what, and what is held out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache

import msgspec

from pytest_klineage.errors import UnknownName
from pytest_klineage.records import (
    GPU_PLATFORMS,
    PLATFORMS,
    Carrier,
    CarrierKind,
    Category,
    Context,
    SkillCard,
    gpu_platform,
    platform_name,
)
from pytest_klineage.records.case import INSTRUCTIONS

CAPABILITIES = (*INSTRUCTIONS, "avx2", "avx512", "shared_memory", "simd", "warp_shuffle")
"""What a card may ask of a platform: instructions of GPUs as cases name them, and a few things more."""

CAPABILITY_ALIASES = {
    "tma": "tma_load", "tma_im2col": "tma_load", "cp.async.bulk.tensor": "tma_load", "clusters": "cluster",
    "thread_block_cluster": "cluster", "cp.async": "cp_async", "async_copy": "cp_async", "mma.sync": "mma",
    "tensor_cores": "mma", "tensor_core": "mma", "wgmma.mma_async": "wgmma", "warpgroup_mma": "wgmma",
    "tcgen05.mma": "tcgen05",
    "smem": "shared_memory", "shuffle": "warp_shuffle", "avx-512": "avx512", "avx512f": "avx512", "avx-2": "avx2",
}  # fmt: skip
"""Other ways to say the same."""

GENERAL = frozenset({"shared_memory", "warp_shuffle"})
"""What every GPU grants."""
PLATFORM_CAPABILITIES: dict[str, frozenset[str]] = {
    "cpu": frozenset({"simd"}),
    **{name: item.instructions | GENERAL for name, item in GPU_PLATFORMS.items()},
}
"""What a platform is granted: instructions as records/architectures.py lists them.

Which vector instructions a CPU has does not follow from the platform's name: a target says so itself.
"""

CATEGORY_NEEDS: dict[Category, frozenset[str]] = {
    Category.WGMMA: frozenset({"wgmma"}),
    Category.TMA_LOAD: frozenset({"tma_load"}),
    Category.TMA_STORE: frozenset({"tma_store"}),
    Category.MULTICAST: frozenset({"cluster", "multicast"}),
    Category.MMA: frozenset({"mma"}),
    Category.LDMATRIX_SWIZZLE: frozenset({"ldmatrix"}),
    Category.SMEM_TRANSPOSE: frozenset({"shared_memory"}),
    Category.SHUFFLE_SCAN: frozenset({"warp_shuffle"}),
    Category.SIMD: frozenset({"simd"}),
}
"""What a step cannot do without, whatever its card says."""
OF_WARPS = frozenset({"warp_shuffle"})
"""What only a platform with warps can grant. On a CPU the code of a card alone shows what its category takes."""

TRACES: tuple[tuple[str, str, re.Pattern[str]], ...] = tuple(
    (capability, literal, re.compile(pattern))
    for capability, literal, pattern in (
        ("wgmma", "wgmma", r"\bwgmma(?:\b|_)"),
        ("wgmma", "warpgroup_", r"\bwarpgroup_(?:arrive|wait|commit)"),
        ("wgmma", "GMMA::", r"\bGMMA::"),
        ("wgmma", "SM90_", r"\bSM90_\d+x\d+x"),
        ("tcgen05", "tcgen05", r"\btcgen05\b"),
        ("tcgen05", "UMMA", r"\bSM100_MMA_|\bUMMA::"),
        ("tma_load", "cp.async.bulk.tensor", r"cp\.async\.bulk\.tensor[^\n\"]*\.shared(?:::\w+)?\.global"),
        ("tma_load", "TMA_LOAD", r"\bSM90_TMA_LOAD"),
        ("tma_load", "tma_load", r"\btma_load(?:\b|_)"),
        ("tma_load", "ensorMap", r"\b[cC][uU][tT]ensorMap\w*"),
        ("tma_store", "cp.async.bulk.tensor", r"cp\.async\.bulk\.tensor[^\n\"]*\.global\.shared"),
        ("tma_store", "TMA_STORE", r"\bSM90_TMA_STORE"),
        ("tma_store", "tma_store", r"\btma_store(?:\b|_)"),
        ("bulk_copy", "cp.async.bulk", r"cp\.async\.bulk\.(?!tensor|commit|wait|prefetch)"),
        ("multicast", "multicast", r"\.multicast::cluster"),
        ("multicast", "MULTICAST", r"\bSM90_TMA_LOAD_MULTICAST"),
        ("cluster", "__cluster_dims__", r"__cluster_dims__"),
        ("cluster", "barrier.cluster", r"\bbarrier\.cluster"),
        ("cluster", "mapa", r"\bmapa\b"),
        ("cluster", "cluster_", r"\bcluster_(?:arrive|wait|sync)"),
        ("cluster", "this_cluster", r"\bthis_cluster\("),
        ("setmaxnreg", "setmaxnreg", r"\bsetmaxnreg\b"),
        ("setmaxnreg", "warpgroup_reg_", r"\bwarpgroup_reg_(?:alloc|dealloc)"),
        ("mbarrier", "mbarrier", r"\bmbarrier(?:\b|_)"),
        ("cp_async", "cp.async", r"\bcp\.async(?!\.bulk)"),
        ("cp_async", "__pipeline_memcpy_async", r"__pipeline_memcpy_async"),
        ("ldmatrix", "ldmatrix", r"\bldmatrix(?:\b|_)"),
        ("stmatrix", "stmatrix", r"\bstmatrix(?:\b|_)"),
        ("mma", "mma.sync", r"\bmma\.sync\b"),
        ("mma", "mma_", r"\bmma_(?:sync|m?\d)"),
        ("mma", "wmma::", r"\bwmma::"),
        ("shared_memory", "__shared__", r"\b__shared__\b"),
        ("warp_shuffle", "_sync", r"\b__(?:shfl|ballot|match|reduce)_\w*sync\b"),
        ("avx512", "_mm512_", r"\b_mm512_\w+"),
        ("avx512", "__m512", r"\b__m512"),
        ("avx2", "_mm256_", r"\b_mm256_\w+"),
        ("avx2", "__m256", r"\b__m256"),
    )
)
"""How code shows what it needs. A word in a comment counts too: a card too few does less harm than a wrong one."""

CODE = (CarrierKind.DIFF, CarrierKind.PSEUDOCODE, CarrierKind.SNIPPET, CarrierKind.SCHEDULE)


def canonical_platform(name: str) -> str:
    """The platform that is meant by a name such as "sm90a", "SM_90" or "nvidia-sm90a-cuda13". Raises UnknownName."""
    for part in (name, *re.split(r"[^A-Za-z0-9_]+", name)):
        try:
            return platform_name(part)
        except UnknownName:
            continue
    raise UnknownName("platform", name, PLATFORMS)


def canonical_capability(name: str) -> str:
    """The capability meant by a name such as "TMA" or "cp.async". Raises UnknownName, which lists the valid ones."""
    lower = name.strip().lower()
    plain = CAPABILITY_ALIASES.get(lower, lower.replace("-", "_").replace(" ", "_"))
    plain = CAPABILITY_ALIASES.get(plain, plain)
    if plain not in CAPABILITIES:
        raise UnknownName("capability", name, CAPABILITIES)
    return plain


def traces_in(carrier: Carrier) -> frozenset[str]:
    """Capabilities whose use shows in the carrier's code."""
    if carrier.kind not in CODE:
        return frozenset()
    return frozenset(
        capability for capability, literal, pattern in TRACES
        if literal in carrier.text and pattern.search(carrier.text)  # the literal first: it is quicker by far
    )  # fmt: skip


def implied_needs(card: SkillCard) -> frozenset[str]:
    """Capabilities that follow from the card's category and code, declared or not."""
    of_category = CATEGORY_NEEDS.get(card.category, frozenset())
    if set(card.scope.platforms) == {"cpu"}:
        of_category -= OF_WARPS
    return of_category | traces_in(card.carrier)


def with_implied_needs(card: SkillCard) -> SkillCard:
    """The card with the capabilities that its category and code show, declared."""
    wanted = tuple(sorted({*card.scope.capabilities, *implied_needs(card)}))
    return msgspec.structs.replace(card, scope=msgspec.structs.replace(card.scope, capabilities=wanted))


def needs(card: SkillCard) -> frozenset[str]:
    """All capabilities that a target must have, declared or implied. An unknown name stays as it is."""
    return implied_needs(card) | frozenset(map(capability_or_same, card.scope.capabilities))


def granted(platform: str, more: Iterable[str] = ()) -> frozenset[str]:
    """Capabilities of a platform, and those that a target adds. Raises UnknownName for either."""
    canonical = canonical_platform(platform)
    own = PLATFORM_CAPABILITIES.get(canonical) or gpu_platform(canonical).instructions | GENERAL
    return own | {canonical_capability(name) for name in more}


def shape_class(shape: Mapping[str, int]) -> str:
    """The size class of a shape, such as "M=2^12,N=2^12,K=2^6~"; "~" marks a size that is no multiple of 8."""
    parts = [f"{axis}=2^{max(size, 1).bit_length() - 1}{'~' if size % 8 else ''}" for axis, size in shape.items()]
    return ",".join(parts)


def same_problem(one: Context, other: Context) -> bool:
    """Whether two contexts are the same operator at the same shape; an unrecorded shape may be any."""
    return one.operator == other.operator and (not one.shape or not other.shape or one.shape == other.shape)


def same_target(one: Context, other: Context) -> bool:
    """Whether two contexts are the same operator, shape, platform and surface."""
    alike = (platform_or_same(one.platform), one.surface) == (platform_or_same(other.platform), other.surface)
    return alike and same_problem(one, other)


def held_out(context: Context, origins: Collection[Context]) -> bool:
    """Whether a context differs from every origin in operator, shape, platform or surface.

    Another data type alone, or other steps made before, are no held-out target. Without origins nothing is: where a
    card comes from is not known then.
    """
    return bool(origins) and not any(same_target(context, origin) for origin in origins)


@cache
def platform_or_same(name: str) -> str:
    """The platform that a name means; a name that is no platform's stays as it is."""
    try:
        return canonical_platform(name)
    except UnknownName:
        return name


@cache
def capability_or_same(name: str) -> str:
    """The capability that a name means; a name that is no capability's stays as it is."""
    try:
        return canonical_capability(name)
    except UnknownName:
        return name
