"""A torch module as a definition: what its forward is given, its parameters and buffers become inputs of an operator.

The module is trusted: its file runs wherever a definition does. `describe` runs it on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_klineage.errors import UsageError
from pytest_klineage.operators.distributions import TORCH_DTYPES, torch_dtype
from pytest_klineage.records import DTYPES, Option

if TYPE_CHECKING:
    import torch

MODEL, GIVEN, CONSTRUCTOR = "Model", "get_inputs", "get_init_inputs"
"""What a file defines: the module's class, a function that makes what forward is given, and one for the constructor."""
SPREAD = 0.5
"""A parameter that the module sets to one number c, as norms do with 1 and biases with 0, is drawn from c - 0.5 to
c + 0.5: a kernel that leaves it out is wrong."""


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What a file's module takes and gives."""

    signature: str
    """Tensors, as `operator` reads them."""
    shape: dict[str, int]
    """Sizes of the signature's axes."""
    dtype: str
    arguments: tuple[str, ...]
    """What forward is given, in its order."""
    numbers: dict[str, Option]
    """Those of the arguments that are no tensors."""
    state: dict[str, str]
    """By name in the module: the input that takes a parameter's or buffer's place."""
    constructor: str
    """What the module is made with, as text."""
    min_bytes: int
    """Size of the outputs: not every problem needs all of its inputs."""


