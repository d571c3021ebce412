"""References on a GPU, as far as a CPU shows it: names, refusals, conventions against the oracle, what they record."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_klineage.errors import HarnessError, MissingDependency, UnknownName, UsageError
from pytest_klineage.operators import DEFAULT_DISTRIBUTION, OPERATORS, make_case, paper_case
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import GPU_PLATFORMS, KernelCase
from pytest_klineage.references import REFERENCES, SHIPPED, TrialTensors, Variant, device, flags, reference
from pytest_klineage.references.device import DeviceReference
from pytest_klineage.worker.reference_kernel import trial_of

MakeTrial = Callable[..., TrialTensors]

RIGHT = {
    "topk": ("flashinfer", "topk", (5, 99, 20), "fp32", {}),
    "gdn": ("flashinfer", "gdn", (2, 4, 128, 64, 70), "bf16", {}),
    "gdn-state": ("flashinfer", "gdn", (1, 3, 128, 64, 20), "fp16", {"initial_state": True}),
    "fmha": ("flashinfer", "fmha", (2, 3, 70, 64), "fp16", {}),
    "fmha-causal": ("flashinfer", "fmha", (2, 3, 70, 64), "bf16", {"causal": True}),
    "fmha-bshd": ("flashinfer", "fmha", (2, 3, 70, 64), "fp16", {"layout": "bshd"}),
    "fmha-causal-bshd": ("flashinfer", "fmha", (2, 3, 70, 64), "fp16", {"layout": "bshd", "causal": True}),
    "fmha-group-bshd": ("flashinfer", "fmha", (2, 4, 70, 64), "bf16", {"layout": "bshd", "group": 2, "causal": True}),
    "fmha-window": ("flashinfer", "fmha", (2, 3, 70, 64), "fp16", {"window": 16, "causal": True}),
    "fla": ("fla", "gdn", (2, 4, 32, 64, 70), "bf16", {}),
    "fla-state": ("fla", "gdn", (2, 2, 32, 64, 20), "fp16", {"initial_state": True}),
}
"""Small cases of every convention that differs from ours: reference, operator, shape, type, options."""


def case_of(key: str) -> KernelCase:
    ref, name, shape, dtype, options = RIGHT[key]
    return make_case(name, shape, dtype, ref, **options)


def answer(call: Any, trial: TrialTensors) -> dict[str, torch.Tensor]:
    """What a prepared call gives for the trial's inputs, which it must not change."""
    before = {name: tensor.clone() for name, tensor in trial.inputs.items()}
    for tensor in trial.outputs.values():
        tensor.zero_()
    returned = call(trial.inputs, trial.outputs)
    assert all(torch.equal(trial.inputs[name], kept) for name, kept in before.items())
    return trial.outputs if returned is None else dict(returned)


# --- names, without torch ---------------------------------------------------------------------------------------------


