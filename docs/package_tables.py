"""Tables of what the package has, for regions of the pages: options, operators, platforms, capabilities, sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from sizes import PACKAGE, counted, table
from tabulate import tabulate

from pytest_klineage.cli.main import build_parser
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


MOST_FLAGS = 8
"""A command with more is shown without them: its `--help` has them."""


def commands() -> str:
    """Every command with its arguments and help."""
    rows = [(f"`{usage(parser)}`".replace("|", "\\|"), about) for parser, about in leaves(build_parser(), "")]
    return f"{tabulate(rows, ('command', 'does'), tablefmt='pipe')}\n"


def leaves(parser: argparse.ArgumentParser, about: str) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The parsers that have no commands below them, with what is said of each."""
    below = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if not below:
        yield parser, about
    for one in below:
        helps = {choice.dest: choice.help or "" for choice in one._choices_actions}
        for name, child in one.choices.items():
            yield from leaves(child, helps[name])


def usage(parser: argparse.ArgumentParser) -> str:
    """A command and its arguments, on a line."""
    actions = [one for one in parser._actions if one.dest != "help" and one.help != argparse.SUPPRESS]
    flags = [flag_text(one) for one in actions if one.option_strings]
    words = [argument_text(one) for one in actions if not one.option_strings]
    shown = flags if len(flags) <= MOST_FLAGS else ["..."]
    return " ".join([parser.prog.partition(" ")[2], *words, *shown])


def flag_text(action: argparse.Action) -> str:
    """An option, in brackets unless it is required."""
    value = "" if action.nargs == 0 else value_text(action)
    text = f"{action.option_strings[0]} {f'[{value}]' if action.nargs == '?' else value}".rstrip()
    return text if action.required else f"[{text}]"


def argument_text(action: argparse.Action) -> str:
    """A positional argument, as its number demands."""
    name = value_text(action)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name}..."}.get(str(action.nargs), name)


def value_text(action: argparse.Action) -> str:
    """What stands for an argument's value."""
    return str(action.metavar or "|".join(map(str, action.choices or (action.dest.upper(),))))


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


def sizes() -> str:
    """Lines of the package by part."""
    return f"{table(PACKAGE)}\n"


def size() -> str:
    """The package's lines in a sentence, in thousands: exact figures would be stale with every change."""
    _files, lines, code, *_ = counted(PACKAGE)["all"]
    return f"Today it has over {lines // 1000},000 lines, over {code // 1000},000 of them code.\n"


PACKAGE_TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "commands": commands,
    "operators": operators,
    "platforms": platforms,
    "products": products,
    "capabilities": capabilities,
    "package-size": size,
    "package-sizes": sizes,
}
