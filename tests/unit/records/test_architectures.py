"""The table of GPUs: rows that can be true, and what follows for a product that is in it and for one that is not."""

from __future__ import annotations

import math

import pytest

from pytest_klineage.records import DTYPES, GPU_PLATFORMS, INSTRUCTIONS, GpuPlatform
from pytest_klineage.records.architectures import ALL_PRODUCTS, AMPERE

ROWS = list(GPU_PLATFORMS.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_names_of_an_architecture_agree(row: GpuPlatform) -> None:
    assert row.name == f"sm{row.number}"
    assert row.target.rstrip("a") == str(row.number)
    assert set(AMPERE) <= row.instructions <= set(INSTRUCTIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_data_sheets_stay_below_the_bound(row: GpuPlatform, dtype: str) -> None:
    for name in [*(product.name for product in row.products), "NVIDIA of tomorrow"]:
        peaks, bound = row.peaks(name, dtype), row.bound(name)
        assert peaks.flops in (math.inf, min(peaks.flops, bound.flops / 2))
        assert 0 < peaks.bytes <= bound.bytes


@pytest.mark.parametrize(
    ("platform", "name", "row"),
    [
        ("sm90", "NVIDIA H100 80GB HBM3", "NVIDIA H100"), ("sm90", "NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("sm90", "NVIDIA H200", "NVIDIA H200"), ("sm90", "NVIDIA H200 NVL", "NVIDIA H200 NVL"),
        ("sm90", "NVIDIA GH200 144G HBM3e", "NVIDIA GH200"), ("sm86", "NVIDIA A10", "NVIDIA A10"),
        ("sm103", "NVIDIA B300 SXM6 AC", "NVIDIA B300"),
        ("sm120", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000 Blackwell"),
    ],
)  # fmt: skip
def test_a_product_is_known_by_the_longest_name(platform: str, name: str, row: str) -> None:
    found = GPU_PLATFORMS[platform].product(name)
    assert found is not None
    assert found.name == row


@pytest.mark.parametrize(
    ("platform", "name"), [("sm86", "NVIDIA A10G"), ("sm90", "NVIDIA H800"), ("sm89", "NVIDIA L40"), ("sm80", "")]
)
def test_an_unknown_product_gets_the_fastest_of_its_kind(platform: str, name: str) -> None:
    kind = GPU_PLATFORMS[platform]
    assert kind.product(name) is None
    every = [kind.peaks(product.name, "bf16") for product in kind.products]
    assert kind.peaks(name, "bf16").flops == max(item.flops for item in every)
    assert kind.peaks(name, "bf16").bytes == max(item.bytes for item in every)
    assert kind.bound(name).flops == max(kind.bound(product.name).flops for product in kind.products)


def test_a_platform_without_products_gets_the_fastest_of_all() -> None:
    new = GpuPlatform(
        name="sm121", capability="12.1", target="121a", title="New", toolkit=(12, 9), shared_bytes=101_376,
        instructions=AMPERE,
    )  # fmt: skip
    assert new.peaks("NVIDIA GB10", "bf16").flops == max(row.peaks("bf16").flops for row in ALL_PRODUCTS)


def test_types_that_tensor_cores_lack_are_held_to_others() -> None:
    ampere, hopper = GPU_PLATFORMS["sm80"], GPU_PLATFORMS["sm90"]
    name = "NVIDIA A100-SXM4-80GB"
    assert ampere.peaks(name, "fp8_e4m3") == ampere.peaks(name, "fp16")
    assert hopper.peaks("NVIDIA H200", "fp8_e4m3").flops > hopper.peaks("NVIDIA H200", "bf16").flops
    assert hopper.peaks("NVIDIA H200", "fp32").flops < hopper.peaks("NVIDIA H200", "bf16").flops