def test_names_platforms_and_operators_are_known_without_torch() -> None:
    code = """
import sys
from pytest_klineage.records import GPU_PLATFORMS
from pytest_klineage.references import REFERENCES
facts = {name: (chosen.operators(), chosen.platforms, chosen.remedy) for name, chosen in REFERENCES.items()}
assert facts["cublas"] == (("gemm",), tuple(GPU_PLATFORMS), "pip install torch"), facts
assert facts["cudnn"][0] == ("conv2d", "fmha") and facts["flashinfer"][0] == ("fmha", "topk", "gdn")
assert facts["fla"][0] == ("gdn", "gdn_cumsum", "gdn_kkt_solve", "gdn_fused_fwd")
assert set(facts["vendor"][0]) == set(facts["torch"][0])
assert facts["torch"][1] == ("cpu", *GPU_PLATFORMS)
sys.exit(any(name in sys.modules for name in ("torch", "flashinfer", "fla", "triton")))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_reference_runs_the_papers_cases_of_its_operators() -> None:
    for name, chosen in ((name, REFERENCES[name]) for name in SHIPPED):
        for operator in chosen.operators():
            chosen.check(paper_case(operator, "gpu", name), "sm90")


@pytest.mark.parametrize("name", ["cublas", "cudnn", "flashinfer", "fla", "vendor"])
def test_a_cpu_is_refused_with_what_to_do(name: str) -> None:
    chosen = reference(name)
    case = paper_case(chosen.operators()[0], "gpu", name)
    message = f"the reference {name} runs on {', '.join(GPU_PLATFORMS)}, not on cpu; on a CPU use ref='torch'"
    with pytest.raises(UsageError, match=message):
        chosen.prepare(case)
    with pytest.raises(UsageError, match=message):
        chosen.check(case, "cpu")


def test_an_operator_that_a_library_has_not() -> None:
    with pytest.raises(UnknownName, match=r"operator of reference fla 'gemm'.*Valid: gdn"):
        reference("fla").check(make_case("gemm", (4, 4, 4), "bf16", "fla"), "sm90")


@pytest.mark.parametrize(
    ("ref", "name", "shape", "dtype", "platform", "supported"),
    [
        ("flashinfer", "fmha", (1, 1, 64, 80), "fp16", "sm90", "D of .64, 128, 256., not 80"),
        ("flashinfer", "fmha", (1, 1, 64, 64), "fp32", "sm90", "fp16 and bf16, not fp32"),
        ("flashinfer", "gdn", (1, 1, 64, 64, 64), "bf16", "sm90", "D = 128, not 64"),
        ("flashinfer", "gdn", (1, 1, 128, 64, 64), "bf16", "sm120", "sm90 alone"),
        ("fla", "gdn", (1, 1, 64, 64, 64), "fp32", "sm90", "fp16 and bf16, not in fp32"),
        ("fla", "gdn", (1, 1, 512, 64, 64), "bf16", "sm90", "256 at most"),
        ("cudnn", "fmha", (1, 1, 64, 64), "fp32", "sm90", "fp16 and bf16, not fp32"),
        ("cudnn", "fmha", (1, 1, 64, 68), "fp16", "sm90", "steps of 8, not 68"),
        ("cudnn", "fmha", (1, 1, 64, 256), "fp16", "sm120", "up to 128"),
        ("vendor", "gdn", (1, 1, 64, 64, 64), "fp32", "sm90", "flashinfer: .*; fla: "),
    ],
)
def test_what_a_library_does_not_support_is_said(
    ref: str, name: str, shape: tuple[int, ...], dtype: str, platform: str, supported: str
) -> None:
    case = make_case(name, shape, dtype, ref)
    with pytest.raises(UsageError, match=f"the reference {ref} cannot run {case.id} on {platform}: .*{supported}"):
        reference(ref).check(case, platform)


def test_attention_cases_that_a_library_does_not_take() -> None:
    window = make_case("fmha", (1, 2, 64, 64), "fp16", "cudnn", causal=True, window=16)
    assert reference("cudnn").limits(window, "sm90") == "its attention through torch has no sliding window"
    assert not reference("vendor").limits(window, "sm90")
    shared = make_case("fmha", (1, 2, 64, 64), "fp16", "flashinfer", group=2)
    assert reference("flashinfer").limits(shared, "sm90") == "its attention takes shared key heads in layout bshd only"
    assert not reference("cudnn").limits(shared, "sm90")


# --- conventions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", RIGHT)
@pytest.mark.usefixtures("flashinfer", "fla")
def test_conventions_are_translated_rightly(key: str, trial: MakeTrial) -> None:
    case = case_of(key)
    made = trial(case)
    expected = Expected(OPERATORS[case.operator], case, made.inputs)
    found = answer(reference(case.reference).prepare(case, made), made)
    assert expected.accepts(found), expected.errors(found)
    for spec in OPERATORS[case.operator].signature(case).outputs:
        assert found[spec.name].shape == spec.shape
        assert type(found[spec.name]) is torch.Tensor


@pytest.mark.usefixtures("flashinfer")
def test_gates_and_states_are_converted_before_timing(trial: MakeTrial) -> None:
    case = case_of("gdn-state")
    made = trial(case)
    prepared = reference("flashinfer").prepare(case, made)
    assert isinstance(prepared, Variant)
    assert prepared.convert is not None
    ready = prepared.convert(made.inputs)
    assert torch.equal(ready["g"], made.inputs["g"].exp())
    assert torch.equal(ready["state0"], made.inputs["state0"].transpose(-1, -2))
    assert all(ready[name] is made.inputs[name] for name in ("q", "k", "v", "beta"))
    with pytest.raises(AssertionError, match="log-space"):
        prepared.call(made.inputs, made.outputs)


def test_attention_is_planned_once_and_copies_nothing(flashinfer: Any, trial: MakeTrial) -> None:
    for key, heads, sequences in (("fmha", 1, 6), ("fmha-bshd", 3, 2)):
        case, made = case_of(key), trial(case_of(key))
        call = reference("flashinfer").prepare(case, made)
        library = flashinfer.made[-1]
        answer(call, made)
        assert (library.plans, library.backend, library.heads) == (1, "fa3", heads)
        assert library.starts == [70 * index for index in range(sequences + 1)]
    reference("flashinfer").prepare(case_of("fmha"), trial(case_of("fmha"), "sm120"))
    assert flashinfer.made[-1].backend == "fa2"


def test_top_k_is_called_unsorted(monkeypatch: pytest.MonkeyPatch, flashinfer: Any, trial: MakeTrial) -> None:
    seen: list[Any] = []
    module = sys.modules["flashinfer.topk"]
    original = vars(module)["top_k"]
    monkeypatch.setattr(module, "top_k", lambda *given, **named: seen.append((given[1:], named)) or original(*given))
    reference("flashinfer").prepare(case_of("topk"), trial(case_of("topk")))
    assert seen
    assert all(call == ((20,), {}) for call in seen)


# --- torch's own ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_torch_with_a_trial_is_warmed_up_and_right(operator: str, trial: MakeTrial) -> None:
    shapes = {"gemm": (8, 9, 7), "conv2d": (2, 4, 6, 6, 3, 3, 1, 1), "fmha": (1, 2, 9, 8), "topk": (3, 9, 2)}
    shapes["gdn_cumsum"] = (3, 8, 20)
    case = make_case(operator, shapes.get(operator, (1, 2, 8, 16, 20)), "fp32", "torch")
    made = trial(case)
    found = answer(reference("torch").prepare(case, made), made)
    assert Expected(OPERATORS[operator], case, made.inputs).accepts(found)
    described = reference("torch").describe(case)
    assert described["variant"] == "eager"
    assert described["variant_ms.eager"] == "1.00000"


def test_fp32_is_not_left_to_tf32(monkeypatch: pytest.MonkeyPatch, trial: MakeTrial) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    half = make_case("gemm", (4, 4, 4), "bf16", "torch")
    reference("torch").prepare(half, trial(half))
    assert torch.backends.cudnn.allow_tf32
    single = make_case("gemm", (4, 4, 4), "fp32", "torch")
    reference("torch").prepare(single, trial(single))
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture
def switchboard(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch's switches, most of which a build without CUDA has not; their values."""
    values: dict[str, Any] = {"blas_library": "default", "cudnn_benchmark": False, "cudnn_benchmark_limit": 10}
    values |= dict.fromkeys(("cudnn_sdp", "flash_sdp", "mem_efficient_sdp", "math_sdp"), True)

    def switch(name: str) -> flags.Switch:
        return (lambda: values[name]), (lambda value: values.__setitem__(name, value))

    monkeypatch.setattr(flags, "switches", lambda: {name: switch(name) for name in values})
    return values


