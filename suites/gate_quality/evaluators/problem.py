"""One GEMM as an evaluator has it: inputs, the reference's call, the candidate's call, all in one process. No clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.operators import DEFAULT_DISTRIBUTION, operator
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
        use_library(request)

    def inputs(self, number: int) -> Tensors:
        """The n-th set of random inputs; every process makes the same."""
        import torch

        generator = torch.Generator(self.device).manual_seed(SEED + number)
        return operator("gemm").make_inputs(self.case, generator, DEFAULT_DISTRIBUTION)

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
        specs = self._signature.inputs
        invoke: Any = self.bound([inputs[spec.name] for spec in specs], output, self.stream())
        # It holds addresses; the memory behind them must not be given back while it lives.
        invoke.tensors = inputs, output
        run: Run = invoke
        return run

    def bound(self, inputs: Sequence[torch.Tensor], output: torch.Tensor, stream: int) -> Run:
        """The kernel's call on these addresses, which holds no tensor: they must live when it is made."""
        specs = self._signature.inputs
        slot = Slot(
            inputs=tuple(placed(spec, tensor) for spec, tensor in zip(specs, inputs, strict=True)),
            outputs=(placed(self._signature.outputs[0], output),),
        )
        return self._kernel.bind(AnyMemory(stream), slot, {})

    def stream(self) -> int:
        """The stream that is current now; 0 on a CPU."""
        import torch

        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0


class Called:
    """A problem's candidate as a function of two inputs and an output, for a tool that brings its own tensors.

    A call is bound once for every stream and set of addresses. They are few, as torch's allocator gives the same ones
    again, and binding takes longer than a launch: a tool that times the host too would time it.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._bound: dict[tuple[int, ...], Run] = {}

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        key = (self._problem.stream(), a.data_ptr(), b.data_ptr(), c.data_ptr())
        run = self._bound.get(key)
        if run is None:
            run = self._bound[key] = self._problem.bound((a, b), c, key[0])
        run()


def use_library(request: Request) -> None:
    """Have torch call the request's library for products, in the whole process."""
    if request.blas_library:
        write_flags({"blas_library": request.blas_library})


def placed(spec: TensorSpec, tensor: torch.Tensor) -> Placement:
    """Where a tensor of torch lies."""
    return Placement(spec=spec, offset=tensor.data_ptr(), num_bytes=tensor.numel() * tensor.element_size())


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean. Raises ZeroDivisionError when empty."""
    return sum(values) / len(values)
