"""The gated delta rule in chunks and its three phases, composed of torch operators, as fast as these make it.

Torch has no such operator. Everything but the carried state is batched over chunks and heads; matrix products run in
the case's type; gates, triangular inverses and the carried state in fp32.
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
    key_heads, heads, width, size, tokens = case.shape.values()
    group, chunks = heads // key_heads, -(-tokens // size)
    masks: dict[torch.device, torch.Tensor] = {}

    def call(inputs: Tensors, outputs: Tensors) -> None:
        dtype = inputs["v"].dtype
        q, k = (split(inputs[name], size).contiguous() for name in "qk")
        v, g, beta = (split(inputs[name], size) for name in ("v", "g", "beta"))
        gc = g.cumsum(-1).view(chunks, key_heads, group, size)
        between, decay = decays_between(gc, masks), gc.exp().unsqueeze(-1)
        beta = beta.reshape(chunks, key_heads, group, size, 1)
        keys = (k @ k.transpose(-1, -2)).float().unsqueeze(2)
        inverse = unit_lower_inverse((keys * beta).mul_(between))
        # u = inverse (beta v) - inverse (beta decay k) S; value heads that share a key head share its product.
        values = inverse.flatten(1, 2).to(dtype) @ (v * beta.flatten(1, 2)).to(dtype)
        readers = (inverse * (beta * decay).transpose(-1, -2)).flatten(2, 3).to(dtype) @ k
        carry(inputs, outputs, q, k, between, decay, values, readers.view(chunks, heads, size, width))

    return call


def prepare_gdn_cumsum(case: KernelCase) -> Call:
    """The timed call of a gdn_cumsum case: torch.cumsum along every full chunk, into the output."""
    import torch

    heads, size, tokens = case.shape.values()
    full = tokens // size * size

    def call(inputs: Tensors, outputs: Tensors) -> None:
        g, gc = inputs["g"], outputs["gc"]
        torch.cumsum(g[:full].view(-1, size, heads), 1, out=gc[:full].view(-1, size, heads))
        if full < tokens:
            torch.cumsum(g[full:], 0, out=gc[full:])

    return call


def prepare_gdn_kkt_solve(case: KernelCase) -> Call:
    """The timed call of a gdn_kkt_solve case."""
    key_heads, heads, _width, size, tokens = case.shape.values()
    group = heads // key_heads
    chunks = -(-tokens // size)
    masks: dict[torch.device, torch.Tensor] = {}

    def call(inputs: Tensors, outputs: Tensors) -> None:
        # In fp32: the inverse is rounded to the case's type once, at its end.
        keys = split(inputs["k"], size).float()
        gc = split(inputs["gc"], size, repeat_last=True).reshape(chunks, key_heads, group, size)
        beta = split(inputs["beta"], size).reshape(chunks, key_heads, group, size, 1)
        products = (keys @ keys.transpose(-1, -2)).unsqueeze(2)
        inverse = block_inverse((products * beta).mul_(decays_between(gc, masks)))
        solved = inverse.flatten(1, 2).transpose(1, 2).flatten(0, 1)[:tokens]
        outputs["inverse"].copy_(solved)

    return call


def prepare_gdn_fused_fwd(case: KernelCase) -> Call:
    """The timed call of a gdn_fused_fwd case."""
    key_heads, heads, width, size, tokens = case.shape.values()
    group, chunks = heads // key_heads, -(-tokens // size)
    masks: dict[torch.device, torch.Tensor] = {}

    def call(inputs: Tensors, outputs: Tensors) -> None:
        dtype = inputs["v"].dtype
        q, k = (split(inputs[name], size).contiguous() for name in "qk")
        v, inverse, beta = (split(inputs[name], size) for name in ("v", "inverse", "beta"))
        gc = split(inputs["gc"], size, repeat_last=True).reshape(chunks, key_heads, group, size)
        between, decay = decays_between(gc, masks), gc.exp().unsqueeze(-1)
        # As above: u = inverse (beta v) - inverse (beta decay k) S.
        values = inverse @ (v * beta.unsqueeze(-1)).to(dtype)
        faded = (beta.reshape(chunks, key_heads, group, size) * decay.squeeze(-1)).flatten(1, 2)
        scaled = (inverse * faded.unsqueeze(-2)).to(dtype).reshape(chunks, key_heads, group * size, size)
        carry(inputs, outputs, q, k, between, decay, values, (scaled @ k).view(chunks, heads, size, width))

    return call


def carry(
    inputs: Tensors, outputs: Tensors, q: torch.Tensor, k: torch.Tensor, between: torch.Tensor, decay: torch.Tensor,
    values: torch.Tensor, readers: torch.Tensor,
) -> None:  # fmt: skip
    """Carry the state from chunk to chunk, and fill the outputs o and state.

    q and k: [n,HQK,C,D]. between and decay: exp of summed gates, between tokens [n,HQK,group,C,C] and from the chunk's
    start [n,HQK,group,C,1]. values and readers: [n,HV,C,D].
    """
    import torch

    chunks, heads, size, width = values.shape
    scale, dtype = width**-0.5, values.dtype
    weights = ((q @ k.transpose(-1, -2)).float() * scale).unsqueeze(2) * between
    writers = (k.unsqueeze(2) * between[..., -1, :].unsqueeze(-1)).to(dtype).flatten(1, 2).transpose(-1, -2)
    ends = decay.flatten(1, 2)[:, :, -1:]
    state = inputs["state0"] if "state0" in inputs else decay.new_zeros(heads, width, width)
    starts, updates = values.new_empty(chunks, heads, width, width), torch.empty_like(values)
    for chunk in range(chunks):
        starts[chunk] = state
        torch.baddbmm(values[chunk], readers[chunk], starts[chunk], alpha=-1, out=updates[chunk])
        state = torch.addcmul(torch.bmm(writers[chunk], updates[chunk]).float(), state, ends[chunk])
    reads = (q.unsqueeze(2) * (decay * scale)).to(dtype).reshape(-1, size, width)
    o = torch.bmm(reads, starts.flatten(0, 1))
    o.baddbmm_(weights.to(dtype).reshape(-1, size, size), updates.flatten(0, 1))
    outputs["o"].copy_(o.view(chunks, heads, size, width).transpose(1, 2).flatten(0, 1)[: len(outputs["o"])])
    outputs["state"].copy_(state)


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
    return merged(lower, inverse)


def block_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of I + the strictly lower part of `lower` [...,n,n] in fp32.

    Diagonal blocks by substitution, then merged. `unit_lower_inverse` takes powers of the blocks instead, which is
    faster and, when keys are alike, loses the digits that this operator is judged by.
    """
    import torch

    size = lower.shape[-1]
    span = size if size & (size - 1) else min(size, INVERSE_BASE)
    blocks = diagonal_blocks(lower, span)
    identity = torch.eye(span, dtype=lower.dtype, device=lower.device).expand_as(blocks)
    inverse: torch.Tensor = torch.linalg.solve_triangular(blocks, identity, upper=False, unitriangular=True).tril()
    return merged(lower, inverse)


