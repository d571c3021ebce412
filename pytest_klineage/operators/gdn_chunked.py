"""The gated delta rule as mathematics: token by token, in chunks, and the variance of its rounding errors.

Everything here has heads first and one key head per value head: q, k [H,T,D], v [H,T,D], g, beta [H,T], state [H,D,D]
(key x value). The chunk form is that of Yang et al., "Gated Delta Networks" (2024), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GatedDeltaRule:
    """One gated delta rule in one data type. `scale` multiplies the outputs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    scale: float

    def in_chunks(self, size: int) -> GatedDeltaRule:
        """[H,T,…] to [n,H,size,…]. Tokens that fill the last chunk change nothing: their k, v, g and beta are zero."""
        import torch

        missing = -self.v.shape[1] % size

        def split(tensor: torch.Tensor) -> torch.Tensor:
            """One tensor, padded with zeros."""
            heads, _tokens, *rest = tensor.shape
            padded = torch.cat([tensor, tensor.new_zeros(heads, missing, *rest)], dim=1) if missing else tensor
            return padded.reshape(heads, -1, size, *rest).transpose(0, 1).contiguous()

        q, k, v, g, beta = (split(tensor) for tensor in (self.q, self.k, self.v, self.g, self.beta))
        return replace(self, q=q, k=k, v=v, g=g, beta=beta)


@dataclass(frozen=True)
class ChunkForm:
    """The chunk form's intermediate results; everything but `state` is [n,H,…] for n chunks of C tokens."""

    problem: GatedDeltaRule
    """The problem in chunks."""
    decay: torch.Tensor
    """exp of the gates' sum from the chunk's start up to each token, [n,H,C]."""
    between: torch.Tensor
    """exp of the gates between tokens j and i for j <= i, else zero, [n,H,C,C]."""
    starts: torch.Tensor
    """State before every chunk, [n,H,D,D]."""
    updates: torch.Tensor
    """u of every token, [n,H,C,D]."""
    state: torch.Tensor
    """State after the last chunk, [H,D,D]."""
    o: torch.Tensor
    """Outputs, [n,H,C,D]."""


