"""References of the three phases of the gated delta rule: torch's compositions, and what is asked of FLA's kernels."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_klineage.errors import MissingDependency, UsageError
from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import KernelCase
from pytest_klineage.references import TrialTensors, reference

CASES: dict[str, tuple[str, tuple[int, ...], str, dict[str, bool]]] = {
    "cumsum": ("gdn_cumsum", (6, 64, 150), "fp32", {}),
    "cumsum-full": ("gdn_cumsum", (3, 64, 128), "fp32", {}),
    "cumsum-short": ("gdn_cumsum", (3, 64, 10), "fp32", {}),
    "kkt_solve": ("gdn_kkt_solve", (2, 6, 32, 64, 150), "bf16", {}),
    "kkt_solve-fp16": ("gdn_kkt_solve", (2, 2, 32, 64, 64), "fp16", {}),
    "fused_fwd": ("gdn_fused_fwd", (2, 6, 32, 64, 150), "bf16", {}),
    "fused_fwd-state": ("gdn_fused_fwd", (1, 3, 32, 64, 64), "fp16", {"initial_state": True}),
}


def case_of(key: str, ref: str) -> KernelCase:
    name, shape, dtype, options = CASES[key]
    return make_case(name, shape, dtype, ref, **options)


def answer(call: Any, trial: TrialTensors) -> dict[str, torch.Tensor]:
    """What a prepared call gives; it must not change its inputs and must fill every output."""
    before = {name: tensor.clone() for name, tensor in trial.inputs.items()}
    for tensor in trial.outputs.values():
        tensor.fill_(float("nan"))
    returned = call(trial.inputs, trial.outputs)
    assert all(torch.equal(trial.inputs[name], kept) for name, kept in before.items())
    return trial.outputs if returned is None else dict(returned)


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gdn_cumsum", (3, 16, 70)),
        ("gdn_kkt_solve", (2, 4, 16, 32, 70)),
        ("gdn_kkt_solve", (1, 2, 16, 24, 70)),
        ("gdn_kkt_solve", (1, 2, 16, 8, 20)),
        ("gdn_fused_fwd", (2, 4, 16, 32, 70)),
    ],
)
def test_torch_is_right_for_every_distribution(name: str, shape: tuple[int, ...], dtype: str) -> None:
    operator = OPERATORS[name]
    if dtype not in operator.dtypes:
        dtype = operator.dtypes[0]
    for option in operator.options.get("initial_state", (False,)):
        options = {"initial_state": True} if option else {}
        case = make_case(name, shape, dtype, "torch", **options)
        call = reference("torch").prepare(case)
        for input_distribution in operator.input_distributions:
            inputs = operator.make_inputs(case, torch.Generator().manual_seed(7), input_distribution)
            baseline_output = operator.baseline_output(case, inputs)
            outputs = {key: torch.full_like(tensor, float("nan")) for key, tensor in baseline_output.items()}
            call(inputs, outputs)
            expected = Expected(operator, case, inputs)
            assert expected.accepts(outputs), (input_distribution, expected.errors(outputs), expected.bounds)


def test_what_torch_has_not_is_labelled_as_composed() -> None:
    labels = {
        key: reference("torch").describe(case_of(key, "torch"))["label"] for key in ("cumsum", "kkt_solve", "fused_fwd")
    }
    assert labels["cumsum"] == "torch"
    assert labels["kkt_solve"] == labels["fused_fwd"] == "torch-chunked (our composition of torch ops)"


# --- FLA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", CASES)
@pytest.mark.usefixtures("fla_phases")
def test_fla_is_asked_rightly(key: str, trial: Callable[..., TrialTensors]) -> None:
    case = case_of(key, "fla")
    made = trial(case)
    prepared = reference("fla").prepare(case, made)
    found = answer(prepared, made)
    expected = Expected(OPERATORS[case.operator], case, made.inputs)
    assert expected.accepts(found), (expected.errors(found), expected.bounds)
    for spec in OPERATORS[case.operator].signature(case).outputs:
        assert found[spec.name].shape == spec.shape


@pytest.mark.usefixtures("fla_phases")
def test_both_of_its_solvers_are_tried(clock: Any, trial: Callable[..., TrialTensors]) -> None:
    case = case_of("kkt_solve", "fla")
    for times, best in (((0.1, 0.2), "kkt_solve"), ((0.2, 0.1), "kkt+solve_tril")):
        clock.times_ms, clock.calls = times, 0
        made = trial(case)
        found = answer(reference("fla").prepare(case, made), made)
        assert Expected(OPERATORS[case.operator], case, made.inputs).accepts(found)
        assert reference("fla").describe(case)["variant"] == best


@pytest.mark.usefixtures("fla_phases")
def test_vendors_of_the_phases(trial: Callable[..., TrialTensors]) -> None:
    for key, variants in (("cumsum", {"fla.chunk_local_cumsum", "torch.eager"}), ("fused_fwd", {"fla.w_u+h+o"})):
        case = case_of(key, "vendor")
        made = trial(case)
        reference("vendor").prepare(case, made)
        described = reference("vendor").describe(case)
        assert {name.partition(".")[2] for name in described if name.startswith("variant_ms.")} == variants


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "why"),
    [
        ("gdn_cumsum", (3, 32, 70), "fp32", "its chunks have 64 tokens, not 32"),
        ("gdn_kkt_solve", (1, 3, 32, 16, 70), "bf16", "its chunks have 64 tokens, not 16"),
        ("gdn_fused_fwd", (1, 3, 32, 64, 70), "fp32", "fp16 and bf16, not in fp32"),
        ("gdn_fused_fwd", (1, 3, 512, 64, 70), "bf16", "256 at most"),
    ],
)
def test_what_fla_does_not_support_is_said(name: str, shape: tuple[int, ...], dtype: str, why: str) -> None:
    case = make_case(name, shape, dtype, "fla")
    with pytest.raises(UsageError, match=why):
        reference("fla").check(case, "sm90")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("key", ["cumsum", "kkt_solve", "fused_fwd"])
def test_an_absent_fla_is_named_with_its_remedy(key: str, trial: Callable[..., TrialTensors]) -> None:
    case = case_of(key, "fla")
    with pytest.raises(MissingDependency, match="flash-linear-attention"):
        reference("fla").prepare(case, trial(case))


# Stand-ins with the signatures and conventions of fla-core 0.5.0; the arithmetic is the definition, in fp32.


@pytest.fixture
def fla_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the functions of FLA's forward pass are installed."""
    modules = {
        "fla.ops.utils": {"chunk_local_cumsum": chunk_local_cumsum, "solve_tril": solve_tril},
        "fla.ops.gated_delta_rule.chunk_fwd": {"chunk_gated_delta_rule_fwd_kkt_solve_kernel": SolveKernel()},
        "fla.ops.common.chunk_scaled_dot_kkt": {"chunk_scaled_dot_kkt_fwd": chunk_scaled_dot_kkt_fwd},
        "fla.ops.gated_delta_rule.wy_fast": {"recompute_w_u_fwd": recompute_w_u_fwd},
        "fla.ops.common.chunk_delta_h": {"chunk_gated_delta_rule_fwd_h": chunk_gated_delta_rule_fwd_h},
        "fla.ops.common.chunk_o": {"chunk_fwd_o": chunk_fwd_o},
    }
    for dotted, contents in modules.items():
        parts = dotted.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        module = types.ModuleType(dotted)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, dotted, module)


