"""Without a GPU: TileLang and nvcc build the kernels of a user's operators, and Triton's are right when interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from open_kernels import ATTACKS, FOLDER, HONEST, NUMBERS, source_of

from pytest_klineage.errors import MissingDependency
from pytest_klineage.gate import GateSettings
from pytest_klineage.gate.stages.build import build_kernel
from pytest_klineage.records import Surface
from pytest_klineage.surfaces.toolkit import find_toolkit, package_folders

INTERPRETED = """
import definitions
import rows_triton
import torch

ATTACKS = {"unwritten_row", "lower_precision", "memo_by_samples", "mutated_input"}


def softmax_by(name, x, out):
    before = x.clone()
    getattr(rows_triton, name)(x, out)
    return torch.allclose(out, definitions.softmax.function(before)) and torch.equal(x, before)


def on(name, *inputs, out=None, **options):
    own = [tensor.clone() for tensor in inputs]
    expected = getattr(definitions, name).function(*inputs, **options)
    shaped = [torch.empty_like(tensor) for tensor in (expected if isinstance(expected, tuple) else (expected,))]
    out = [] if name == "add_norm" else shaped
    given = {"out": out[0] if len(out) == 1 else tuple(out)} if out else {}
    getattr(rows_triton, name)(*own, **given, **options)
    torch.testing.assert_close(tuple(out or own[:2]), tuple(expected) if len(shaped) > 1 else (expected,))


torch.manual_seed(0)
for rows, columns in ((5, 64), (3, 1000)):
    x, residual, w = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns)
    on("softmax", x)
    on("add_norm", x, residual, w, eps=1e-6)
    on("layer_norm", x, eps=1e-5)
    on("dequantise", x.to(torch.float8_e4m3fn), torch.rand(rows))
    on("classify", x, limit=0.5)
    out = torch.full_like(x, torch.nan)
    assert softmax_by("softmax", x.clone(), out)
    for name in sorted(ATTACKS):
        rows_triton.ANSWERS.clear()
        other = x.clone()
        other[-1] += torch.randn(columns)
        # One of two problems, the second like the first in the sample, must come out wrong.
        right = [softmax_by(name, tensor.clone(), torch.full_like(x, torch.nan)) for tensor in (x, other)]
        assert not all(right), name
print("right")
"""


def absent(surface: Surface) -> str:
    """Why kernels of a language cannot be built here; empty where they can."""
    if not package_folders(surface.value):
        return f"{surface.value} is not installed"
    try:
        find_toolkit()
    except MissingDependency as error:
        return str(error)
    return ""


def test_every_kernel_has_an_entry() -> None:
    for surface, file in ((Surface.TRITON, "rows_triton.py"), (Surface.TILELANG, "rows_tilelang.py")):
        text = (FOLDER / file).read_text()
        names = {*HONEST, *(attack.source.entry for attack in ATTACKS if attack.surface is surface)}
        assert not {name for name in names if f"\ndef {name}(" not in text}
    assert {attack.name for attack in ATTACKS} | {*HONEST} | {"iterated"} == {*NUMBERS}


@pytest.mark.skipif(bool(absent(Surface.TILELANG)), reason=absent(Surface.TILELANG) or "is there")
@pytest.mark.parametrize("name", ["dequantise", pytest.param("classify", marks=pytest.mark.nightly)])
def test_tilelang_builds_what_the_file_declares(name: str, tmp_path: Path) -> None:
    source = source_of(Surface.TILELANG, name)
    built = build_kernel(source, "sm90", GateSettings(cache_dir=tmp_path, build_timeout_s=300)).build
    assert len(built.kernels) == 2


@pytest.mark.skipif(not (package_folders("triton") and package_folders("numpy")), reason="triton or NumPy is absent")
def test_tritons_kernels_are_right_when_interpreted() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED], cwd=FOLDER, env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "right\n", done.stderr
