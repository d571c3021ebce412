"""Stand-ins for libraries and a clock that need a GPU: signatures and conventions as theirs, computed on a CPU.

Written after the sources of flashinfer-python 0.6.11 and fla-core 0.5.0: layouts, gates and checks are theirs, the
arithmetic is the definition. The clock is a fake one: without CUDA there are no events.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_klineage.records import KernelCase
from pytest_klineage.references import TrialTensors, choose
from pytest_klineage.worker.reference_kernel import trial_of


class Clock:
    """Runs what it is given and says that it took the next of some times, going round."""

    def __init__(self, *times_ms: float) -> None:
        self.times_ms, self.calls = times_ms or (1.0,), 0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.calls += 1
        return self.times_ms[(self.calls - 1) % len(self.times_ms)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Every choice is made by this clock; set `times_ms` for one time per variant."""
    made = Clock()
    monkeypatch.setattr(choose, "DeviceTimer", lambda: made)
    return made


@pytest.fixture
def trial() -> Callable[..., TrialTensors]:
    """What a worker on a GPU would hand over, on the CPU."""

    def make(case: KernelCase, platform: str = "sm90") -> TrialTensors:
        return trial_of(case, platform, device="cpu")

    return make


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> type[Ragged]:
    """A stand-in for FlashInfer is installed; the class of its attention is returned."""
    monkeypatch.setattr(Ragged, "made", [])
    install(monkeypatch, "flashinfer.prefill", BatchPrefillWithRaggedKVCacheWrapper=Ragged)
    install(monkeypatch, "flashinfer.topk", top_k=flashinfer_top_k)
    install(monkeypatch, "flashinfer.gdn_prefill", chunk_gated_delta_rule=flashinfer_gdn)
    return Ragged


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for flash-linear-attention is installed."""
    install(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=fla_gdn)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither library can be imported, whatever this machine has."""
    for name in ("flashinfer", "fla"):
        for loaded in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])


class Absent:
    """An import system that has not heard of them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("flashinfer", "fla"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def install(monkeypatch: pytest.MonkeyPatch, dotted: str, **contents: Any) -> None:
    """Put a module in front of what is installed."""
    parts = dotted.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if not isinstance(vars(sys.modules.get(parent, types)).get("stand_in"), bool):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
            vars(sys.modules[parent])["stand_in"] = True
    module = types.ModuleType(dotted)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, dotted, module)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule in float64: q, k [T,HQK,D], v [T,HV,D], decay, beta [T,HV], state [HV,K,V]."""
    group = v.shape[1] // q.shape[1]
    q, k = (tensor.double().repeat_interleave(group, dim=1) for tensor in (q, k))
    v, decay, beta, state = v.double(), decay.double(), beta.double(), state.double()
    o = torch.empty_like(v)
    for token in range(len(v)):
        state = state * decay[token][:, None, None]
        read = torch.einsum("hkv,hk->hv", state, k[token])
        update = beta[token][:, None] * (v[token] - read)
        state = state + torch.einsum("hk,hv->hkv", k[token], update)
        o[token] = scale * torch.einsum("hkv,hk->hv", state, q[token])
    return o, state


def flashinfer_gdn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
) -> Any:
    """flashinfer.gdn_prefill.chunk_gated_delta_rule: linear gates, states [N,H,V,K]."""
    assert g is not None
    assert beta is not None
    assert cu_seqlens is not None
    assert all(tensor.is_contiguous() for tensor in (q, k, v, g, beta))
    assert (g.dtype, beta.dtype, cu_seqlens.dtype) == (torch.float32, torch.float32, torch.int64)
    assert cu_seqlens.tolist() == [0, len(q)]
    assert bool((g > 0).all()), "log-space gates: the kernel takes their logarithm once more"
    heads, width = v.shape[1], v.shape[2]
    state = torch.zeros(heads, width, width)
    if initial_state is not None:
        assert initial_state.shape == (1, heads, width, width)
        assert initial_state.is_contiguous()
        assert initial_state.dtype == torch.float32
        state = initial_state[0].transpose(-1, -2)
    o, state = recurrence(q, k, v, g, beta, scale or 1 / math.sqrt(width), state)
    o, state = o.to(q.dtype), state.float().transpose(-1, -2).contiguous().unsqueeze(0)
    return (o, state) if output_final_state else o


def fla_gdn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> Any:
    """fla.ops.gated_delta_rule.chunk_gated_delta_rule: a batch in front, log-space gates, states [N,HV,K,V]."""
    assert q.ndim == k.ndim == v.ndim == 4
    assert len(q) == len(v) == len(g) == len(beta) == 1
    assert bool((g <= 0).all()), "gates are logarithms here"
    assert not use_qk_l2norm_in_kernel
    heads, width = v.shape[2], v.shape[3]
    state = torch.zeros(heads, width, width) if initial_state is None else initial_state[0]
    assert state.shape == (heads, width, width)
    o, state = recurrence(q[0], k[0], v[0], g[0].double().exp(), beta[0], scale or width**-0.5, state)
    return o.to(q.dtype).unsqueeze(0), state.float().unsqueeze(0) if output_final_state else None


def flashinfer_top_k(x: torch.Tensor, k: int, sorted: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """flashinfer.topk.top_k: values in the input's type, indices int64, here in the reverse of any order."""
    values, indices = x.topk(k, dim=1)
    return values.flip(1), indices.flip(1)


class Ragged:
    """flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper: sequences one after another, [tokens, heads, D]."""

    made: list[Ragged] = []  # noqa: RUF012 - the tests look at what the reference made

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.backend, self.plans, self.runs = backend, 0, 0
        Ragged.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """As the library's, as far as it is used."""
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.starts, self.heads, self.width, self.causal = qo_indptr.tolist(), num_qo_heads, head_dim_qk, causal
        self.scale, self.dtype, self.plans = sm_scale, q_data_type, self.plans + 1
        self.key_heads, self.window_left = num_kv_heads, window_left

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """As the library's: writes into `out`."""
        assert q.shape == out.shape == (self.starts[-1], self.heads, self.width)
        assert k.shape == v.shape == (self.starts[-1], self.key_heads, self.width)
        assert q.dtype == out.dtype == self.dtype
        self.runs += 1
        for start, stop in zip(self.starts, self.starts[1:], strict=False):
            heads = [tensor[start:stop].transpose(0, 1).float() for tensor in (q, k, v)]
            length = stop - start
            mask = torch.ones(length, length, dtype=torch.bool)
            mask = (mask.tril() if self.causal else mask).triu(-self.window_left if self.window_left >= 0 else -length)
            o = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=self.scale, enable_gqa=self.key_heads != self.heads
            )
            out[start:stop].copy_(o.transpose(0, 1))
        return out
