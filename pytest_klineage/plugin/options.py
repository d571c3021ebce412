"""Command-line options and their ini twins: one table, one precedence (command line, then ini, then default).

Nothing here imports the gate: whether a platform, policy or method exists is checked when the settings are first used.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest

from pytest_klineage.errors import UsageError

Parser: TypeAlias = Callable[[str], Any]

MODES = ("gate", "record")
STAGES = ("all", "compile")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRESS = ("auto", "on", "off")
SWITCH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False, "on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: `--klineage-<name>` and the ini key `klineage_<name>`. Absent on both sides it is None."""

    name: str
    metavar: str
    """What stands for its value; empty for an option that has none."""
    parse: Parser
    help: str
    repeatable: bool = False

    @property
    def flag(self) -> str:
        return f"--klineage-{self.name}"

    @property
    def key(self) -> str:
        """Name of the ini key, and of the attribute of `config.option`."""
        return f"klineage_{self.name.replace('-', '_')}"


def one_of(*names: str) -> Parser:
    """A parser that takes one of some words."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of: {', '.join(names)}")
        return text

    return parse


def number(kind: type[int] | type[float], least: float, *, above: bool = False, below: float | None = None) -> Parser:
    """A parser that takes a number at least (or above) `least`, and below `below`."""
    bound = f"{'above' if above else 'at least'} {least:g}" + (f" and below {below:g}" if below is not None else "")
    what = "a whole number" if kind is int else "a number"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not (value > least if above else value >= least) or (below is not None and value >= below):
            raise argparse.ArgumentTypeError(f"{text} must be {bound}")
        return value

    return parse


def size(text: str) -> int:
    """A parser that takes bytes, with a binary suffix or none: 64M, 1G, 0."""
    found = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.I)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64M, 1G or 0")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]


def word(text: str) -> str:
    """A parser that takes anything but nothing."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def sanitizers(text: str) -> str:
    """A parser that takes tools of compute-sanitizer between commas, or the word all."""
    for name in text.split(","):
        if name not in (*SANITIZERS, "all"):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of: {', '.join(SANITIZERS)}, all")
    return text


