"""The target's contract as text: what to compute, how it is called, built, checked and timed, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path

from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.base import Operator
from pytest_klineage.operators.tolerance import SLACK
from pytest_klineage.records import KernelCase, LibraryPolicy, Machine, Surface, TensorSpec
from pytest_klineage.surfaces.cpp import DEFAULT_FLAGS
from pytest_klineage.surfaces.native import HEADER

LANGUAGES = {
    Surface.CPP: "C++17 with OpenMP",
    Surface.CUDA: "CUDA C++17",
    Surface.PYTHON: "Python",
    Surface.TRITON: "Python with Triton",
    Surface.TILELANG: "Python with TileLang",
}
NATIVE = (Surface.CPP, Surface.CUDA)
EXACT = "The outputs are compared exactly, up to the freedom that the definition above leaves. There is no tolerance."
TOLERATED = (
    "Every element of every output is compared with a float64 result. An element's error is measured in units of the "
    f"rounding error that an honest {{dtype}} computation of that element has; at most {SLACK:g} times what a careful "
    "{dtype} implementation errs is allowed, and 10 units at least. Another order of sums is fine, and so are fused "
    "multiply-adds; a lower precision inside than {dtype} products with {accumulate} sums is not. NaN and infinities "
    "must stand where they belong."
)
CPP_FLAGS = (
    "Further forms that are allowed: -O0 to -O3, -Ofast; -std=c++NN; -f... and -fno-... without a value, such as "
    "-ffast-math or -fno-math-errno; -m... such as -mavx2, -mfma, -mavx512f, -march=x86-64-v3, -march=x86-64-v4 "
    "(-march=native is refused); -DNAME=value; --param=name=number. Nothing that names a file or a library. "
    'Intrinsics of <immintrin.h> need the matching -m flag, or __attribute__((target("..."))) on the function.'
)
CUDA_FLAGS = (
    "Flags are added to these. Allowed: -O0 to -O3, -std=c++NN, -DNAME=value, --use_fast_math, --ftz=, --prec-div=, "
    "--prec-sqrt=, --fmad= with true or false, --maxrregcount=N, --expt-relaxed-constexpr, --extended-lambda, "
    "--diag-suppress=N, -Xptxas=-O3 and -Xptxas=-dlcm=ca, -lcuda (functions of the driver, such as "
    "cuTensorMapEncodeTiled), --include=cutlass (headers of CUTLASS and CuTe)."
)
ARCHITECTURES = {"sm90": "sm_90a (Hopper)", "sm120": "sm_120a (Blackwell, RTX)"}


def instructions_for(
    case: KernelCase, surface: Surface, platform: str, entry: str = "run", flags: tuple[str, ...] = (), *,
    machine: str = "", reference: str = "",
) -> str:  # fmt: skip
    """The contract of a kernel for `case`, as Markdown.

    `machine` says what it runs on (see `machine_text`); `reference` says whom it is timed against when that is not the
    case's reference. Raises UnknownName for an operator that does not exist.
    """
    chosen = operator_of(case)
    rival = reference or f"`{case.reference}`"
    parts = [
        f"# Contract: {case.id} in {LANGUAGES[surface]} on {platform}",
        f"## What to compute\n\n{_definition(chosen, case)}",
        f"## Arguments\n\n{_arguments(chosen, case)}",
        f"## How it is called\n\n{_calling(surface, entry)}",
        f"## How it is built\n\n{_building(surface, platform, flags)}",
        f"## When it is right\n\n{_right(chosen, case)}",
        f"## How it is timed\n\n{_timed(platform, rival)}",
        f"## What is refused\n\n{_refused(case, surface)}",
    ]
    if machine:
        parts.append(f"## The machine\n\n{machine}")
    return "\n\n".join(parts) + "\n"


def machine_text(machine: Machine, *, threads: int = 0, features: tuple[str, ...] = ()) -> str:
    """The machine in one line: device, cores that a kernel may use, cache, and features such as "avx512"."""
    if machine.platform != "cpu":
        return f"{machine.device}."
    count = threads or machine.cores
    parts = [machine.device, f"{count} {'thread' if count == 1 else 'threads'}"]
    if machine.cache_bytes:
        parts.append(f"last-level cache {machine.cache_bytes / 2**20:.0f} MiB")
    if features:
        parts.append(f"instructions: {', '.join(features)}")
    return "; ".join(parts) + "."


def cpu_features(cpuinfo: str | None = None) -> tuple[str, ...]:
    """Vector instructions of this machine's CPU, as cards call them; empty where the system does not say."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ()
    line = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    words = line.partition(":")[2].split()
    return tuple(name for name, word in (("avx2", "avx2"), ("avx512", "avx512f")) if word in words)