class ModuleDefinition:
    """The module of a file. Calling it with all inputs by name calls its forward."""

    def __init__(
        self, namespace: Mapping[str, Any], arguments: Sequence[str], state: Mapping[str, str], *, training: bool = True
    ) -> None:
        self.namespace, self.arguments, self.state, self.training = namespace, arguments, state, training
        self._slots: dict[tuple[torch.device, torch.dtype], tuple[Any, list[tuple[dict[str, Any], str, str]]]] = {}

    def __call__(self, **named: Any) -> Any:
        """What forward returns, with these tensors in the place of the module's own."""
        import torch

        given = [named[name] for name in self.arguments]
        state = {theirs: named[ours] for theirs, ours in self.state.items()}
        module, slots = self._made(*place_of(named.values()))
        with torch.no_grad():
            if torch.compiler.is_compiling():
                return torch.func.functional_call(module, state, tuple(given))
            with replaced(slots, state):  # as functional_call does, in less than a microsecond a tensor
                return module(*given)

    def inputs(self, device: torch.device, *, as_written: bool = False) -> dict[str, torch.Tensor]:
        """New inputs by name, as the file makes them.

        Unless `as_written`, numbers of torch.rand are standard normal ones, since many functions do nothing to numbers
        between 0 and 1, and parameters that the module sets to one number are spread around it.
        """
        import torch

        with torch.no_grad(), torch.device(device):
            with on_device(device, normal=not as_written):
                given = dict(zip(self.arguments, self.namespace[GIVEN](), strict=False))
            with on_device(device):
                module = self._module()
            state = {self.state[name]: tensor.detach() for name, tensor in state_of(module).items()}
            if not as_written:
                state = {name: spread(tensor) for name, tensor in state.items()}
        return {name: value for name, value in {**given, **state}.items() if isinstance(value, torch.Tensor)}

    def _module(self) -> torch.nn.Module:
        module: torch.nn.Module = self.namespace[MODEL](*self.namespace[CONSTRUCTOR]())
        return module.train(self.training)

    def _made(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The module for tensors of a type on a device, and the places of its state. It is made once."""
        import torch

        if (device, dtype) not in self._slots:
            with torch.device(device), on_device(device):
                module = self._module().to(device, dtype).requires_grad_(False)
            self._slots[device, dtype] = module, slots_of(module, self.state)
        return self._slots[device, dtype]


def describe(namespace: Mapping[str, Any], *, precision: str = "", training: bool = True) -> Described:
    """Run a file's functions and its module once, on tensors without memory where that is possible.

    Raises UsageError for what cannot be an operator: no tensor among the results, random answers, other arguments.
    """
    import torch

    if missing := [name for name in (MODEL, GIVEN, CONSTRUCTOR) if not callable(namespace.get(name))]:
        raise UsageError(f"it defines no {', '.join(missing)}")
    try:
        return _described(namespace, torch.device("meta"), precision, training)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        return _described(namespace, torch.device("cpu"), precision, training)


def _described(namespace: Mapping[str, Any], device: torch.device, precision: str, training: bool) -> Described:
    import inspect

    import torch

    with torch.no_grad(), torch.device(device), on_device(device):
        constructor = namespace[CONSTRUCTOR]()
        module = namespace[MODEL](*constructor).train(training)
        given = list(namespace[GIVEN]())
        check(module, given)
        if precision:
            module, given = module.to(torch_dtype(precision)), [cast(item, precision) for item in given]
        result = module(*given)
    names = [*inspect.signature(module.forward).parameters][: len(given)]
    return _written(namespace, dict(zip(names, given, strict=True)), state_of(module), results_of(result), constructor)


def _written(
    namespace: Mapping[str, Any], given: Mapping[str, Any], state: Mapping[str, Any], results: Sequence[Any],
    constructor: Any,
) -> Described:  # fmt: skip
    import torch

    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    ours = {name: unique(name.replace(".", "_"), given) for name in state}
    outputs = {unique("y" if len(results) == 1 else f"y{position}", {**given, **dict.fromkeys(ours.values())}): result
               for position, result in enumerate(results)}  # fmt: skip
    floats = [tensor for tensor in (*tensors.values(), *results) if tensor.is_floating_point()]
    dtype = short_name(floats[0].dtype) if floats else "fp32"
    axes = axes_of(namespace, tensors.values(), {*given, *ours.values(), *outputs})
    inputs = {**tensors, **{ours[name]: tensor for name, tensor in state.items()}}
    left, right = (", ".join(shown(*item, axes, dtype) for item in group.items()) for group in (inputs, outputs))
    used = {size for group in (inputs, outputs) for tensor in group.values() for size in tensor.shape}
    return Described(
        signature=f"{left} -> {right}", dtype=dtype, arguments=tuple(given), state=ours, constructor=repr(constructor),
        shape={name: size for size, name in axes.items() if size in used},
        numbers={name: value for name, value in given.items() if name not in tensors},
        min_bytes=sum(tensor.numel() * DTYPES[short_name(tensor.dtype)] for tensor in results),
    )  # fmt: skip


def check(module: torch.nn.Module, given: Sequence[Any]) -> None:
    """Raise UsageError for a module without one answer, or arguments that are neither tensors nor numbers."""
    import torch

    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            kind = type(part).__name__
            raise UsageError(f"its answer is random: {name} is {kind} in training mode; import with --eval")
        loose = [key for key, value in vars(part).items() if isinstance(value, torch.Tensor)]
        if loose:
            raise UsageError(f"the tensor {loose[0]} is an attribute of its module; make it a parameter or a buffer")
    for value in given:
        if not isinstance(value, torch.Tensor) and type(value) not in (bool, int, float):
            raise UsageError(f"forward takes a {type(value).__name__}; inputs here are tensors, options are numbers")


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that forward reads: not counters, nor statistics that training only writes."""
    import torch

    norms = {name for name, part in module.named_modules()
             if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.training}  # fmt: skip
    buffers = {
        name: tensor for name, tensor in module.named_buffers()
        if name.rpartition(".")[0] not in norms and (tensor.is_floating_point() or tensor.dim())
    }  # fmt: skip
    return {**dict(module.named_parameters()), **buffers}


def slots_of(module: torch.nn.Module, names: Mapping[str, str]) -> list[tuple[dict[str, Any], str, str]]:
    """By name in the module: the dictionary that holds a tensor, and its key there."""
    found = []
    for name in names:
        owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        found.append((part._parameters if key in part._parameters else part._buffers, key, name))
    return found


@contextmanager
def replaced(slots: Sequence[tuple[dict[str, Any], str, str]], state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put tensors in the place of a module's own, for as long as the block lasts."""
    before = [(held, key, held[key]) for held, key, _ in slots]
    for held, key, name in slots:
        held[key] = state[name]
    try:
        yield
    finally:
        for held, key, tensor in before:
            held[key] = tensor


def on_device(device: torch.device, *, normal: bool = False) -> Any:
    """A mode in which tensors that name another device are made here; with `normal`, torch.rand is torch.randn."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnDevice(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None:
                kwargs["device"] = device
            if getattr(function, "__name__", "") == "cuda":
                return args[0]
            return (torch.randn if normal and function is torch.rand else function)(*args, **kwargs)

    return OnDevice()


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of one number, drawn around it; others as they are."""
    import torch

    constant = tensor.is_floating_point() and bool((tensor == tensor.flatten()[0]).all())
    return tensor + SPREAD * (2 * torch.rand_like(tensor) - 1) if constant else tensor


def axes_of(namespace: Mapping[str, Any], tensors: Any, taken: set[str]) -> dict[int, str]:
    """Names of the sizes of tensors: that of a number of the file where one has this value, else such as D64.

    Sizes that are equal get one name. Whether the axis can be permuted is found by trying.
    """
    named = {value: name for name, value in reversed(list(namespace.items())) if type(value) is int and name[0] != "_"}
    sizes = dict.fromkeys(size for tensor in tensors for size in tensor.shape if size > 1)
    return {size: unique(named.get(size, f"D{size}"), taken) for size in sizes}


def shown(name: str, tensor: torch.Tensor, axes: Mapping[int, str], dtype: str) -> str:
    """A tensor as the signature's line writes it."""
    own = short_name(tensor.dtype)
    dims = ",".join(axes.get(size, str(size)) for size in tensor.shape)
    return f"{name}[{dims}]{'' if own == dtype else f': {own}'}"


def short_name(dtype: torch.dtype) -> str:
    """Our name of a type. Raises UsageError for one that inputs cannot have."""
    long = str(dtype).removeprefix("torch.")
    for name, other in TORCH_DTYPES.items():
        if other == long:
            return name
    raise UsageError(f"tensors of {long}; types here are {', '.join(TORCH_DTYPES)}")


def results_of(result: Any) -> list[torch.Tensor]:
    """The tensors that a module returns. Raises UsageError for anything else."""
    import torch

    values = list(result.values()) if isinstance(result, dict) else result
    found = list(values) if isinstance(values, tuple | list) else [values]
    if not found or not all(isinstance(item, torch.Tensor) for item in found):
        kinds = ", ".join(type(item).__name__ for item in found)
        raise UsageError(f"forward returns {kinds or 'nothing'}, not tensors")
    return found


def cast(value: Any, precision: str) -> Any:
    """A tensor of floats in this type; others as they are."""
    import torch

    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch_dtype(precision)) if floats else value


def place_of(values: Any) -> tuple[torch.device, torch.dtype]:
    """Device of the tensors, and the type of the first one of floats."""
    import torch

    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    floats = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    return tensors[0].device, next(floats, torch.get_default_dtype())


def unique(name: str, taken: Any) -> str:
    """The name, or with underscores after it when it is taken."""
    while name in taken:
        name += "_"
    return name
