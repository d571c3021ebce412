"""The target's contract as text: what to compute, how it is called, built, checked and timed, and what is refused."""

from __future__ import annotations

from collections.abc import Collection

from pytest_klineage.gate.host.cpu import flags_here
from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.lab.optimizers.prompts import paragraphs, prompt
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.base import Operator
from pytest_klineage.operators.tolerance import SLACK
from pytest_klineage.records import KernelCase, LibraryPolicy, Machine, Surface, TensorSpec, gpu_platform
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
WHERE = {
    Surface.CPP: "Tensors are aligned to 64 bytes. All work is done, and all threads are joined, when it returns.",
    Surface.CUDA: (
        "All pointers are device pointers, aligned to 512 bytes; queue all work on `(cudaStream_t)call->stream`."
    ),
}
"""What holds of memory and work."""


def instructions_for(
    case: KernelCase, surface: Surface, platform: str, entry: str = "run", flags: tuple[str, ...] = (), *,
    machine: str = "", reference: str = "",
) -> str:  # fmt: skip
    """The contract of a kernel for `case`, as Markdown.

    `machine` says what it runs on (see `machine_text`); `reference` says whom it is timed against when that is not the
    case's reference. Raises UnknownName for an operator that does not exist.
    """
    chosen = operator_of(case)
    text = prompt(
        "contract", case=case.id, language=LANGUAGES[surface], platform=platform, definition=_definition(chosen, case),
        arguments=_arguments(chosen, case), calling=_calling(surface, entry),
        building=_building(surface, platform, flags), distributions=", ".join(chosen.input_distributions),
        comparison=_comparison(chosen, case), reference=reference or f"`{case.reference}`",
        cold="the L2 cache is" if platform != "cpu" else "the caches are", refused=_refused(case, surface),
    )  # fmt: skip
    return paragraphs(text, f"## The machine\n\n{machine}" if machine else "") + "\n"


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


def cpu_features(flags: Collection[str] | None = None) -> tuple[str, ...]:
    """Vector instructions among a CPU's flags, as cards call them; of this machine's, where the system says them."""
    has = flags_here() if flags is None else flags
    return tuple(name for name, word in (("avx2", "avx2"), ("avx512", "avx512f")) if word in has)


def _definition(chosen: Operator, case: KernelCase) -> str:
    text = chosen.explanation()
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
    lines += [_row(f"inputs[{position}]", spec) for position, spec in enumerate(signature.inputs)]
    lines += [_row(f"outputs[{position}]", spec) for position, spec in enumerate(signature.outputs)]
    if signature.scalars:
        lines += ["", "Scalars: " + ", ".join(f"{name} = {value:.9g}" for name, value in signature.scalars.items())]
    return "\n".join(lines)


def _row(position: str, spec: TensorSpec) -> str:
    return f"| {position} | {spec.name} | {spec.dtype} | {list(spec.shape)} | {list(spec.strides)} |"


def _calling(surface: Surface, entry: str) -> str:
    if surface not in NATIVE:
        return prompt("contract_python", entry=entry)
    header = fenced(HEADER.read_text(encoding="utf-8"), "c")
    return prompt("contract_native", entry=entry, where=WHERE[surface], header=header)


def _building(surface: Surface, platform: str, flags: tuple[str, ...]) -> str:
    if surface is Surface.CPP:
        shown = " ".join(flags or DEFAULT_FLAGS)
        return (
            f"One translation unit: `g++ -std=c++17 -shared -fPIC {shown}`. The flags `{shown}` are yours to "
            f"replace. {prompt('contract_cpp_flags')}"
        )
    if surface is Surface.CUDA:
        shown, kind = " ".join(("-std=c++17", "-O3", *flags)), gpu_platform(platform)
        return (
            f"One translation unit, by nvcc for sm_{kind.target} ({kind.title}): `{shown}`. "
            f"{prompt('contract_cuda_flags')}"
        )
    return "It is a Python file; it takes no build flags."


def _comparison(chosen: Operator, case: KernelCase) -> str:
    if chosen.exact:
        return prompt("contract_exact")
    accumulate = "fp64" if case.dtype == "fp64" else "fp32"
    return prompt("contract_tolerated", slack=f"{SLACK:g}", dtype=case.dtype, accumulate=accumulate)


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
