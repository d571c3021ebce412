"""Tables of what the package has, for regions of the pages: options, operators, platforms, capabilities."""

from __future__ import annotations

from collections.abc import Callable

from tabulate import tabulate

from pytest_klineage.lab.library.normalise import granted
from pytest_klineage.lab.plugin import OPTIONS as LAB_OPTIONS
from pytest_klineage.operators import OPERATORS, paper_case
from pytest_klineage.plugin.options import OPTIONS
from pytest_klineage.records import GPU_PLATFORMS


def options() -> str:
    """Every option of pytest with its help."""
    rows = [(f"`{one.flag} {one.metavar}".rstrip() + "`", one.help) for one in (*OPTIONS, *LAB_OPTIONS)]
    escaped = [tuple(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row) for row in rows]
    return f"{tabulate(escaped, ('option', 'meaning'), tablefmt='pipe')}\n"


def operators() -> str:
    """Each operator's axes, types, options, input distributions, and its published cases."""
    rows = [
        (
            f"`{name}`", ", ".join(one.axes), ", ".join(one.dtypes),
            "; ".join(f"`{option}`: {', '.join(map(str, values))}" for option, values in one.options.items()),
            *(published_case(name, tier) for tier in ("cpu", "gpu")), ", ".join(one.input_distributions),
        )
        for name, one in OPERATORS.items()
    ]  # fmt: skip
    headers = (
        "operator",
        "axes, in order",
        "types",
        "options (default first)",
        "`cpu`",
        "`gpu`",
        "input distributions",
    )
    return f"{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}\n"


def published_case(operator: str, tier: str) -> str:
    """Sizes and type."""
    case = paper_case(operator, tier, "torch")
    return f"{', '.join(map(str, case.shape.values()))} {case.dtype}"


def platforms() -> str:
    """The GPU platforms that kernels are built for."""
    rows = [
        (
            f"`{one.name}`",
            one.title,
            one.capability,
            f"`sm_{one.target}`",
            ".".join(map(str, one.toolkit)),
            one.shared_bytes,
        )
        for one in GPU_PLATFORMS.values()
    ]
    headers = ("platform", "is", "capability", "compiled for", "nvcc from", "shared memory of a block, bytes")
    return f"{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}\n"


def products() -> str:
    """The GPUs of each platform whose data sheets are known."""
    named = {one.name: [gpu.name.removeprefix("NVIDIA ") for gpu in one.products] for one in GPU_PLATFORMS.values()}
    return "".join(f"- `{name}`: {', '.join(gpus)}\n" for name, gpus in named.items())


def capabilities() -> str:
    """What each platform is granted."""
    rows = [(f"`{name}`", ", ".join(f"`{one}`" for one in sorted(granted(name)))) for name in ("cpu", *GPU_PLATFORMS)]
    return f"{tabulate(rows, ('platform', 'is granted'), tablefmt='pipe')}\n"


PACKAGE_TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "operators": operators,
    "platforms": platforms,
    "products": products,
    "capabilities": capabilities,
}
