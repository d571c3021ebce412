"""conv2d: y[N,F,P,Q] = cross-correlation of x[N,C,H,W] with w[F,C,K,K], zero padding, as torch's conv2d."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.errors import UsageError
from pytest_klineage.operators.base import DEFAULT_DISTRIBUTION, Cases, Operator
from pytest_klineage.operators.distributions import (
    TINY,
    normal,
    permutation,
    perturbed,
    plain,
    random_index,
    signs,
    spiked,
    torch_dtype,
)
from pytest_klineage.operators.tolerance import UNIT_ROUNDOFF, Expected, output_rounding, summation_variance
from pytest_klineage.records import KernelCase, Option, Signature, TensorSpec
from pytest_klineage.records.signature import permuted

if TYPE_CHECKING:
    import torch

    from pytest_klineage.operators.base import Tensors, Undo

LARGE = {"fp32": 1e15, "fp16": 100.0, "bf16": 1e15}
"""Factor of x in the large-magnitude input distribution: y is about as large as x."""

BORDER = 8.0
"""Factor of the outermost rows and columns in the borders input distribution; the four corners get it twice."""

LONE_PIXELS, LONE_EVERY = "lone_pixels", 4096
"""A check that no prompt names: two elements of x and one of so many are large. Only outputs that read one may err by
it."""
LONE = {"fp32": 1e6, "fp16": 5e3, "bf16": 1e6}
"""Half of how large they are at most."""

PERTURBATION = 32.0
"""A perturbation in largest elements: one term that outweighs the rounding of shifted bf16 sums."""

DRAWS = 64
"""How often a place that some output reads is drawn until it lies outside of the padding."""

MEMORY_ORDER = {"nchw": (0, 1, 2, 3), "nhwc": (0, 2, 3, 1)}

SHIFT = 1.0
"""Mean of the shifted input distribution. More would bury the differences between outputs under bf16's rounding for
long sums."""


class Conv2d(Operator):
    """Two-dimensional convolution. Axes N, C, H, W, F, K (filter height and width), stride, pad; layout nchw or nhwc.

    Inputs x[N,C,H,W], w[F,C,K,K]; output y[N,F,P,Q] with P = (H + 2 pad - K) // stride + 1. In layout nhwc shapes stay
    the same and all three tensors have torch's channels_last strides.
    """

    name: ClassVar[str] = "conv2d"
    axes: ClassVar[tuple[str, ...]] = ("N", "C", "H", "W", "F", "K", "stride", "pad")
    options: ClassVar[dict[str, tuple[Option, ...]]] = {"layout": ("nchw", "nhwc")}
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    input_distributions: ClassVar[tuple[str, ...]] = (
        DEFAULT_DISTRIBUTION,
        "spikes",
        "shifted",
        "large_magnitude",
        "borders",
        "plain",
    )
    family: ClassVar[str] = "products of tiles"
    aliases: ClassVar[tuple[str, ...]] = ("conv",)
    gpu_reference: ClassVar[str] = "cudnn"
    published: ClassVar[Cases] = {
        "gpu": ((8, 64, 56, 56, 128, 3, 1, 1), "fp16", {}),
        "cpu": ((1, 64, 56, 56, 128, 3, 1, 1), "fp32", {}),
    }
    small: ClassVar[Cases] = {
        "gpu": ((1, 64, 16, 16, 128, 3, 1, 1), "fp16", {}),
        "cpu": ((1, 8, 12, 12, 16, 3, 1, 1), "fp32", {}),
    }
    tensor_axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "x": ("N", "C", "H", "W"), "w": ("F", "C", "K", "K"), "y": ("N", "F", "P", "Q"),
    }  # fmt: skip

    def in_torch(self, case: KernelCase, *, in_order: bool = False) -> str:
        stride, pad = case.shape["stride"], case.shape["pad"]
        return f"return torch.nn.functional.conv2d(x, w, stride={stride}, padding={pad})"

    def least_size(self, axis: str) -> int:
        return 0 if axis == "pad" else 1

    def validate(self, case: KernelCase) -> None:
        _n, _c, height, width, _f, size, _stride, pad = case.shape.values()
        if min(height, width) + 2 * pad < size:
            raise UsageError(f"conv2d: a {size}x{size} filter does not fit into {height}x{width} with padding {pad}")
        if pad >= size:
            raise UsageError(f"conv2d: padding {pad} must be smaller than the filter ({size}), or outputs are constant")

    def signature(self, case: KernelCase) -> Signature:
        n, c, height, width, f, size, stride, pad = case.shape.values()
        order = MEMORY_ORDER[str(self.option(case, "layout"))]

        def spec(name: str, *shape: int) -> TensorSpec:
            return permuted(name, case.dtype, shape, order)

        return Signature(
            inputs=(spec("x", n, c, height, width), spec("w", f, c, size, size)),
            outputs=(spec("y", n, f, *output_size(case)),),
            scalars={"stride": float(stride), "pad": float(pad)},
        )

    def make_inputs(self, case: KernelCase, generator: torch.Generator, input_distribution: str) -> Tensors:
        n, c, height, width, f, size, _stride, _pad = case.shape.values()
        x, w = normal((n, c, height, width), generator), normal((f, c, size, size), generator)
        w /= (c * size * size) ** 0.5
        if input_distribution == "spikes":
            x = spiked(x, generator, count=max(1, x.numel() // 1024), size=50.0)
            w = spiked(w, generator, count=max(1, f // 16), size=4.0)
        elif input_distribution == "shifted":
            x += SHIFT
            w += SHIFT / 2 / (c * size * size) ** 0.5
        elif input_distribution == "large_magnitude":
            # As in a matrix product, of which the channels are the inner axis.
            split = c if case.dtype == "fp16" else c // 2
            x[:, :split] *= LARGE[case.dtype]
            w[:, split:] *= LARGE[case.dtype]
        elif input_distribution == "borders":
            for row, column in ((0, slice(None)), (-1, slice(None)), (slice(None), 0), (slice(None), -1)):
                x[:, :, row, column] *= BORDER
        elif input_distribution == "plain":
            x = plain(x, generator)
            # From a column on that no tile or segment begins at.
            x[..., random_index(width + 1, generator) :] *= TINY[case.dtype]
            w[3::4] *= TINY[case.dtype]
        dtype = torch_dtype(case.dtype)
        return {"x": x.to(dtype), "w": w.to(dtype)}

    def further_names(self, case: KernelCase) -> tuple[str, ...]:
        return (LONE_PIXELS,)

    def further_problem(
        self, case: KernelCase, name: str, generator: torch.Generator, wrong: Tensors
    ) -> tuple[Tensors, Any] | str:
        """On a CPU alone: errors of kernels on a GPU have not been measured with them."""
        if generator.device.type != "cpu":
            return ""
        inputs = self.make_inputs(case, generator, DEFAULT_DISTRIBUTION)
        x, count = inputs["x"], 2 + inputs["x"].numel() // LONE_EVERY
        inputs["x"] = spiked(x.double(), generator, count=count, size=LONE[case.dtype]).to(x.dtype)
        return inputs, Expected(self, case, inputs)

    def oracle(self, case: KernelCase, inputs: Tensors) -> Tensors:
        return {"y": convolve(case, inputs["x"].double(), inputs["w"].double())}

    def baseline_output(self, case: KernelCase, inputs: Tensors) -> Tensors:
        # Products of fp16 or bf16 numbers are exact in fp32: this is what tensor cores with fp32 accumulators compute.
        return {"y": convolve(case, inputs["x"].float(), inputs["w"].float()).to(inputs["x"].dtype)}

    def error_scale(self, case: KernelCase, inputs: Tensors, expected: Tensors) -> Tensors:
        squares = convolve(case, inputs["x"].double().square_(), inputs["w"].double().square_())
        terms = case.shape["C"] * case.shape["K"] ** 2
        unit = summation_variance(squares, expected["y"], terms).sqrt_().mul_(UNIT_ROUNDOFF["fp32"])
        return {"y": unit.add_(output_rounding(case.dtype, expected["y"]))}

    def symmetry_transform(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> tuple[Tensors, Undo]:
        n, c, _height, _width, f, _size, _stride, _pad = case.shape.values()
        x, w = inputs["x"], inputs["w"]
        images, images_back = permutation(n, generator, x)
        channels, _ = permutation(c, generator, x)
        filters, filters_back = permutation(f, generator, x)
        image_signs = signs((n, 1, 1, 1), generator).to(x)
        channel_signs = signs((c, 1, 1), generator).to(x)
        filter_signs = signs((f, 1, 1, 1), generator).to(x)

        def undo(outputs: Tensors) -> Tensors:
            y = outputs["y"] * (image_signs * filter_signs.view(1, f, 1, 1))
            return {"y": y.index_select(1, filters_back).index_select(0, images_back)}

        return {
            "x": x.index_select(0, images).index_select(1, channels).mul_(image_signs * channel_signs),
            "w": w.index_select(0, filters).index_select(1, channels).mul_(filter_signs * channel_signs),
        }, undo

    def perturb(self, case: KernelCase, inputs: Tensors, generator: torch.Generator) -> Tensors:
        n, c, height, width, f, size, stride, pad = case.shape.values()
        rows, columns = output_size(case)

        def touched(outputs: int, length: int) -> tuple[int, int]:
            # Some output reads this place with this place of the filter; with a stride above the filter size, or in
            # the padding, others are never read.
            for _ in range(DRAWS):
                start = random_index(outputs, generator) * stride - pad
                place = start + random_index(size, generator)
                if 0 <= place < length:
                    return place, place - start
            # The first output reads the first place: less is padded than the filter is wide.
            return 0, min(pad, size - 1)

        (row, filter_row), (column, filter_column) = touched(rows, height), touched(columns, width)
        image, channel = random_index(n, generator), random_index(c, generator)
        if random_index(2, generator):
            where = (random_index(f, generator), channel, filter_row, filter_column)
            return {**inputs, "w": perturbed(inputs["w"], where, factor=PERTURBATION)}
        return {**inputs, "x": perturbed(inputs["x"], (image, channel, row, column), factor=PERTURBATION)}

    def flops(self, case: KernelCase) -> float:
        n, c, _height, _width, f, size, _stride, _pad = case.shape.values()
        rows, columns = output_size(case)
        return 2.0 * n * f * rows * columns * c * size * size


def output_size(case: KernelCase) -> tuple[int, int]:
    """Height P and width Q of the output."""
    _n, _c, height, width, _f, size, stride, pad = case.shape.values()
    return (height + 2 * pad - size) // stride + 1, (width + 2 * pad - size) // stride + 1


def convolve(case: KernelCase, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """torch's conv2d at the case's stride and padding, in the data type of its arguments."""
    import torch.nn.functional as functional

    return functional.conv2d(x, w, stride=case.shape["stride"], padding=case.shape["pad"])