def chunk_local_cumsum(
    g: torch.Tensor, chunk_size: int, reverse: bool = False, scale: float | None = None, head_first: bool = False
) -> torch.Tensor:
    assert g.ndim == 3
    assert len(g) == 1
    assert g.dtype == torch.float32
    return torch.cat([part.cumsum(1) for part in g.split(chunk_size, dim=1)], dim=1)


def chunk_scaled_dot_kkt_fwd(
    k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: None = None, chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    assert k.ndim == 4
    tokens, heads = k.shape[1], g.shape[2]
    lower = torch.full((1, tokens, heads, chunk_size), float("nan"), dtype=output_dtype)
    keys = k[0].float().repeat_interleave(heads // k.shape[2], dim=1).transpose(0, 1)
    for t0 in range(0, tokens, chunk_size):
        stop = min(t0 + chunk_size, tokens)
        part, gates = keys[:, t0:stop], g[0, t0:stop].T
        between = (gates[:, :, None] - gates[:, None, :]).tril(-1).exp()
        system = (part @ part.transpose(1, 2) * between * beta[0, t0:stop].T[..., None]).tril(-1)
        lower[0, t0:stop, :, : stop - t0] = system.transpose(0, 1)
        lower[0, t0:stop, :, stop - t0 :] = 0.0
    return lower


def solve_tril(A: torch.Tensor, cu_seqlens: None = None, output_dtype: torch.dtype = torch.float) -> torch.Tensor:
    assert A.dtype == torch.float32
    solved = torch.zeros_like(A)
    for t0 in range(0, A.shape[1], A.shape[3]):
        rows = A[0, t0 : t0 + A.shape[3]].transpose(0, 1)
        size = rows.shape[1]
        identity = torch.eye(size).expand(len(rows), size, size)
        inverse = torch.linalg.solve_triangular(rows[..., :size], identity, upper=False, unitriangular=True).tril()
        solved[0, t0 : t0 + size, :, :size] = inverse.transpose(0, 1)
    return solved.to(output_dtype)


class SolveKernel:
    """chunk_gated_delta_rule_fwd_kkt_solve_kernel: launched with a grid, leaves blocks above the diagonal alone."""

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(
            *, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, A: torch.Tensor, cu_seqlens: None,
            chunk_indices: None, T: int, H: int, HV: int, K: int, BT: int, BC: int, USE_EXP2: bool,
        ) -> None:  # fmt: skip
            assert grid == (-(-T // BT), HV)
            assert tuple(k.shape[-3:]) == (T, H, K)
            assert (BT, BC, USE_EXP2) == (64, 16, False)
            assert all(tensor.is_contiguous() for tensor in (k, g, beta, A))
            solved = solve_tril(chunk_scaled_dot_kkt_fwd(k.view(1, T, H, K), g.view(1, T, HV), beta.view(1, T, HV)))[0]
            position = torch.arange(T) % BT
            written = torch.arange(BT) // BC <= (position // BC)[:, None]
            A.copy_(torch.where(written[:, None], solved.to(A.dtype), A))

        return launch


def recompute_w_u_fwd(
    k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, A: torch.Tensor, g: torch.Tensor,
    cu_seqlens: None = None, use_exp2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    w, u = torch.empty(*v.shape[:3], k.shape[3], dtype=v.dtype), torch.empty_like(v)
    keys = k.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    for t0 in range(0, v.shape[1], 64):
        rows = slice(t0, t0 + 64)
        solve = A[0, rows].transpose(0, 1).float()[..., : len(A[0, rows])]
        rate = beta[0, rows].T[..., None]
        faded = rate * g[0, rows].T[..., None].exp()
        for into, tensor, factor in ((w, keys, faded), (u, v, rate)):
            right = (tensor[0, rows].transpose(0, 1).float() * factor).to(v.dtype).float()
            into[0, rows] = (solve @ right).transpose(0, 1).to(v.dtype)
    return w, u


def chunk_gated_delta_rule_fwd_h(
    k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, g: torch.Tensor, gk: None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, chunk_size: int = 64,
    save_new_value: bool = True, use_exp2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    heads, width = u.shape[2], u.shape[3]
    keys = k[0].repeat_interleave(heads // k.shape[2], dim=1).float()
    state = torch.zeros(heads, width, width) if initial_state is None else initial_state[0]
    starts, updates = [], torch.empty_like(u)
    for t0 in range(0, u.shape[1], chunk_size):
        rows = slice(t0, t0 + chunk_size)
        starts.append(state.to(u.dtype))
        read = torch.einsum("thk,hkv->thv", w[0, rows].float(), starts[-1].float())
        new = u[0, rows].float() - read
        updates[0, rows] = new.to(u.dtype)
        gates = g[0, rows]
        late = (new * (gates[-1] - gates).exp()[..., None]).to(u.dtype).float()
        state = state * gates[-1].exp()[:, None, None] + torch.einsum("thk,thv->hkv", keys[rows], late)
    return torch.stack(starts)[None], updates, state[None] if output_final_state else None


def chunk_fwd_o(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, h: torch.Tensor, g: torch.Tensor, g_gamma: None = None,
    scale: float | None = None, cu_seqlens: None = None, chunk_size: int = 64, use_exp2: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert scale == q.shape[-1] ** -0.5
    queries, keys = (tensor[0].repeat_interleave(v.shape[2] // q.shape[2], dim=1).float() for tensor in (q, k))
    o = torch.empty_like(v)
    for number, t0 in enumerate(range(0, v.shape[1], chunk_size)):
        rows = slice(t0, t0 + chunk_size)
        gates = g[0, rows].T
        reads = torch.einsum("thk,hkv->htv", queries[rows], h[0, number].float()) * gates[..., None].exp()
        scores = torch.einsum("thk,shk->hts", queries[rows], keys[rows])
        scores = scores.tril() * (gates[:, :, None] - gates[:, None, :]).tril().exp()
        mixed = scores.to(v.dtype).float() @ v[0, rows].transpose(0, 1).float()
        o[0, rows] = ((reads + mixed) * scale).transpose(0, 1).to(v.dtype)
    return o