def test_gemm_takes_the_faster_of_two_libraries(switchboard: dict[str, Any], clock: Any, trial: MakeTrial) -> None:
    case = make_case("gemm", (8, 9, 7), "bf16", "cublas")
    for times, best in (((0.20, 0.19), "cublaslt"), ((0.18, 0.19), "cublas")):
        clock.times_ms, clock.calls = times, 0
        made = trial(case)
        found = answer(reference("cublas").prepare(case, made), made)
        assert Expected(OPERATORS["gemm"], case, made.inputs).accepts(found)
        assert switchboard["blas_library"] == best, "the process keeps the switch of what is charged"
        described = reference("cublas").describe(case)
        assert described["variant"] == best
        assert {described["variant_ms.cublas"], described["variant_ms.cublaslt"]} == {f"{t:.5f}" for t in times}
    assert {"torch", "cuda", "cudnn", "allow_bf16_reduced_precision_reduction"} <= set(described)
    assert all(isinstance(value, str) and value for value in described.values())


@pytest.mark.parametrize(("layout", "best"), [("nchw", "nchw+benchmark"), ("nhwc", "channels_last")])
def test_convolution_counts_in_the_order_of_its_case(
    layout: str, best: str, switchboard: dict[str, Any], clock: Any, trial: MakeTrial
) -> None:
    clock.times_ms = (0.034, 0.033, 0.018, 0.0185)
    case = make_case("conv2d", (2, 8, 9, 11, 5, 3, 1, 1), "fp16", "cudnn", layout=layout)
    made = trial(case)
    found = answer(reference("cudnn").prepare(case, made), made)
    assert Expected(OPERATORS["conv2d"], case, made.inputs).accepts(found)
    described = reference("cudnn").describe(case)
    assert described["variant"] == best
    assert described["variant_ms.channels_last"] == "0.01800"
    searched = best.endswith("+benchmark")
    measured = {key.removeprefix("variant_ms.") for key in described if key.startswith("variant_ms.")}
    four = {f"{order}{search}" for order in ("nchw", "channels_last") for search in ("", "+benchmark")}
    assert measured == four | ({"charged"} if searched else set())
    assert switchboard["cudnn_benchmark"] is searched
    assert switchboard["cudnn_benchmark_limit"] == (0 if searched else 10)