def _definition(chosen: Operator, case: KernelCase) -> str:
    text = inspect.getdoc(type(chosen)) or chosen.name
    axes = ", ".join(f"{axis} = {size}" for axis, size in case.shape.items())
    lines = [text, "", f"Here {axes}; main data type {case.dtype}."]
    options = {name: chosen.option(case, name) for name in chosen.options}
    if options:
        lines.append(f"Options: {', '.join(f'{name} = {value}' for name, value in options.items())}.")
    if case.also_shapes:
        lines.append("It must also be right, untimed, at these shapes:")
        lines += [f"- {', '.join(f'{axis} = {size}' for axis, size in other.items())}" for other in case.also_shapes]
    return "\n".join(lines)


def _arguments(chosen: Operator, case: KernelCase) -> str:
    signature = chosen.signature(case)
    lines = ["| argument | name | type | shape | strides in elements |", "|---|---|---|---|---|"]
    lines += [_row(f"inputs[{place}]", spec) for place, spec in enumerate(signature.inputs)]
    lines += [_row(f"outputs[{place}]", spec) for place, spec in enumerate(signature.outputs)]
    if signature.scalars:
        lines += ["", "Scalars: " + ", ".join(f"{name} = {value:.9g}" for name, value in signature.scalars.items())]
    return "\n".join(lines)


def _row(place: str, spec: TensorSpec) -> str:
    return f"| {place} | {spec.name} | {spec.dtype} | {list(spec.shape)} | {list(spec.strides)} |"


def _calling(surface: Surface, entry: str) -> str:
    if surface in NATIVE:
        where = (
            "All pointers are device pointers, aligned to 512 bytes; queue all work on `(cudaStream_t)call->stream`."
            if surface is Surface.CUDA
            else "Tensors are aligned to 64 bytes. All work is done, and all threads are joined, when it returns."
        )
        return (
            f'The file includes "klineage.h" and exports `extern "C" int {entry}(const klineage_call *call)`, which '
            f'returns 0. {where} Read scalars with `klineage_scalar_value(call, "name", fallback)`. The header:\n\n'
            + fenced(HEADER.read_text(encoding="utf-8"), "c")
        )
    return (
        f"The file defines `{entry}`, which gets the inputs as torch tensors in the order above. With a parameter "
        "named `out` it gets the output tensor, or a tuple of them, and fills it; otherwise it returns the outputs in "
        "order. Scalars are passed by name to parameters of that name. Work goes to the current stream."
    )


def _building(surface: Surface, platform: str, flags: tuple[str, ...]) -> str:
    if surface is Surface.CPP:
        shown = " ".join(flags or DEFAULT_FLAGS)
        return (
            f"One translation unit: `g++ -std=c++17 -shared -fPIC {shown}`. The flags `{shown}` are yours to "
            f"replace. {CPP_FLAGS}"
        )
    if surface is Surface.CUDA:
        shown = " ".join(("-std=c++17", "-O3", *flags))
        return f"One translation unit, by nvcc for {ARCHITECTURES.get(platform, platform)}: `{shown}`. {CUDA_FLAGS}"
    return "It is a Python file; it takes no build flags."


def _right(chosen: Operator, case: KernelCase) -> str:
    accumulate = "fp64" if case.dtype == "fp64" else "fp32"
    how = EXACT if chosen.exact else TOLERATED.format(dtype=case.dtype, accumulate=accumulate)
    return (
        f"It is checked on random inputs of these kinds: {', '.join(chosen.regimes)}. {how} The outputs of timed calls "
        "are checked as well. Every element of every output is written; they hold rubbish before."
    )


def _timed(platform: str, rival: str) -> str:
    cold = "the L2 cache is flushed" if platform != "cpu" else "the caches are flushed"
    return (
        f"In turns with the reference {rival}, each call on new contents, and between two calls {cold}. The speedup is "
        "the reference's time over yours: above 1 you are faster. The median of many calls counts, start-up does not."
    )


def _refused(case: KernelCase, surface: Surface) -> str:
    rules = [
        "writing to inputs, or outside of outputs",
        "results, or anything that depends on contents, kept from call to call (scratch memory may be kept)",
        "work that goes on after the return, or that is moved out of the timed call",
        "reading clocks, files or the harness; starting processes; printing",
    ]
    if case.library is LibraryPolicy.FORBID:
        libraries = "BLAS, oneDNN or PyTorch" if surface is Surface.CPP else "cuBLAS, cuDNN or PyTorch's operators"
        rules.insert(0, f"work done by a library such as {libraries}: write the kernel itself")
    if case.max_spills is not None:
        rules.append(f"more than {case.max_spills} bytes of spilled registers per thread")
    if case.requires:
        rules.append(f"machine code without these instructions: {', '.join(case.requires)}")
    return "\n".join(f"- {rule}" for rule in rules)


def code_language(surface: Surface) -> str:
    """What fenced blocks call the language."""
    return {Surface.CPP: "cpp", Surface.CUDA: "cuda"}.get(surface, "python")
