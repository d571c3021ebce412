"""Names brought to one form, what cards need, and which targets are held out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.errors import UnknownName
from pytest_klineage.lab.library.normalise import (
    CAPABILITIES,
    CAPABILITY_ALIASES,
    CATEGORY_NEEDS,
    PLATFORM_CAPABILITIES,
    TRACES,
    canonical_capability,
    canonical_platform,
    granted,
    held_out,
    implied_needs,
    needs,
    same_problem,
    shape_class,
    traces_in,
)
from pytest_klineage.records import (
    GPU_PLATFORMS,
    PLATFORMS,
    CardScope,
    Carrier,
    CarrierKind,
    Category,
    Context,
    SkillCard,
    Surface,
)

HERE = Context(operator="gemm", shape={"M": 8, "N": 4}, dtype="fp32", surface=Surface.CPP, platform="cpu")


def snippet(text: str, kind: CarrierKind = CarrierKind.SNIPPET) -> Carrier:
    return Carrier(kind=kind, language="cuda", text=text)


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("sm90", "sm90"), ("sm90a", "sm90"), ("SM_90A", "sm90"), ("nvidia-sm90a-cuda13", "sm90"),
        ("nvidia-sm90-cuda13", "sm90"), ("sm120a", "sm120"), ("CPU", "cpu"),
    ],
)  # fmt: skip
def test_platforms_have_one_name(name: str, platform: str) -> None:
    assert canonical_platform(name) == platform


@pytest.mark.parametrize("name", ["", "ascend910b", "nvidia-sm75-cuda12", "auto"])
def test_other_platforms_are_refused(name: str) -> None:
    with pytest.raises(UnknownName):
        canonical_platform(name)


@pytest.mark.parametrize(("name", "capability"), [*CAPABILITY_ALIASES.items(), ("cp-async", "cp_async")])
def test_capabilities_have_one_name(name: str, capability: str) -> None:
    assert canonical_capability(name) == canonical_capability(name.upper()) == capability
    assert capability in CAPABILITIES


@pytest.mark.parametrize("name", CAPABILITIES)
def test_canonical_capabilities_stand_for_themselves(name: str) -> None:
    assert canonical_capability(name) == name


def test_an_unknown_capability_names_the_known() -> None:
    with pytest.raises(UnknownName, match="wgmma"):
        canonical_capability("tcgen06")


def test_every_platform_is_granted_something_known() -> None:
    assert set(PLATFORM_CAPABILITIES) == set(PLATFORMS)
    assert all(names <= set(CAPABILITIES) for names in PLATFORM_CAPABILITIES.values())
    assert all(names <= set(CAPABILITIES) for names in CATEGORY_NEEDS.values())
    assert {name for name, _, _ in TRACES} <= set(CAPABILITIES)


@pytest.mark.parametrize(
    ("names", "platforms"),
    [
        (("wgmma",), ["sm90"]), (("tcgen05",), ["sm100", "sm103"]),
        (("tma_load", "tma_store", "cluster", "multicast", "setmaxnreg"), ["sm90", "sm100", "sm103"]),
        (("mbarrier", "stmatrix"), ["sm90", "sm100", "sm103", "sm120"]), (("mma", "cp_async"), list(GPU_PLATFORMS)),
    ],
)  # fmt: skip
def test_instructions_are_granted_where_they_are(names: tuple[str, ...], platforms: list[str]) -> None:
    for name in names:
        assert [platform for platform in PLATFORMS if name in granted(platform)] == platforms


def test_a_machine_may_have_more_than_its_platform() -> None:
    assert "avx512" not in granted("cpu")
    assert "avx512" in granted("cpu", ["AVX-512"])
    with pytest.raises(UnknownName):
        granted("cpu", ["mmx"])


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ('asm("wgmma.mma_async.sync.aligned.m64n128k16...")', "wgmma"),
        ("warpgroup_arrive();", "wgmma"),
        ("wgmma_64x128x16(sum, desc_a, desc_b);", "wgmma"),
        ("tma_load_3d(tile, &map, full, 0, m0, k0);", "tma_load"),
        ("tma_store_3d(&map, tile, n0, m0);", "tma_store"),
        ("mma_16816(d, a, b);", "mma"),
        ("using Atom = SM90_64x128x16_F32BF16BF16_SS<...>;", "wgmma"),
        ('"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1]"', "tma_load"),
        ('"cp.async.bulk.tensor.2d.shared::cta.global.tile ..."', "tma_load"),
        ("const __grid_constant__ CUtensorMap map", "tma_load"),
        ('"cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0], [%1]"', "tma_store"),
        ('"cp.async.bulk.shared::cluster.global.mbarrier ..."', "bulk_copy"),
        ("__cluster_dims__(2, 1, 1)", "cluster"),
        ('"barrier.cluster.arrive"', "cluster"),
        ('"....multicast::cluster ..."', "multicast"),
        ('"setmaxnreg.inc.sync.aligned.u32 240"', "setmaxnreg"),
        ('"cp.async.cg.shared.global [%0], [%1], 16"', "cp_async"),
        ('"ldmatrix.sync.aligned.m8n8.x4"', "ldmatrix"),
        ('"mma.sync.aligned.m16n8k16"', "mma"),
        ("__shared__ float tile[32][33];", "shared_memory"),
        ("__shfl_up_sync(~0u, x, 1)", "warp_shuffle"),
        ("__m512 x = _mm512_loadu_ps(p);", "avx512"),
        ("_mm256_fmadd_ps(a, b, c)", "avx2"),
    ],
)
def test_code_shows_what_it_needs(text: str, capability: str) -> None:
    assert capability in traces_in(snippet(text))


@pytest.mark.parametrize("text", ["for (int i = 0; i < n; ++i) sum += a[i];", "int wgmmas = 3;", "cp_async_x()"])
def test_plain_code_needs_nothing(text: str) -> None:
    assert traces_in(snippet(text)) == frozenset()


def test_bulk_copies_are_no_cp_async_and_prose_is_no_code() -> None:
    assert "cp_async" not in traces_in(snippet('"cp.async.bulk.commit_group"'))
    assert traces_in(snippet("use wgmma where it is there", CarrierKind.ANNOTATION)) == frozenset()


def test_needs_are_those_declared_and_those_implied(make_card: Callable[..., SkillCard]) -> None:
    card = make_card(
        category=Category.WGMMA, carrier=snippet("__cluster_dims__(2)"), scope=CardScope(capabilities=("TMA", "magic"))
    )
    assert implied_needs(card) == {"wgmma", "cluster"}
    assert needs(card) == {"wgmma", "cluster", "tma_load", "magic"}


@pytest.mark.parametrize(
    ("platforms", "implied"),
    [
        (("cpu",), frozenset()),
        (("sm90",), {"warp_shuffle"}),
        (("cpu", "sm90"), {"warp_shuffle"}),
        ((), {"warp_shuffle"}),
    ],
)
def test_a_scan_on_a_cpu_needs_no_warps(
    platforms: tuple[str, ...], implied: frozenset[str], make_card: Callable[..., SkillCard]
) -> None:
    card = make_card(
        category=Category.SHUFFLE_SCAN, carrier=snippet("v = scan(v);"), scope=CardScope(platforms=platforms)
    )
    assert implied_needs(card) == implied


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ({"M": 4096, "K": 64}, "M=2^12,K=2^6"),
        ({"S": 1000}, "S=2^9"),
        ({"S": 1001}, "S=2^9~"),
        ({}, ""),
        ({"X": 0}, "X=2^0"),
    ],
)
def test_shapes_have_classes(shape: dict[str, int], name: str) -> None:
    assert shape_class(shape) == name


@given(st.integers(3, 30))
def test_a_class_is_a_factor_of_two_wide(power: int) -> None:
    assert shape_class({"M": 2**power}) == shape_class({"M": 2 ** (power + 1) - 8})
    assert shape_class({"M": 2**power}) != shape_class({"M": 2 ** (power + 1)})


@pytest.mark.parametrize(
    ("change", "new"),
    [
        ({}, False), ({"dtype": "bf16"}, False), ({"prior": (Category.SIMD,)}, False), ({"platform": "CPU"}, False),
        ({"shape": {"N": 4, "M": 8}}, False), ({"shape": {}}, False), ({"shape": {"M": 8, "N": 5}}, True),
        ({"operator": "topk"}, True), ({"platform": "sm90"}, True), ({"surface": Surface.PYTHON}, True),
    ],
)  # fmt: skip
def test_another_shape_operator_platform_or_surface_is_held_out(change: dict[str, Any], new: bool) -> None:
    assert held_out(msgspec.structs.replace(HERE, **change), [HERE]) is new


def test_held_out_is_against_every_origin() -> None:
    other = msgspec.structs.replace(HERE, shape={"M": 9, "N": 9})
    assert not held_out(other, [HERE, other])
    assert not held_out(other, [])


def test_sm90a_and_sm90_are_one_target() -> None:
    one, other = (msgspec.structs.replace(HERE, platform=name) for name in ("sm90a", "nvidia-sm90-cuda13"))
    assert not held_out(one, [other])


def test_the_same_problem_may_be_elsewhere() -> None:
    moved = msgspec.structs.replace(HERE, platform="sm90", surface=Surface.CUDA)
    assert same_problem(HERE, moved)
    assert not same_problem(HERE, msgspec.structs.replace(HERE, shape={"M": 1}))