def test_the_other_order_really_is_another_order(trial: MakeTrial) -> None:
    case = make_case("conv2d", (2, 8, 9, 11, 5, 3, 1, 1), "fp16", "cudnn")
    made = trial(case)
    variants = reference("cudnn").variants(case, made)  # type: ignore[attr-defined] # of a GPU's reference
    assert variants["nchw"].convert is None
    converted = variants["channels_last"].convert(made.inputs)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in converted.values())
    assert all(torch.equal(converted[name], tensor) for name, tensor in made.inputs.items())


def test_attention_of_cudnn_is_cudnns(switchboard: dict[str, Any], trial: MakeTrial) -> None:
    case = make_case("fmha", (1, 2, 16, 8), "fp16", "cudnn", causal=True)
    made = trial(case)
    found = answer(reference("cudnn").prepare(case, made), made)
    assert Expected(OPERATORS["fmha"], case, made.inputs).accepts(found)
    left_on = {name for name in ("cudnn_sdp", "flash_sdp", "mem_efficient_sdp", "math_sdp") if switchboard[name]}
    assert left_on == {"cudnn_sdp"}


def test_switches_are_torchs() -> None:
    kept = flags.read_flags(("cudnn_benchmark", "flash_sdp", "cudnn_sdp"))
    try:
        flags.write_flags({"cudnn_benchmark": True, "flash_sdp": False})
        assert torch.backends.cudnn.benchmark
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() == kept["cudnn_sdp"]
    finally:
        flags.write_flags(kept)
    assert flags.read_flags(kept) == kept


# --- what is installed ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("key", "missing", "remedy"),
    [
        ("topk", "flashinfer", "pip install flashinfer-python==0.6.11"),
        ("fla", "fla", "pip install flash-linear-attention==0.5.0"),
    ],
)
def test_an_absent_library_is_named_with_its_remedy(key: str, missing: str, remedy: str, trial: MakeTrial) -> None:
    case = case_of(key)
    with pytest.raises(MissingDependency, match=missing) as caught:
        reference(case.reference).prepare(case, trial(case))
    assert caught.value.what.partition(".")[0] == missing
    assert caught.value.remedy == remedy == reference(case.reference).remedy


