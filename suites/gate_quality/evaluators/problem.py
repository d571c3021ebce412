"""One GEMM as an evaluator has it: inputs, the reference's call, the candidate's call, all in one process. No clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.operators import DEFAULT_REGIME, operator
from pytest_klineage.records import KernelCase, Placement, Slot, TensorSpec
from pytest_klineage.references.flags import write_flags
from pytest_klineage.surfaces import surface_backend

if TYPE_CHECKING:
    import torch

    Tensors: TypeAlias = dict[str, torch.Tensor]

SEED = 42
"""Where the seeds of these evaluators begin."""

Run: TypeAlias = Callable[[], object]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be judged: a kernel that has been built already."""

    case: KernelCase
    surface: str
    artifact: str
    """Path of the shared library."""
    entry: str
    blas_library: str = ""
    """What torch calls for the reference, "cublas" or "cublaslt"; empty for torch's own choice."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict. Times in milliseconds; 0 and no samples for a kernel that is wrong."""

    correct: bool
    why: str = ""
    """Why it is not."""
    clock: str = ""
    reference_ms: float = 0.0
    candidate_ms: float = 0.0
    speedup: float = 0.0
    reference_samples_ms: tuple[float, ...] = ()
    candidate_samples_ms: tuple[float, ...] = ()


class Clock(Protocol):
    """Times calls."""

    name: str

    def samples(self, run: Run, *, warmup: int, count: int) -> list[float]:
        """Milliseconds of `count` calls, after `warmup` untimed ones."""


class AnyMemory:
    """The whole address space as the memory that a kernel is bound to: a tensor's offset is its address."""

    address = 0

    def __init__(self, stream: int) -> None:
        self.stream = stream

    @property
    def bytes(self) -> torch.Tensor:
        """Not to be had: only native kernels, which take addresses, are judged here."""
        raise UsageError("only a kernel of the native ABI is bound to tensors of torch; pass a cuda or a cpp source")


class Problem:
    """Reference and candidate of one request. Raises UsageError for another operator than gemm."""

    def __init__(self, request: Request, device: str = "cuda") -> None:
        if request.case.operator != "gemm":
            raise UsageError(f"these evaluators know gemm only, got {request.case.operator}")
        self.case, self.device = request.case, device
        self._signature = operator("gemm").signature(request.case)
        self._kernel = surface_backend(request.surface).load(Path(request.artifact), request.entry, "")
        if request.blas_library:
            write_flags({"blas_library": request.blas_library})

    def inputs(self, number: int) -> Tensors:
        """The n-th set of random inputs; every process makes the same."""
        import torch

        generator = torch.Generator(self.device).manual_seed(SEED + number)
        return operator("gemm").make_inputs(self.case, generator, DEFAULT_REGIME)

    def output(self) -> torch.Tensor:
        """An uninitialised output."""
        import torch

        from pytest_klineage.operators.distributions import torch_dtype

        spec = self._signature.outputs[0]
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device)

    def reference(self, inputs: Tensors, output: torch.Tensor) -> Run:
        """The library's call, the one that the gate's reference `cublas` makes."""
        import torch

        return functools.partial(torch.mm, inputs["a"], inputs["b"], out=output)

    def candidate(self, inputs: Tensors, output: torch.Tensor) -> Run:
        """The kernel's call, on the stream that is current now."""
        import torch

        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        specs = self._signature.inputs
        slot = Slot(
            inputs=tuple(placed(spec, inputs[spec.name]) for spec in specs),
            outputs=(placed(self._signature.outputs[0], output),),
        )
        invoke: Any = self._kernel.bind(AnyMemory(stream), slot, {})
        # It holds addresses; the memory behind them must not be given back while it lives.
        invoke.tensors = inputs, output
        run: Run = invoke
        return run


def placed(spec: TensorSpec, tensor: torch.Tensor) -> Placement:
    """Where a tensor of torch lies."""
    return Placement(spec=spec, offset=tensor.data_ptr(), num_bytes=tensor.numel() * tensor.element_size())


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean. Raises ZeroDivisionError when empty."""
    return sum(values) / len(values)
