"""What the three phases of the gated delta rule in chunks share: chunks of tokens, decays, inverses, symmetries.

Tensors of an operator are [T,h,...]; in chunks they are [n,h,C,...] for n chunks of C tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_klineage.operators.distributions import normal, permutation, spiked, torch_dtype
from pytest_klineage.operators.gdn import gates

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors
    from pytest_klineage.records import KernelCase

ALIKE_SPREAD = 0.5
"""Size of what tells keys of the input distribution alike_keys apart: two of them have a cosine of about 0.8."""


def in_chunks(tensor: torch.Tensor, size: int, *, repeat_last: bool = False) -> torch.Tensor:
    """[T,h,...] to [n,h,size,...]. The last chunk is filled with zeros, or with the last token's values.

    Sums of gates need the latter: a token that is not there has a gate of zero, which changes no sum.
    """
    import torch

    missing = -len(tensor) % size
    if missing:
        last = tensor[-1:] if repeat_last else torch.zeros_like(tensor[-1:])
        tensor = torch.cat([tensor, last.expand(missing, *tensor.shape[1:])])
    return tensor.reshape(-1, size, *tensor.shape[1:]).transpose(1, 2).contiguous()


def joined(chunks: torch.Tensor, tokens: int) -> torch.Tensor:
    """[n,h,C,...] to [T,h,...], without the tokens that filled the last chunk."""
    return chunks.transpose(1, 2).flatten(0, 1)[:tokens].contiguous()


def chunk_sums(g: torch.Tensor, size: int) -> torch.Tensor:
    """Sums of gates [T,h] from the start of each token's chunk up to the token, [T,h]."""
    return joined(in_chunks(g, size).cumsum(-1), len(g))


def decays_between(sums: torch.Tensor) -> torch.Tensor:
    """exp of the gates between tokens j and i for j <= i, else zero; [...,C] to [...,C,C]."""
    import torch

    between = sums[..., :, None] - sums[..., None, :]
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=sums.device).triu_(1)
    # Masked before exp: above the diagonal the differences are positive and may overflow.
    return between.masked_fill_(later, float("-inf")).exp_()


def lower_system(keys: torch.Tensor, sums: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """tril(beta_i (k_i . k_j) exp(gates between j and i), -1) of keys [n,h,C,D], sums and beta [n,h,C]: [n,h,C,C]."""
    return (keys @ keys.transpose(-1, -2) * decays_between(sums) * beta[..., None]).tril_(-1)


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of I + `lower`, strictly lower triangular [...,C,C]; no pivots are needed."""
    import torch

    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse: torch.Tensor = torch.linalg.solve_triangular(
        lower, identity.expand_as(lower), upper=False, unitriangular=True
    )
    # The solver may leave zeros of either sign above the diagonal.
    return inverse.tril_()


def inverses(case: KernelCase, inputs: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of every chunk and value head, computed in `dtype` from k, gc and beta: [n,HV,C,C]."""
    heads, size = case.shape["HV"], case.shape["C"]
    keys = in_chunks(inputs["k"].to(dtype), size).repeat_interleave(heads // inputs["k"].shape[1], dim=1)
    sums = in_chunks(inputs["gc"].to(dtype), size, repeat_last=True)
    return unit_lower_inverse(lower_system(keys, sums, in_chunks(inputs["beta"].to(dtype), size)))


def draw_keys(case: KernelCase, generator: torch.Generator, input_distribution: str) -> torch.Tensor:
    """l2-normalised keys or queries [T,HQK,D] in float64."""
    key_heads, width, tokens = (case.shape[axis] for axis in ("HQK", "D", "T"))
    keys = normal((tokens, key_heads, width), generator)
    if input_distribution == "spikes":
        keys = spiked(keys, generator, count=max(1, tokens // 16), size=50.0)
    elif input_distribution == "alike_keys":
        keys = keys.mul_(ALIKE_SPREAD).add_(normal((1, key_heads, width), generator))
    return keys.div_(keys.norm(dim=-1, keepdim=True))


def draw_gates(case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
    """Sums of gates within each chunk, gc, and beta: [T,HV] fp32."""
    import torch

    heads, tokens = case.shape["HV"], case.shape["T"]
    g = gates(input_distribution, tokens, heads, generator).float()
    beta = torch.sigmoid(normal((tokens, heads), generator)).float()
    return {"gc": chunk_sums(g.double(), case.shape["C"]).float(), "beta": beta}


def in_dtype(case: KernelCase, tensor: torch.Tensor) -> torch.Tensor:
    """In the case's type."""
    return tensor.to(torch_dtype(case.dtype))


def chunk_order(tokens: int, size: int, generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """A random order of tokens that moves whole chunks; a last chunk that is not full stays where it is."""
    import torch

    full = tokens // size
    order, _ = permutation(full, generator, like)
    moved = (order[:, None] * size + torch.arange(size, device=like.device)).flatten()
    return torch.cat([moved, torch.arange(full * size, tokens, device=like.device)])
