"""gdn: gated delta rule over T tokens with a matrix state per value head, as in Gated DeltaNet's prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Cases, Operator
from pytest_klineage.operators.distributions import (
    normal,
    permutation,
    perturbed,
    random_index,
    signs,
    spiked,
    torch_dtype,
    uniform,
)
from pytest_klineage.operators.gdn_chunked import GatedDeltaRule, chunked, joined, rounding_variance, sequential
from pytest_klineage.operators.tolerance import UNIT_ROUNDOFF, Expected, output_rounding
from pytest_klineage.records import KernelCase, Option, Signature
from pytest_klineage.records.signature import dense

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo

LARGE = {"fp32": 1e12, "fp16": 64.0, "bf16": 1e12}
"""Factor of v in the large-values input distribution; o and the state are at most about as large as v."""

SEQUENTIAL_TOKENS = 1024
"""Up to here the oracle is the definition, token by token; above, it is the chunk form, in float64 both times."""

ORACLE_CHUNK = 64

AT_ONCE = 2**26
"""Elements of v that are evaluated at once, a few heads at a time: a chunk form holds many tensors of this size."""

HEAD_AXES = {"q": 1, "k": 1, "v": 1, "g": 1, "beta": 1, "state0": 0, "o": 1, "state": 0}
"""By input or output."""

SIMILAR_KEYS, UNLIKE = "similar_keys", 1.4
"""A check that no prompt names, and how much of each key there is its own, in what it shares with the others of its
head: the mean cosine of two keys is about a third."""

LONE_GATES, LONE_EVERY, LEAST_LONE, MOST_LONE = "lone_gates", 128, 30.0, 200.0
"""Another one: weak gates but for about one token of so many, which resets the state as between two documents, and how
strong its gate is. At -89 the reciprocal of a decay leaves fp32; a head's mean stays weak."""

LARGE_STATE, STATE_FACTOR = "large_state", 1e4
"""Another one, where a case has an initial state: how much larger that is than usually."""

PADDING, LARGE_BETA, PADDED = "padding", "large_beta", ("q", "k", "v", "g", "beta")
"""Two more, which the phases have as well: a run of tokens that are zero, as in padded batches, and which inputs these
are; and beta up to 2, as models with negative eigenvalues have it."""

PERTURBED_POSITIONS, VALUE_PERTURBATION = 8, 16.0
"""Of how many tokens one is chosen for a perturbation, and its size in v, in largest elements."""

IN_TORCH = """\
repeat = v.shape[1] // q.shape[1]
q, k = (one.float().repeat_interleave(repeat, dim=1) for one in (q, k))
state = {state}
rows = []
for t in range(v.shape[0]):
    state = state * torch.exp(g[t])[:, None, None]
    delta = beta[t][:, None] * (v[t].float() - torch.einsum("hkv,hk->hv", state, k[t]))
    state = state + k[t][:, :, None] * delta[:, None, :]
    rows.append({scale} * torch.einsum("hkv,hk->hv", state, q[t]))
return torch.stack(rows).to(v.dtype), state"""
"""The recurrence, token by token."""