def test_another_version_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"fla-core": "0.5.0", "flashinfer-python": "0.7.0", "triton": "3"}
    monkeypatch.setattr(device.importlib.metadata, "version", lambda name: versions[name])
    assert device.pinned_version("fla-core", "fla", "pip") == {"fla": "0.5.0"}
    other = reference("flashinfer").describe(case_of("topk"))
    assert other["flashinfer"] == "0.7.0"
    note = (
        "flashinfer 0.7.0 runs; 0.6.11 is the version that was checked, "
        "install it with: pip install flashinfer-python==0.6.11"
    )
    assert other["version_note"] == note
    assert device.reference_notes(other) == [note]
    versions["fla-core"] = "0.6.0"
    both = reference("vendor").describe(make_case("gdn", (1, 2, 128, 64, 33), "bf16", "vendor"))
    assert [said.split()[:2] for said in device.reference_notes(both)] == [["flashinfer", "0.7.0"], ["fla", "0.6.0"]]
    assert device.reference_notes(both)[1].endswith("install it with: pip install flash-linear-attention==0.5.0")
    assert device.reference_notes({"version": "1", "flashinfer": "0.6.11"}) == []


@pytest.mark.usefixtures("flashinfer")
def test_what_another_version_calls_otherwise_is_missing(monkeypatch: pytest.MonkeyPatch, trial: MakeTrial) -> None:
    monkeypatch.delattr(sys.modules["flashinfer.topk"], "top_k")
    case = case_of("topk")
    with pytest.raises(MissingDependency) as caught:
        reference("flashinfer").prepare(case, trial(case))
    assert (caught.value.what, caught.value.remedy) == ("flashinfer.topk.top_k", reference("flashinfer").remedy)


# --- vendor -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("flashinfer", "fla")
def test_vendor_is_the_fastest_of_all(clock: Any, trial: MakeTrial) -> None:
    case = make_case("gdn", (1, 2, 128, 64, 20), "bf16", "vendor")
    for times, best in (((0.2, 0.36), "flashinfer.prefill"), ((0.5, 0.36), "fla.chunk")):
        clock.times_ms, clock.calls = times, 0
        made = trial(case)
        found = answer(reference("vendor").prepare(case, made), made)
        assert Expected(OPERATORS["gdn"], case, made.inputs).accepts(found)
        described = reference("vendor").describe(case)
        assert described["variant"] == best
        assert described["label"] == f"vendor: {best}"
        assert described["variant_ms.fla.chunk"] == "0.36000"
        assert {"torch", "flashinfer", "fla"} <= set(described)


@pytest.mark.usefixtures("nothing_installed")
def test_vendor_does_with_what_is_there(trial: MakeTrial) -> None:
    case = make_case("topk", (4, 33, 5), "fp32", "vendor")
    reference("vendor").prepare(case, trial(case))
    described = reference("vendor").describe(case)
    assert described["variant"] == "torch.eager"
    assert "not installed" in described["absent.flashinfer"]
    none = make_case("gdn", (1, 2, 128, 64, 20), "bf16", "vendor")
    with pytest.raises(MissingDependency, match=r"flashinfer.* or fla") as caught:
        reference("vendor").prepare(none, trial(none))
    assert "flashinfer-python==0.6.11" in caught.value.remedy
    assert "flash-linear-attention==0.5.0" in caught.value.remedy


@pytest.mark.usefixtures("fla")
def test_vendor_excludes_unsuitable_libraries(trial: MakeTrial) -> None:
    case = make_case("gdn", (1, 2, 64, 64, 20), "bf16", "vendor")
    reference("vendor").prepare(case, trial(case))
    described = reference("vendor").describe(case)
    assert described["variant"] == "fla.chunk"
    assert "D = 128, not 64" in described["absent.flashinfer"]