def sequential(problem: GatedDeltaRule) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one token after the other, vectorised over heads: o [H,T,D] and the final state."""
    import torch

    q, k, v = (tensor.transpose(0, 1).unsqueeze(2).contiguous() for tensor in (problem.q, problem.k, problem.v))
    columns = k.transpose(2, 3)
    gates = problem.g.exp().t()[..., None, None].contiguous()
    betas = problem.beta.t()[..., None, None].contiguous()
    state, o = problem.state.clone(), torch.empty_like(v)
    for t in range(v.shape[0]):
        state.mul_(gates[t])
        update = torch.baddbmm(v[t], k[t], state, alpha=-1).mul_(betas[t])
        state.baddbmm_(columns[t], update)
        torch.bmm(q[t], state, out=o[t])
    return o.squeeze(2).transpose(0, 1) * problem.scale, state


def chunked(problem: GatedDeltaRule, size: int, *, operand: torch.dtype | None = None) -> ChunkForm:
    """The chunk form. With `operand`, every operand of a matrix product is rounded to it, as tensor cores need."""
    import torch

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b if operand is None else a.to(operand).to(a.dtype) @ b.to(operand).to(b.dtype)

    p = problem.in_chunks(size)
    total = p.g.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    later = torch.ones(size, size, dtype=torch.bool, device=p.v.device).triu_(1)
    # Masked before exp: above the diagonal the differences are positive and may overflow.
    between = between.masked_fill_(later, float("-inf")).exp_()
    transposed = p.k.transpose(-1, -2)
    lower = (product(p.k, transposed) * between * p.beta[..., None]).tril_(-1)
    weights = product(p.q, transposed).mul_(between)
    decay = total.exp()
    to_end = between[..., -1, :]
    right = torch.cat([p.v * p.beta[..., None], p.k * (p.beta * decay)[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    values, readers = solved.split(p.v.shape[-1], dim=-1)
    state, starts, updates = problem.state, [], []
    for chunk in range(p.v.shape[0]):
        starts.append(state)
        updates.append(values[chunk] - product(readers[chunk], state))
        written = product((p.k[chunk] * to_end[chunk, ..., None]).transpose(-1, -2), updates[-1])
        state = state * decay[chunk, :, -1, None, None] + written
    before, u = torch.stack(starts), torch.stack(updates)
    o = (product(p.q * decay[..., None], before) + product(weights, u)) * problem.scale
    return ChunkForm(problem=p, decay=decay, between=between, starts=before, updates=u, state=state, o=o)


def joined(chunks: torch.Tensor, tokens: int) -> torch.Tensor:
    """[n,H,C,D] to [H,T,D], without the tokens that filled the last chunk."""
    return chunks.transpose(0, 1).flatten(1, 2)[:, :tokens]


def rounding_variance(form: ChunkForm, *, product: float, fp32: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance of the rounding errors of o [n,H,C,D] and of the final state [H,D,D].

    `product` is the variance of the relative error of one matrix product, `fp32` that of rounding to fp32 once. Errors
    of different elements are taken as independent, so variances move through squared operands. One token replaces an
    error E of the state by exp(g) (I - beta k k^T) E: rows shrink by (1 - beta k^2)^2, and what the token reads of E is
    written back in the other rows.
    """
    import torch

    p, decay, size = form.problem, form.decay.square(), form.between.shape[-1]
    q, k, betas = p.q.square(), p.k.square(), p.beta.square()[..., None]
    # exp of a sum of gates is as wrong, relatively, as the rounded sum is absolutely; a quarter is its mean square.
    drift = p.g.cumsum(-1).square().mul_(fp32 / 4)
    pairs = drift[..., :, None] + drift[..., None, :]
    weights, weights_error = pair_variance(p.q, p.k, form.between, product, pairs)
    lower, lower_error = (betas * tensor for tensor in pair_variance(p.k, p.k, form.between, product, pairs))
    strictly = torch.ones(size, size, dtype=torch.bool, device=q.device).tril_(-1)
    lower_error = (lower_error + product * lower).masked_fill_(~strictly, 0.0)
    to_end = form.between[..., -1, :, None].square()
    kept = (p.beta[..., None] * k).sum(-2).mul_(-2).exp_()
    ends = torch.cat([form.starts[1:], form.state[None]]).square_()
    variance, spread = torch.zeros_like(form.state), []
    for c in range(p.v.shape[0]):
        before, fade, updates = form.starts[c].square(), decay[c, ..., None], form.updates[c].square()
        faded = product + drift[c, ..., None]
        wrong = betas[c] * (product * p.v[c].square() + fade * (faded * (k[c] @ before) + k[c] @ variance))
        wrong += lower_error[c] @ updates + product * updates
        state_part = fade * (faded * (q[c] @ before) + q[c] @ variance)
        spread.append(state_part + (weights_error[c] + product * weights[c]) @ updates + weights[c] @ wrong)
        written = wrong + pairs[c, :, -1, :, None] * updates
        variance = variance * kept[c, ..., None] * decay[c, :, -1, None, None]
        variance += (k[c] * to_end[c]).transpose(-1, -2) @ written + fp32 * to_end[c].sum(-2)[..., None] * ends[c]
    return torch.stack(spread).mul_(p.scale**2), variance


def pair_variance(
    left: torch.Tensor, right: torch.Tensor, between: torch.Tensor, product: float, drift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squares of left_i . right_j times `between`, and the variance of their errors, [n,H,C,C].

    A small product of two large vectors keeps the rounding errors of its terms; `drift` is the relative variance of
    `between`.
    """
    decays, transposed = between.square(), right.transpose(-1, -2)
    squares = (left @ transposed).square_().mul_(decays)
    return squares, (left.square() @ transposed.square()).mul_(decays).mul_(product).add_(drift * squares)
