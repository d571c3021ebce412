"""The TileLang experts refuse what lies outside of their domains with a ValueError, before anything is compiled."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("tilelang")

EXPERTS = Path(__file__).parents[4] / "experts"
HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


def expert(operator: str) -> ModuleType:
    """An expert's module."""
    path = EXPERTS / operator / "sm90-tilelang" / "expert.py"
    spec = importlib.util.spec_from_file_location(f"{operator}_in_tilelang", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their types
    spec.loader.exec_module(module)
    return module


def compiles_nothing(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Replace the module's compiler; returns the list of what it is asked for. TileLang compares all strides."""
    asked: list[tuple[object, ...]] = []

    def launched(*tensors: torch.Tensor) -> None:
        assert [tensor.stride() for tensor in tensors] == [torch.empty(tensor.shape).stride() for tensor in tensors]

    def compiled(*arguments: object) -> object:
        asked.append(arguments)
        return launched

    monkeypatch.setattr(module, "compiled", compiled)
    return asked


@pytest.mark.parametrize(
    ("columns", "dtype", "message"), [(16384, FLOAT, ""), (16385, FLOAT, "16384 columns"), (64, torch.float64, "fp32")]
)
def test_topk(columns: int, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = expert("topk")
    asked = compiles_nothing(module, monkeypatch)
    out = (torch.empty(2, 8, dtype=dtype), torch.empty(2, 8, dtype=torch.int64))
    call(module, message, torch.empty(2, columns, dtype=dtype), out=out)
    assert bool(asked) is not bool(message)


@pytest.mark.parametrize(
    ("channels", "filters", "size", "stride", "pad", "message"),
    [
        (64, 72, 3, 2, 1, ""), (32, 64, 3, 1, 1, "C a multiple"), (64, 12, 3, 1, 1, "F of 8"),
        (64, 64, 3, 1, 0, "padded"), (64, 64, 2, 1, 1, "odd filters"), (64, 64, 3, 3, 1, "stride 1 or 2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_conv2d(
    channels: int, filters: int, size: int, stride: int, pad: int, message: str, layout: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = expert("conv2d")
    asked = compiles_nothing(module, monkeypatch)
    x = torch.empty(2, channels, 9, 9, dtype=HALF, memory_format=layout)
    w = torch.empty(filters, channels, size, size, dtype=HALF, memory_format=layout)
    side = (9 + 2 * pad - size) // stride + 1
    y = torch.empty(2, filters, side, side, dtype=HALF, memory_format=layout)
    call(module, message, x, w, stride=stride, pad=pad, out=y)
    # Contiguous tensors are reordered by a kernel of its own.
    assert len(asked) == (0 if message else 1 if layout is torch.channels_last else 2)


def test_conv2d_takes_no_mixed_layouts() -> None:
    x = torch.empty(1, 64, 8, 8, dtype=HALF)
    w = torch.empty(64, 64, 3, 3, dtype=HALF).to(memory_format=torch.channels_last)
    call(expert("conv2d"), "all contiguous", x, w, stride=1, pad=1, out=torch.empty_like(x))


@pytest.mark.parametrize(
    ("width", "dtype", "window", "message"),
    [(128, BRAIN, 0, ""), (96, HALF, 0, "heads of 64 or 128"), (64, FLOAT, 0, "fp16 or bf16"), (64, HALF, 9, "window")],
)
def test_fmha(width: int, dtype: torch.dtype, window: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = expert("fmha")
    asked = compiles_nothing(module, monkeypatch)
    q, k, v = (torch.empty(1, heads, 9, width, dtype=dtype) for heads in (4, 2, 2))
    call(module, message, q, k, v, out=torch.empty_like(q), causal=1, window=window)
    assert bool(asked) is not bool(message)


def test_one_head_has_two_layouts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = expert("fmha")
    asked = compiles_nothing(module, monkeypatch)
    module.run(
        *(torch.empty(2, 9, 1, 64, dtype=HALF).transpose(1, 2) for _ in "qkv"), out=torch.empty(2, 1, 9, 64).half()
    )
    assert len(asked) == 1


def test_one_pixel_has_two_layouts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = expert("conv2d")
    asked = compiles_nothing(module, monkeypatch)
    x, w, y = (torch.empty(count, 64, 1, 1, dtype=HALF) for count in (2, 64, 2))
    module.run(x, w, stride=1, pad=0, out=y)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("heads", "width", "dtype", "message"),
    [
        (4, 64, BRAIN, ""),
        (4, 32, BRAIN, "heads of 64 or 128"),
        (3, 64, BRAIN, "multiple of HQK"),
        (4, 64, HALF, "bf16"),
    ],
)
def test_gdn(heads: int, width: int, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = expert("gdn")
    asked = compiles_nothing(module, monkeypatch)
    q, k, v, o = (torch.empty(70, count, width, dtype=dtype) for count in (2, 2, heads, heads))
    gates, state = torch.empty(70, heads), torch.empty(heads, width, width)
    call(module, message, q, k, v, gates, gates, out=(o, state))
    assert len(asked) == (0 if message else 2)


def test_what_32_bits_do_not_count_is_refused() -> None:
    def far(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    message = "fewer than 2.31 elements"
    rows = far(1 << 17, 16384, dtype=FLOAT)
    call(expert("topk"), message, rows, out=(far(1 << 17, 8, dtype=FLOAT), far(1 << 17, 8, dtype=torch.int64)))
    images = far(1 << 11, 64, 128, 128)
    call(expert("conv2d"), message, images, far(64, 64, 3, 3), stride=1, pad=1, out=images)
    images = far(1 << 9, 64, 128, 129)
    call(expert("conv2d"), "8388480 pixels", images, far(64, 64, 3, 3), stride=1, pad=1, out=images)
    keys, values = far(1 << 20, 1, 64, dtype=BRAIN), far(1 << 20, 32, 64, dtype=BRAIN)
    gates, state = far(1 << 20, 32, dtype=FLOAT), far(32, 64, 64, dtype=FLOAT)
    call(expert("gdn"), message, keys, keys, values, gates, gates, out=(values, state))


def call(module: ModuleType, message: str, *inputs: torch.Tensor, **named: object) -> None:
    """Call an expert, which refuses with a message if there is one."""
    if not message:
        module.run(*inputs, **named)
        return
    with pytest.raises(ValueError, match=message):
        module.run(*inputs, **named)