def test_vendor_says_why_no_library_runs(
    monkeypatch: pytest.MonkeyPatch, switchboard: dict[str, Any], trial: MakeTrial
) -> None:
    def broken(self: DeviceReference, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(type(reference("cublas")), "variants", broken)
    case = make_case("gemm", (4, 4, 4), "bf16", "vendor")
    with pytest.raises(HarnessError, match="cublas: the driver is too old"):
        reference("vendor").prepare(case, trial(case))


def test_a_trial_has_the_strides_of_its_case() -> None:
    case = make_case("fmha", (2, 3, 5, 8), "fp16", "flashinfer", layout="bshd")
    made = trial_of(case, "sm90", device="cpu")
    specs = OPERATORS["fmha"].signature(case)
    assert {name: tensor.stride() for name, tensor in made.inputs.items()} == {s.name: s.strides for s in specs.inputs}
    again = OPERATORS["fmha"].make_inputs(case, torch.Generator().manual_seed(20260401), DEFAULT_DISTRIBUTION)
    assert torch.equal(made.inputs["q"], again["q"])


@pytest.mark.parametrize(
    ("key", "said", "noted"),
    [
        ("absent.fla", "CUDA error: an illegal memory access was encountered", True),
        ("variant_error.sdpa", "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", True),
        ("absent.fla", "fla is not installed", False),
        ("absent.fla", "the reference fla cannot run gdn-1x1 on sm90: it takes D up to 256", False),
        ("variant_error.fa2", "RuntimeError: Unsupported head_dim: 96", False),
        ("variant_ms.fa3", "0.00100", False),
    ],
)
def test_a_failed_library_is_a_note_and_an_unsuitable_one_is_not(key: str, said: str, noted: bool) -> None:
    name = key.partition(".")[2]
    note = f"{name} took no part in the reference, which may be faster with it: {said}"
    assert device.reference_notes({"label": "vendor", key: said}) == ([note] if noted else [])


@pytest.mark.parametrize(
    ("compared", "charged", "noted"),
    [("0.01600", "0.01950", True), ("0.01600", "0.01640", False), ("0.01600", None, False), (None, "0.01950", False)],
)
def test_a_search_that_lost_its_best_plan_is_a_note(compared: str | None, charged: str | None, noted: bool) -> None:
    times = {"variant_ms.nchw": "0.03000", "variant_ms.nchw+benchmark": compared, "variant_ms.charged": charged}
    facts = {"variant": "nchw+benchmark", **{name: ms for name, ms in times.items() if ms is not None}}
    notes = device.reference_notes(facts)
    assert [("did not find its best plan again: 0.01950 ms, 0.01600 ms when" in note) for note in notes] == [
        True
    ] * noted


@pytest.mark.usefixtures("flashinfer", "fla")
def test_a_choice_of_before_loads_one_library(trial: MakeTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("gdn", (1, 2, 128, 64, 20), "bf16", "vendor")
    reference("vendor").prepare(case, trial(case))
    chosen = reference("vendor").describe(case)["variant"]
    other = {"fla": "flashinfer", "flashinfer": "fla"}[chosen.partition(".")[0]]
    monkeypatch.setattr(REFERENCES[other], "variants", lambda *_: pytest.fail(f"{other} is loaded for nothing"))
    made = dataclasses.replace(trial(case), only=chosen, only_ms=1.0)
    answer(reference("vendor").prepare(case, made), made)
    described = reference("vendor").describe(case)
    assert described["variant"] == chosen
    assert other not in described
    assert chosen.partition(".")[0] in described


def test_compilers_are_imported_ahead_for_those_who_need_them() -> None:
    case = make_case("gdn", (1, 2, 128, 64, 20), "bf16", "vendor")
    assert "torch._dynamo" in reference("fla").ahead(case)
    assert reference("vendor").ahead(case) == reference("fla").ahead(case)
    assert reference("cublas").ahead(paper_case("gemm", "gpu")) == ()
