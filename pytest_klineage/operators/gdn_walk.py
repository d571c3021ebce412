"""The walk over chunks of gdn_fused_fwd as mathematics, and the variance of its rounding errors.

Tensors are in chunks: q, k, v [n,h,C,D], inverse [n,h,C,C], sums, beta [n,h,C]; states are [h,D,D], key x value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_klineage.operators.gdn_chunked import pair_variance
from pytest_klineage.operators.gdn_phases import decays_between

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ChunkedInputs:
    """One problem in one data type, with one key head per value head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    inverse: torch.Tensor
    sums: torch.Tensor
    """Gates summed from the chunk's start, in log space."""
    beta: torch.Tensor
    state: torch.Tensor
    scale: float


@dataclass(frozen=True)
class GdnResult:
    """Results, and what the error model needs of the way to them."""

    chunks: ChunkedInputs
    between: torch.Tensor
    """exp of the gates between tokens j and i for j <= i, else zero, [n,h,C,C]."""
    starts: torch.Tensor
    """State before every chunk, [n,h,D,D]."""
    residuals: torch.Tensor
    """What the inverse is multiplied by, [n,h,C,D]."""
    updates: torch.Tensor
    """What is written to the state, [n,h,C,D]."""
    o: torch.Tensor
    state: torch.Tensor
    """State after the last chunk, [h,D,D]."""


def walk(chunks: ChunkedInputs, *, operand: torch.dtype | None = None) -> GdnResult:
    """Outputs and final state. With `operand`, operands of matrix products are rounded to it, as tensor cores need."""
    import torch

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b if operand is None else a.to(operand).to(a.dtype) @ b.to(operand).to(b.dtype)

    c = chunks
    between, decay = decays_between(c.sums), c.sums.exp()[..., None]
    weights = product(c.q, c.k.transpose(-1, -2)).mul_(between)
    beta, to_end = c.beta[..., None], between[..., -1, :, None]
    state, starts, residuals, updates = c.state, [], [], []
    for n in range(len(c.v)):
        starts.append(state)
        residuals.append(beta[n] * (c.v[n] - decay[n] * product(c.k[n], state)))
        updates.append(product(c.inverse[n], residuals[-1]))
        state = state * decay[n, :, -1, None] + product(c.k[n].transpose(-1, -2), to_end[n] * updates[-1])
    before, u = torch.stack(starts), torch.stack(updates)
    o = (product(c.q, before).mul_(decay) + product(weights, u)) * c.scale
    return GdnResult(
        chunks=c, between=between, starts=before, residuals=torch.stack(residuals), updates=u, o=o, state=state
    )  # fmt: skip


def walk_variance(form: GdnResult, *, product: float, fp32: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance of the rounding errors of o [n,h,C,D] and of the final state [h,D,D].

    `product` is the variance of the relative error of one matrix product, `fp32` that of rounding to fp32 once. As in
    `gdn_chunked.rounding_variance`: errors are independent, variances move through squared operands. The inverse is an
    input, so it is exact here; what it is multiplied by is not.
    """
    import torch

    c = form.chunks
    q, k, inverse, betas = c.q.square(), c.k.square(), c.inverse.square(), c.beta.square()[..., None]
    decay = c.sums.mul(2).exp_()[..., None]
    # exp of a sum of gates is as wrong, relatively, as the sum is when it is scaled; a quarter is its mean square.
    drift = c.sums.square().mul_(fp32 / 4)
    pairs = drift[..., :, None] + drift[..., None, :]
    weights, weights_error = pair_variance(c.q, c.k, form.between, product, pairs)
    to_end = form.between[..., -1, :, None].square()
    kept = (c.beta[..., None] * k).sum(-2).mul_(-2).exp_()
    ends = torch.cat([form.starts[1:], form.state[None]]).square_()
    variance, spread = torch.zeros_like(form.state), []
    for n in range(len(c.v)):
        before, updates, residuals = form.starts[n].square(), form.updates[n].square(), form.residuals[n].square()
        faded = product + drift[n, ..., None]
        unsure = betas[n] * (fp32 * c.v[n].square() + decay[n] * (faded * (k[n] @ before) + k[n] @ variance))
        wrong = inverse[n] @ (unsure + product * residuals) + product * updates
        state_part = decay[n] * (faded * (q[n] @ before) + q[n] @ variance)
        spread.append(state_part + (weights_error[n] + product * weights[n]) @ updates + weights[n] @ wrong)
        written = wrong + pairs[n, :, -1, :, None] * updates
        variance = variance * kept[n, ..., None] * decay[n, :, -1, None]
        variance += (k[n] * to_end[n]).transpose(-1, -2) @ written + fp32 * to_end[n].sum(-2)[..., None] * ends[n]
    return torch.stack(spread).mul_(c.scale**2), variance