class Gdn(Operator):
    """Gated delta rule. Axes HQK, HV, D, C (chunk), T. Value head h uses q and k of head h // (HV / HQK).

    Inputs q, k [T,HQK,D] (l2-normalised), v [T,HV,D], g [T,HV] fp32 (log-space gate <= 0), beta [T,HV] fp32, and with
    initial_state also state0 [HV,D,D] fp32 (key x value). Outputs o [T,HV,D], state [HV,D,D] fp32. By token:
    S <- exp(g_t) S; u = beta_t (v_t - S^T k_t); S <- S + k_t u^T; o_t = scale S^T q_t, scale = 1/sqrt(D).
    """

    name: ClassVar[str] = "gdn"
    axes: ClassVar[tuple[str, ...]] = ("HQK", "HV", "D", "C", "T")
    options: ClassVar[dict[str, tuple[Option, ...]]] = {"initial_state": (False, True)}
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    input_distributions: ClassVar[tuple[str, ...]] = (
        DEFAULT_DISTRIBUTION,
        "strong_gates",
        "gates_near_zero",
        "large_values",
        "spikes",
    )
    family: ClassVar[str] = "products of tiles"
    aliases: ClassVar[tuple[str, ...]] = ("gated_delta_net",)
    drawn_in_torch: ClassVar[dict[str, str]] = {
        "q": "torch.nn.functional.normalize({}, dim=-1)",
        "k": "torch.nn.functional.normalize({}, dim=-1)",
        "g": "torch.nn.functional.logsigmoid({})",
        "beta": "torch.sigmoid({})",
    }
    gpu_reference: ClassVar[str] = "flashinfer"
    published: ClassVar[Cases] = {
        "gpu": ((16, 48, 128, 64, 4096), "bf16", {}),
        "cpu": ((4, 12, 64, 64, 512), "fp32", {}),
    }
    small: ClassVar[Cases] = {"gpu": ((1, 3, 128, 64, 192), "bf16", {}), "cpu": ((1, 3, 32, 16, 96), "fp32", {})}

    def in_torch(self, case: KernelCase, *, in_order: bool = False) -> str:
        state = "v.new_zeros(v.shape[1], q.shape[2], v.shape[2], dtype=torch.float32)"
        if self.option(case, "initial_state"):
            state = "state0.float()"
        return IN_TORCH.format(state=state, scale=repr(case.shape["D"] ** -0.5))

    def validate(self, case: KernelCase) -> None:
        check_heads(case)

    def signature(self, case: KernelCase) -> Signature:
        key_heads, heads, width, chunk, tokens = case.shape.values()
        keys = [dense(name, case.dtype, tokens, key_heads, width) for name in "qk"]
        gates = [dense(name, "fp32", tokens, heads) for name in ("g", "beta")]
        state0 = [dense("state0", "fp32", heads, width, width)] if self.option(case, "initial_state") else []
        return Signature(
            inputs=(*keys, dense("v", case.dtype, tokens, heads, width), *gates, *state0),
            outputs=(dense("o", case.dtype, tokens, heads, width), dense("state", "fp32", heads, width, width)),
            scalars={"scale": width**-0.5, "chunk": float(chunk)},
        )

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        import torch

        key_heads, heads, width, _chunk, tokens = case.shape.values()
        q, k = normal((tokens, key_heads, width), generator), normal((tokens, key_heads, width), generator)
        v = normal((tokens, heads, width), generator)
        if input_distribution == "spikes":
            q, k = (spiked(tensor, generator, count=max(1, tokens // 16), size=50.0) for tensor in (q, k))
            v = spiked(v, generator, count=max(1, tokens // 16), size=50.0)
        elif input_distribution == "large_values":
            v *= LARGE[case.dtype]
        q, k = (tensor / tensor.norm(dim=-1, keepdim=True) for tensor in (q, k))
        dtype = torch_dtype(case.dtype)
        inputs = {
            "q": q.to(dtype),
            "k": k.to(dtype),
            "v": v.to(dtype),
            "g": gates(input_distribution, tokens, heads, generator).float(),
            "beta": torch.sigmoid(normal((tokens, heads), generator)).float(),
        }
        if self.option(case, "initial_state"):
            inputs["state0"] = normal((heads, width, width), generator).mul_(width**-0.5).float()
        return inputs

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        keys = (SIMILAR_KEYS,) if case.dtype == "fp32" else ()
        state = (LARGE_STATE,) if self.option(case, "initial_state") else ()
        return (*keys, LONE_GATES, *state, PADDING, LARGE_BETA)

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Any] | str:
        """Keys that resemble one another and gates near one, so that updates depend on all tokens before; lone gates;
        a large state; odd tokens.

        On a CPU alone: errors of kernels on a GPU have not been measured with them.
        """
        if generator.device.type != "cpu":
            return ""
        usual = "gates_near_zero" if name == SIMILAR_KEYS else DEFAULT_DISTRIBUTION
        inputs = self.make_inputs(case, generator, usual)
        if name == SIMILAR_KEYS:
            tokens, heads, width = inputs["k"].shape
            keys = normal((1, heads, width), generator) + UNLIKE * normal((tokens, heads, width), generator)
            inputs["k"] = (keys / keys.norm(dim=-1, keepdim=True)).to(inputs["k"].dtype)
        elif name == LONE_GATES:
            strengthen_some(inputs["g"], generator)
        elif name == LARGE_STATE:
            inputs["state0"] *= STATE_FACTOR
        else:
            make_odd(inputs, name, generator)
        return inputs, Expected(self, case, inputs)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        return by_heads(case, inputs, self._exact)

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        return by_heads(case, inputs, self._rounded)

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        return by_heads(case, {**inputs, **expected}, self._scales)

    def _exact(self, case: KernelCase, inputs: Tensors) -> Tensors:
        import torch

        problem = self._problem(case, inputs, torch.float64)
        tokens = case.shape["T"]
        if tokens <= SEQUENTIAL_TOKENS:
            o, state = sequential(problem)
        else:
            form = chunked(problem, ORACLE_CHUNK)
            o, state = joined(form.o, tokens), form.state
        return {"o": o.transpose(0, 1).contiguous(), "state": state}

    def _rounded(self, case: KernelCase, inputs: Tensors) -> Tensors:
        import torch

        dtype = inputs["v"].dtype
        operand = None if dtype == torch.float32 else dtype
        form = chunked(self._problem(case, inputs, torch.float32), case.shape["C"], operand=operand)
        o = joined(form.o, case.shape["T"]).transpose(0, 1)
        return {"o": o.to(dtype).contiguous(), "state": form.state}

    def _scales(self, case: KernelCase, tensors: Tensors) -> Tensors:
        """Of inputs and expected outputs together."""
        import torch

        fp32, width = UNIT_ROUNDOFF["fp32"] ** 2, case.shape["D"]
        product = fp32 * width + (UNIT_ROUNDOFF[case.dtype] ** 2 if case.dtype != "fp32" else 0.0)
        form = chunked(self._problem(case, tensors, torch.float64), ORACLE_CHUNK)
        o, state = rounding_variance(form, product=product, fp32=fp32)
        o = joined(o, case.shape["T"]).transpose(0, 1).contiguous()
        return {
            "o": o.sqrt_().add_(output_rounding(case.dtype, tensors["o"])),
            "state": state.sqrt_().add_(output_rounding("fp32", tensors["state"])),
        }

    def _problem(self, case: KernelCase, inputs: Tensors, dtype: torch.dtype) -> GatedDeltaRule:
        key_heads, heads, width, _chunk, _tokens = case.shape.values()
        q, k = (inputs[name].to(dtype).repeat_interleave(heads // key_heads, dim=1) for name in "qk")
        v, g, beta = (inputs[name].to(dtype).transpose(0, 1) for name in ("v", "g", "beta"))
        state = inputs["state0"].to(dtype) if "state0" in inputs else v.new_zeros(heads, width, width)
        return GatedDeltaRule(
            q=q.transpose(0, 1), k=k.transpose(0, 1), v=v, g=g, beta=beta, state=state, scale=width**-0.5
        )  # fmt: skip

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        return move_heads(case, inputs, generator, ("g", "beta"))

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        token, head = telling_place(case, inputs, generator)
        key_head = head // (case.shape["HV"] // case.shape["HQK"])
        # In fewer bits what beta changes lies near the tolerance.
        names = ("q", "k", "v", "beta") if case.dtype == "fp32" else ("q", "k", "v")
        name = names[random_index(len(names), generator)]
        if name == "v":
            where = (token, head, random_index(case.shape["D"], generator))
            return {**inputs, "v": perturbed(inputs["v"], where, factor=VALUE_PERTURBATION)}
        changed = inputs[name].clone()
        if name == "beta":
            # To the other end of what it may be.
            changed[token, head] = 0.03125 if float(changed[token, head]) > 0.5 else 0.96875
        else:
            # Of the other sign, so that the row's length stays one.
            both = inputs["q"][token, key_head].double() * inputs["k"][token, key_head].double()
            changed[token, key_head, int(both.abs().argmax())] *= -1
        return {**inputs, name: changed}

    def flops(self, case: KernelCase) -> float:
        _key_heads, heads, width, _chunk, tokens = case.shape.values()
        # Decay, S^T k, k u^T and S^T q; the chunk form does more, the function needs no more.
        return 7.0 * tokens * heads * width * width


def by_heads(case: KernelCase, tensors: Tensors, evaluate: Callable[[KernelCase, Tensors], Tensors]) -> Tensors:
    """What `evaluate` makes of a case, a few key heads with their value heads at a time where v is large."""
    import torch

    key_heads, heads, width, _chunk, tokens = case.shape.values()
    group = heads // key_heads
    step = max(1, AT_ONCE // (tokens * width * group))
    if step >= key_heads:
        return evaluate(case, tensors)
    parts = []
    for first in range(0, key_heads, step):
        count = min(step, key_heads - first)
        own = msgspec.structs.replace(case, shape={**case.shape, "HQK": count, "HV": count * group})
        spans = {name: (first, count) if name in "qk" else (first * group, count * group) for name in tensors}
        parts.append(evaluate(own, {name: one.narrow(HEAD_AXES[name], *spans[name]) for name, one in tensors.items()}))
    return {name: torch.cat([part[name] for part in parts], HEAD_AXES[name]) for name in parts[0]}


def check_heads(case: KernelCase) -> None:
    """Raise UsageError unless every key head has as many value heads as the others."""
    if case.shape["HV"] % case.shape["HQK"]:
        raise UsageError(f"{case.operator}: HV = {case.shape['HV']} must be a multiple of HQK = {case.shape['HQK']}")


def head_orders(
    key_heads: int, heads: int, generator: torch.Generator, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random orders of key heads and of value heads under which every value head keeps its key head."""
    group = heads // key_heads
    key_order, _ = permutation(key_heads, generator, like)
    inner = uniform((key_heads, group), generator).argsort(1).to(like.device)
    if key_heads == 1:
        inner, _ = permutation(group, generator, like)
    return key_order, (key_order[:, None] * group + inner).flatten()


def move_heads(
    case: KernelCase, inputs: Tensors, generator: torch.Generator, by_head: Iterable[str]
) -> tuple[Tensors, Undo]:
    """Permute heads and flip signs of keys and values: q, k, v, state0 and the inputs [T,HV,...] named `by_head`."""
    import torch

    key_heads, heads, width = (case.shape[axis] for axis in ("HQK", "HV", "D"))
    v = inputs["v"]
    key_order, order = head_orders(key_heads, heads, generator, v)
    back = torch.argsort(order)
    key_signs = signs((key_heads, width), generator).to(v)
    value_signs = signs((heads, width), generator).to(v)
    rows = key_signs.repeat_interleave(heads // key_heads, dim=0).float()
    flips = rows[:, :, None] * value_signs.float()[:, None, :]
    transformed = {name: inputs[name].index_select(1, key_order).mul_(key_signs) for name in "qk"}
    transformed["v"] = v.index_select(1, order).mul_(value_signs)
    transformed |= {name: inputs[name].index_select(1, order) for name in by_head}
    if "state0" in inputs:
        transformed["state0"] = inputs["state0"].index_select(0, order).mul_(flips)

    def undo(outputs: Tensors) -> Tensors:
        return {
            "o": (outputs["o"] * value_signs).index_select(1, back),
            "state": (outputs["state"] * flips).index_select(0, back),
        }

    return transformed, undo


def telling_place(case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[int, int]:
    """Of a few tokens the one whose own output reads most of what it writes, and a value head."""
    key_heads, heads, _width, _chunk, tokens = case.shape.values()
    head = random_index(heads, generator)
    positions = [random_index(tokens, generator) for _ in range(PERTURBED_POSITIONS)]
    key_head = head // (heads // key_heads)
    q, k = inputs["q"][positions, key_head].double(), inputs["k"][positions, key_head].double()
    written = (q * k).sum(-1).abs() * inputs["beta"][positions, head].double()
    return positions[int(written.argmax())], head


def perturb_value(case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
    """Change one element of v."""
    where = (*telling_place(case, inputs, generator), random_index(case.shape["D"], generator))
    return {**inputs, "v": perturbed(inputs["v"], where, factor=VALUE_PERTURBATION)}


def strengthen_some(g: torch.Tensor, generator: torch.Generator) -> None:
    """Give a few tokens of every head a gate of -LEAST_LONE to -MOST_LONE, each head of its own size. Changes `g`."""
    import torch

    tokens, heads = g.shape
    count = 1 + tokens // LONE_EVERY
    where = torch.randint(min(1, tokens - 1), tokens, (count, heads), generator=generator)
    part = (torch.randperm(heads, generator=generator) + uniform((count, heads), generator)) / heads
    g.scatter_(0, where, -(LEAST_LONE + (MOST_LONE - LEAST_LONE) * part).to(g))


def make_odd(inputs: Tensors, name: str, generator: torch.Generator) -> None:
    """Double beta, or make a run of up to half of the tokens zero, over the end perhaps. Changes `inputs`."""
    import torch

    beta = inputs["beta"]
    if name == LARGE_BETA:
        beta *= 2
        return
    first, count = random_index(len(beta), generator), 1 + random_index(max(1, len(beta) // 2), generator)
    where = (first + torch.arange(count)) % len(beta)
    for padded in inputs.keys() & set(PADDED):
        inputs[padded][where] = 0


def gates(input_distribution: str, tokens: int, heads: int, generator: torch.Generator) -> torch.Tensor:
    """Log-space gates [T,HV] of a input distribution."""
    import torch

    noise = normal((tokens, heads), generator)
    if input_distribution == "strong_gates":
        strength = uniform((heads,), generator) * 16.0
        strength[0], strength[-1] = 0.0, 16.0
        return -strength * torch.nn.functional.softplus(0.5 * noise + 1.0)
    if input_distribution == "gates_near_zero":
        return noise.abs_().mul_(-1e-4)
    g = torch.nn.functional.logsigmoid(noise) / 16.0
    ungated = torch.randperm(heads, generator=generator, device=g.device)[: heads // 4]
    g[:, ungated] = 0.0
    return g
