"""Random numbers that operators share: distributions, symmetries and perturbations, drawn from an explicit generator.

Numbers are float64 and lie on the generator's device.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TORCH_DTYPES = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "int64": "int64", "int32": "int32", "int16": "int16", "int8": "int8", "uint8": "uint8",
    "bool": "bool",
}  # fmt: skip

CHUNK = 1 << 18
"""Normal numbers that one generator draws on a CPU: drawing is serial, so that a tensor's chunks are drawn together."""

TINY = {"fp32": 2.0**-40, "bf16": 2.0**-40, "fp16": 2.0**-10}
"""Factor of the small part of the plain input distribution: a product of two such numbers is still no zero."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch data type of a short name such as "bf16"."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[name])
    return dtype


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Standard normal numbers. Which they are does not depend on the number of threads."""
    import torch

    if generator.device.type == "cpu" and math.prod(shape) > CHUNK:
        return normal_in_chunks(shape, generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


def normal_in_chunks(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The same on a CPU, each chunk from a generator of its own, in as many threads as torch may use."""
    import torch

    values = torch.empty(shape, dtype=torch.float64)
    chunks = torch.split(values.view(-1), CHUNK)
    seeds = torch.randint(1 << 62, (len(chunks),), generator=generator).tolist()

    def fill(chunk: torch.Tensor, seed: int) -> None:
        chunk.normal_(generator=torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, chunks, seeds))
    return values


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Numbers between zero and one."""
    import torch

    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)


def spiked(values: torch.Tensor, generator: torch.Generator, *, count: int, size: float) -> torch.Tensor:
    """`values` (contiguous, changed in place) with `count` random elements of magnitude `size` to 2 `size`."""
    import torch

    flat = values.view(-1)
    where = torch.randint(flat.numel(), (count,), generator=generator, device=generator.device)
    flat[where] = size * (1 + uniform((count,), generator)) * signs((count,), generator)
    return values


def plain(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`values` (contiguous, changed in place) as data often is: half zeros, a quarter plus or minus one, rows alike.

    Every fourth row is its predecessor but for one element. What looks for padding, or knows a row by its first
    numbers, is wrong there.
    """
    import torch

    kind = uniform(tuple(values.shape), generator)
    values.copy_(torch.where(kind < 0.25, signs(tuple(values.shape), generator), values))
    values[kind >= 0.5] = 0
    rows = values.view(-1, values.shape[-1])
    alike = torch.arange(1, len(rows), 4, device=values.device)
    where = torch.randint(rows.shape[1], alike.shape, generator=generator, device=generator.device)
    rows[alike] = rows[alike - 1]
    rows[alike, where] = normal(tuple(alike.shape), generator)
    return values


def in_some_rows(changed: torch.Tensor, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`values` with one row of 16, at random but not the first, from `changed`: a look at some rows shows nothing."""
    import torch

    rows = values.shape[:-1].numel()
    first, count = min(1, rows - 1), max(1, rows // 16)
    chosen = torch.zeros(rows, dtype=torch.bool, device=values.device)
    chosen[torch.randint(first, rows, (count,), generator=generator, device=values.device)] = True
    return torch.where(chosen.view(*values.shape[:-1], 1), changed, values)


def powers_of_two(shape: tuple[int, ...], most: int, generator: torch.Generator) -> torch.Tensor:
    """From 2**-most to 2**most, at random: products with them are exact."""
    import torch

    return torch.randint(-most, most + 1, shape, generator=generator, device=generator.device).double().exp2_()


def evenly(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Numbers between zero and one in random order, one in each of as many equal parts as there are numbers."""
    import torch

    order = torch.randperm(math.prod(shape), generator=generator, device=generator.device).view(shape)
    return uniform(shape, generator).add_(order).div_(order.numel())


def signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Plus or minus one, at random."""
    import torch

    return torch.randint(2, shape, generator=generator, device=generator.device).double().mul_(2).sub_(1)


def permutation(size: int, generator: torch.Generator, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A random order of `size` things and the order that undoes it, on the device of `like`; never the identity."""
    import torch

    order = torch.randperm(size, generator=generator, device=generator.device)
    if torch.equal(order, torch.arange(size, device=order.device)):
        order = order.roll(1)
    order = order.to(like.device)
    return order, torch.argsort(order)


def random_index(size: int, generator: torch.Generator) -> int:
    """One of 0 … size - 1."""
    import torch

    return int(torch.randint(size, (1,), generator=generator, device=generator.device))


def perturbed(values: torch.Tensor, where: tuple[int, ...], *, factor: float = 1.0) -> torch.Tensor:
    """A copy in which one element has the other sign and a magnitude just above `factor` times the largest one."""
    changed = values.clone()
    size = factor * float(values.abs().max()) + 1.0
    changed[where] = -size if float(values[where]) > 0 else size
    return changed