def merged(lower: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Inverse of I + the strictly lower part of `lower` [...,n,n] from those of its diagonal blocks [...,k,m,m]."""
    size, span = lower.shape[-1], inverse.shape[-1]
    while span < size:
        # inv([[A, 0], [C, B]]) = [[A', 0], [-B' C A', B']].
        corner = diagonal_blocks(lower, 2 * span)[..., span:, :span]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        joined = inverse.new_zeros(*corner.shape[:-2], 2 * span, 2 * span)
        joined[..., :span, :span], joined[..., span:, span:] = first, second
        joined[..., span:, :span] = (second @ corner @ first).neg_()
        inverse, span = joined, 2 * span
    return inverse.squeeze(-3)


def diagonal_blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """The square blocks of `size` on the diagonal of [...,n,n]: a view [...,n/size,size,size]."""
    count = matrix.shape[-1] // size
    blocks = matrix.view(*matrix.shape[:-2], count, size, count, size)
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def split(tensor: torch.Tensor, size: int, *, repeat_last: bool = False) -> torch.Tensor:
    """[T,h,...] to [n,h,size,...], without a copy where all chunks are full.

    A last chunk that is not full is filled with zeros, which change nothing, or with the last token's values.
    """
    import torch

    missing = -len(tensor) % size
    if missing:
        last = tensor[-1:] if repeat_last else torch.zeros_like(tensor[-1:])
        tensor = torch.cat([tensor, last.expand(missing, *tensor.shape[1:])])
    return tensor.reshape(-1, size, *tensor.shape[1:]).transpose(1, 2)


def decays_between(gc: torch.Tensor, masks: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    """exp of the gates between tokens j and i for j <= i, else zero: [...,C] to [...,C,C]. `masks` is a cache."""
    import torch

    if gc.device not in masks:
        size = gc.shape[-1]
        masks[gc.device] = torch.ones(size, size, dtype=torch.bool, device=gc.device).triu_(1)
    # Masked before exp: above the diagonal the differences are positive and may overflow.
    return (gc.unsqueeze(-1) - gc.unsqueeze(-2)).masked_fill_(masks[gc.device], float("-inf")).exp_()
