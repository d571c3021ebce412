"""The gated delta rule in chunks, composed of torch operators, as fast as batched matrix products make it.

Torch has no such operator. Everything but the carried state is batched over chunks and heads; matrix products run in
the case's type, gates, the triangular inverse and the carried state in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_klineage.records import KernelCase

if TYPE_CHECKING:
    import torch

    from pytest_klineage.references.base import Call, Tensors

INVERSE_BASE = 16
"""Diagonal blocks are inverted by doubling up to this size, then merged: 0.7 ms against 2.2 ms of solve_triangular for
96 matrices of 64 x 64 (2 cores, Zen 4)."""


def prepare_gdn(case: KernelCase) -> Call:
    """The timed call of a gdn case."""
    import torch

    key_heads, heads, width, size, tokens = case.shape.values()
    group, chunks, missing = heads // key_heads, -(-tokens // size), -tokens % size
    scale = width**-0.5
    masks: dict[torch.device, torch.Tensor] = {}

    def split(tensor: torch.Tensor) -> torch.Tensor:
        """[T,h,…] to [n,h,C,…], padded with tokens that change nothing."""
        padded = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
        return padded.reshape(chunks, size, *tensor.shape[1:]).transpose(1, 2)

    def decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """exp of summed gates: from the chunk's start [n,HQK,group,C,1], and between tokens [n,HQK,group,C,C]."""
        if g.device not in masks:
            masks[g.device] = torch.ones(size, size, dtype=torch.bool, device=g.device).triu_(1)
        total = g.cumsum(-1).view(chunks, key_heads, group, size, 1)
        # Masked before exp: above the diagonal the differences are positive and may overflow.
        between = (total - total.transpose(-1, -2)).masked_fill_(masks[g.device], float("-inf")).exp_()
        return total.exp(), between

    def call(inputs: Tensors, outputs: Tensors) -> None:
        dtype = inputs["v"].dtype
        q, k = split(inputs["q"]).contiguous(), split(inputs["k"]).contiguous()
        v, g, beta = (split(inputs[name]) for name in ("v", "g", "beta"))
        decay, between = decays(g)
        beta = beta.reshape(chunks, key_heads, group, size, 1)
        keys = (k @ k.transpose(-1, -2)).float().unsqueeze(2)
        inverse = unit_lower_inverse((keys * beta).mul_(between))
        weights = ((q @ k.transpose(-1, -2)).float() * scale).unsqueeze(2) * between
        # u = inverse (beta v) - inverse (beta decay k) S; value heads that share a key head share its product.
        values = inverse.flatten(1, 2).to(dtype) @ (v * beta.flatten(1, 2)).to(dtype)
        readers = (inverse * (beta * decay).transpose(-1, -2)).flatten(2, 3).to(dtype) @ k
        readers = readers.view(chunks, heads, size, width)
        writers = (k.unsqueeze(2) * between[..., -1, :].unsqueeze(-1)).to(dtype).flatten(1, 2).transpose(-1, -2)
        ends = decay.flatten(1, 2)[:, :, -1:]
        state = inputs["state0"] if "state0" in inputs else g.new_zeros(heads, width, width)
        starts, updates = values.new_empty(chunks, heads, width, width), torch.empty_like(values)
        for chunk in range(chunks):
            starts[chunk] = state
            torch.baddbmm(values[chunk], readers[chunk], starts[chunk], alpha=-1, out=updates[chunk])
            written = torch.bmm(writers[chunk], updates[chunk])
            state = torch.addcmul(written.float(), state, ends[chunk])
        reads = (q.unsqueeze(2) * (decay * scale)).to(dtype).view(-1, size, width)
        o = torch.bmm(reads, starts.flatten(0, 1))
        o.baddbmm_(weights.to(dtype).view(-1, size, size), updates.flatten(0, 1))
        outputs["o"].copy_(o.view(chunks, heads, size, width).transpose(1, 2).flatten(0, 1)[:tokens])
        outputs["state"].copy_(state)

    return call


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of I + the strictly lower part of `lower` [...,n,n]; other elements of `lower` are not used."""
    import torch

    size = lower.shape[-1]
    identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
    inverse: torch.Tensor
    if size & (size - 1) or size < INVERSE_BASE:
        inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False, unitriangular=True)
        return inverse
    # A strictly lower block X of 16 rows has X^16 = 0: inv(I + X) = (I - X)(I + X^2)(I + X^4)(I + X^8).
    power = diagonal_blocks(lower, INVERSE_BASE).tril(-1).neg_()
    inverse = power + identity[:INVERSE_BASE, :INVERSE_BASE]
    for _ in range(INVERSE_BASE.bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    span = INVERSE_BASE
    while span < size:
        # inv([[A, 0], [C, B]]) = [[A', 0], [-B' C A', B']].
        corner = diagonal_blocks(lower, 2 * span)[..., span:, :span]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        merged = inverse.new_zeros(*corner.shape[:-2], 2 * span, 2 * span)
        merged[..., :span, :span], merged[..., span:, span:] = first, second
        merged[..., span:, :span] = (second @ corner @ first).neg_()
        inverse, span = merged, 2 * span
    return inverse.squeeze(-3)


def diagonal_blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """The square blocks of `size` on the diagonal of [...,n,n]: a view [...,n/size,size,size]."""
    count = matrix.shape[-1] // size
    blocks = matrix.view(*matrix.shape[:-2], count, size, count, size)
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