def slower(text: str) -> str:
    """A parser that takes how much slower a kernel may have become, such as slower:3%."""
    from pytest_klineage.report.compare import read_tolerance

    try:
        read_tolerance(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


LOCAL, BATCH, RAY = "local", "batch", "ray"
"""Executors: this process; a folder of requests, written batch:DIR; a Ray cluster, written ray or ray://HOST:PORT."""


def executor(text: str) -> str:
    """A parser that takes local, batch:DIR, ray or ray://HOST:PORT."""
    kind, colon, rest = text.partition(":")
    if text not in (LOCAL, RAY) and not (kind == BATCH and colon and rest.strip()) and not is_ray(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of: {LOCAL}, {BATCH}:DIR, {RAY}[://HOST:PORT]")
    return text


def is_ray(text: str) -> bool:
    """Whether an executor is a Ray cluster."""
    return text == RAY or re.fullmatch(rf"{RAY}://[^/\s]+", text) is not None


def switch(text: str) -> bool:
    """A parser for the ini key of an option without a value."""
    if text.lower() not in SWITCH:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of: {', '.join(SWITCH)}")
    return SWITCH[text.lower()]


OPTIONS = (
    Option("platform", "NAME", word, "Platform to run on: auto, cpu, or a GPU's, such as sm90 (default: auto)"),
    Option(
        "executor", "local|batch:DIR|ray[://HOST:PORT]", executor,
        "Where kernels are judged: in this process (local), by `pytest-klineage judge DIR` on any machine, later;"
        " the same command goes on with the verdicts that have come (batch:DIR), or by the judges of a Ray cluster"
        " (default: local)",
    ),
    Option(
        "gpu-product", "NAME", word,
        "GPU product of the Ray cluster to judge on, such as H200; required where it has several",
    ),
    Option(
        "priority", "N", number(int, -1_000_000),
        "What is judged first where others ask as well: higher numbers, as 10 for a pull request (default: 0)",
    ),
    Option(
        "mode", "gate|record", one_of(*MODES), "A bad kernel fails its test (gate) or is data (record) (default: gate)"
    ),
    Option(
        "stage", "all|compile", one_of(*STAGES),
        "How far to go: judge (all), or build every kernel for the platform and hold it to its resources, which needs"
        " no device (compile) (default: all)",
    ),
    Option(
        "artifacts", "DIR", word,
        "Folder of built kernels: written with --klineage-stage=compile, else used instead of building",
    ),
    Option(
        "fail-skipped", "", switch, "A kernel that cannot be judged here, as without a compiler, fails its test"
    ),
    Option(
        "policy", "NAME", word,
        "Timing policy that decides: paired, paper, do_bench or, on a GPU, cudagraph (default: paired)",
    ),
    Option("also-policy", "NAME", word, "Measure with this timing policy as well; repeatable", repeatable=True),
    Option(
        "sanitize", "TOOL", sanitizers,
        "Run compute-sanitizer's memcheck, racecheck, initcheck or synccheck (or all) over every CUDA kernel before it"
        " is timed; repeatable",
        repeatable=True,
    ),
    Option("margin", "X", number(float, 0, below=1), "How much slower than required still passes (default: 0.05)"),
    Option(
        "precision", "X", number(float, 0, above=True, below=1),
        "Stop timing when the interval is this narrow, as a half-width relative to the speedup (default: 0.01)",
    ),
    Option(
        "confidence", "X", number(float, 0, above=True, below=1),
        "Confidence of the speedup's interval, at most 0.995 (default: 0.95)",
    ),
    Option(
        "time-limit", "SECONDS", number(float, 0, above=True),
        "Longest timing of one kernel with one policy, tracing excluded (default: 10)",
    ),
    Option(
        "busy-limit", "X", number(float, 0),
        "Share of the machine that others may use during timing; above it a verdict is inconclusive (default: 0.25); "
        "1 allows all, on a GPU other processes too",
    ),
    Option(
        "spread-limit", "X", number(float, 1, above=True),
        "Factor between the quartiles of a side's times above which a verdict is inconclusive (default: 2)",
    ),
    Option(
        "seed", "TEXT", word,
        "Fix the random inputs of the checks, so that a wrong value comes back (default: other ones in every run)",
    ),
    Option("seeds", "N", number(int, 1), "How many random inputs a kernel must get right (default: 3)"),
    Option("threads", "N", number(int, 0), "CPU threads of kernel and reference; 0: all cores, bound (default: 0)"),
    Option(
        "flush", "SIZE", size,
        "Bytes to write between two timed calls, such as 64M, so that each starts from memory; on a CPU 0 for warm"
        " caches (default: what the case can have in the caches; on a GPU 256M)",
    ),
    Option("cache-dir", "DIR", word, "Where built kernels are kept (default: the user's cache folder)"),
    Option("results", "DIR", word, "Run stores are made in DIR/runs (default: results)"),
    Option("run", "NAME", word, "Name of this run, for its run store"),
    Option("build-timeout", "SECONDS", number(float, 0, above=True), "Longest build of one kernel (default: 120)"),
    Option(
        "load-timeout", "SECONDS", number(float, 0, above=True),
        "Longest load or import of one kernel; a GPU reference has at least 300 (default: 30)",
    ),
    Option("run-timeout", "SECONDS", number(float, 0, above=True), "Longest single call of a kernel (default: 30)"),
    Option(
        "method", "NAME", word, "Whose kernels the suites judge, such as expert or naive; repeatable (default: expert)",
        repeatable=True,
    ),
    Option(
        "progress", "auto|on|off", one_of(*PROGRESS),
        "Live progress of long judgements. auto: one line on a terminal, a line now and then elsewhere, none with -n."
        " on: the same, without waiting. (default: auto)",
    ),
    Option("json", "PATH", word, "Write all records and the summary of this run to PATH as one JSON file"),
    Option("save", "NAME", word, "Pin this run's timings, two judgements of each kernel, as the baseline NAME"),
    Option("compare", "NAME", word, "Compare with the baseline NAME of this platform and device"),
    Option(
        "compare-fail", "slower:PERCENT", slower,
        "Fail a kernel whose whole interval is slower by more, that is broken, or whose baseline does not fit"
        " (default: advisory, nothing fails)",
    ),
    Option(
        "base", "DIR", word, "Judge each changed kernel also against its older version in DIR, a checkout of the base"
    ),
    Option(
        "summary", "FILE", word,
        "Write the comparisons and the table of this run to FILE as Markdown (default with the options above: what"
        " $GITHUB_STEP_SUMMARY names)",
    ),
)  # fmt: skip

GATE_KEYS = {
    "stage": "stage",
    "artifacts": "artifacts",
    "policy": "policy",
    "also-policy": "also_policies",
    "sanitize": "sanitize",
    "margin": "margin",
    "precision": "precision",
    "confidence": "confidence",
    "time-limit": "time_limit_s",
    "busy-limit": "busy_limit",
    "spread-limit": "spread_limit",
    "seed": "seed",
    "seeds": "seeds",
    "threads": "threads",
    "flush": "flush_bytes",
    "cache-dir": "cache_dir",
    "build-timeout": "build_timeout_s",
    "load-timeout": "load_timeout_s",
    "run-timeout": "run_timeout_s",
}
"""Options that are settings of the gate, and what the gate calls them."""
COMPARING_NAMES = ("save", "compare", "compare-fail", "base", "summary")
"""Options of plugin/comparison/baselines.py."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options in force."""

    platform: str
    """As the user wrote it; "auto" is resolved when the gate is needed."""
    mode: str
    results: Path
    run_name: str
    methods: tuple[str, ...]
    progress: str
    json: Path | None
    batch: Path | None = None
    """Folder of requests, when kernels are judged by who has the folder."""
    ray: str = ""
    """The Ray cluster that judges: ray, or ray://HOST:PORT."""
    product: str = ""
    priority: int = 0
    fail_skipped: bool = False
    """Whether a kernel that cannot be judged fails its test."""
    gate: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for GateSettings: only what the user gave."""
    given: tuple[str, ...] = ()
    """Names of the options that the user gave, on the command line or in the ini file."""


def add_options(parser: pytest.Parser, options: Sequence[Option] = OPTIONS) -> None:
    """Register options and their ini twins. Defaults are None, or the ini file would never win."""
    group = parser.getgroup("klineage", "gate for kernels (pytest-klineage)")
    for option in options:
        value: dict[str, Any] = {"action": "store_true"}
        if option.metavar:
            action = "append" if option.repeatable else "store"
            value = {"action": action, "metavar": option.metavar, "type": option.parse}
        group.addoption(option.flag, dest=option.key, default=None, help=option.help, **value)
        kind: Literal["args", "string"] = "args" if option.repeatable else "string"
        parser.addini(option.key, option.help, type=kind, default=None)


def option_value(config: pytest.Config, option: Option) -> Any:
    """An option's value: command line, else ini file, else None. Raises pytest.UsageError for a bad ini value."""
    given = config.getoption(option.key)
    if given is not None:
        return given
    written = config.getini(option.key)
    if written is None:
        return None
    try:
        return [option.parse(item) for item in written] if option.repeatable else option.parse(written)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"{option.key} in {config.inipath}: {error}") from None


def read_settings(config: pytest.Config) -> Settings:
    """All settings in force. Raises pytest.UsageError."""
    values = {option.name: option_value(config, option) for option in OPTIONS}
    given = tuple(name for name, value in values.items() if value is not None)
    gate = {GATE_KEYS[name]: values[name] for name in given if name in GATE_KEYS}
    if "also_policies" in gate:
        gate["also_policies"] = tuple(gate["also_policies"])
    if "sanitize" in gate:
        asked = {name for text in gate["sanitize"] for name in text.split(",")}
        gate["sanitize"] = tuple(name for name in SANITIZERS if name in asked or "all" in asked)
    for name in ("cache-dir", "artifacts"):
        if values[name] is not None:
            gate[GATE_KEYS[name]] = given_path(config, name, values[name])
    return Settings(
        platform=values["platform"] or "auto",
        mode=values["mode"] or "gate",
        results=given_path(config, "results", values["results"] or str(config.rootpath / "results")),
        run_name=values["run"] or "",
        methods=tuple(dict.fromkeys(values["method"] or ["expert"])),
        progress=values["progress"] or "auto",
        json=given_path(config, "json", values["json"]) if values["json"] else None,
        batch=_batch(config, values["executor"] or LOCAL),
        ray=(values["executor"] or "") if is_ray(values["executor"] or "") else "",
        product=values["gpu-product"] or "",
        priority=values["priority"] or 0,
        fail_skipped=bool(values["fail-skipped"]),
        gate=gate,
        given=given,
    )


def given_path(config: pytest.Config, name: str, text: str) -> Path:
    """A path from the command line is relative to where pytest was started, one from the ini file to the ini file."""
    from_ini = config.getoption(f"klineage_{name.replace('-', '_')}") is None
    base = config.inipath.parent if from_ini and config.inipath else config.invocation_params.dir
    return (base / Path(text).expanduser()).absolute()


def _batch(config: pytest.Config, text: str) -> Path | None:
    kind, _, folder = text.partition(":")
    return given_path(config, "executor", folder) if kind == BATCH else None
