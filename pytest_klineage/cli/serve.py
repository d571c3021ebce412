"""`pytest-klineage external`: an optimizer of others under a budget and in front of the gate. What runs lives below."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_klineage.cli.console import FAILED, OK, Commands, add_group, say, write_files
from pytest_klineage.cli.gating import add_gate_options, given, given_settings
from pytest_klineage.errors import KlineageError, UsageError

if TYPE_CHECKING:
    from pytest_klineage.gate import Gate, GateSettings
    from pytest_klineage.lab.external.evaluating import EvaluationTarget, SubmissionStep
    from pytest_klineage.lab.external.proxy import Upstream
    from pytest_klineage.lab.external.runner import ExternalResult, ExternalRun, Setup
    from pytest_klineage.records import KernelCase, KernelSource, Verdict

ANSWER_S = 3600.0
EXIT_CODES = """\
exit codes:
  0  done: the optimizer ended by itself, or out of money, steps or time, and what it submitted was judged;
     for judge: the kernel is right
  1  the optimizer failed, or submitted nothing; for judge: the kernel is not right, or nothing was judged
  2  the command line, or what it names, is not valid
"""
PROVIDERS = {
    "anthropic": ("ANTHROPIC_API_KEY", "https://api.anthropic.com"),
    "openai": ("OPENAI_API_KEY", "https://api.openai.com/v1"),
}
"""By protocol: variable of the key, and address."""
BAD_ENDS = ("optimizer_failed", "nothing_submitted", "not_judged")


def add_external(commands: Commands) -> None:
    """Add the command `external` with its actions."""
    actions = add_group(
        commands, "external", "run an optimizer of others, unmodified: budget, gate, records", EXIT_CODES
    )
    run = actions.add_parser("run", help="start the proxy, the evaluation server and an optimizer")
    _add_case(run)
    _add_run(run)
    run.add_argument("command_line", metavar="COMMAND", nargs="+", help="after --: the optimizer and its arguments")
    run.set_defaults(command=run_external)
    prepare = actions.add_parser("prepare", help="write the case down as an optimizer expects its problem")
    prepare.add_argument("format", choices=("adaexplore", "accelopt"), help="whose problem")
    prepare.add_argument("folder", metavar="DIR", type=Path, help="AdaExplore's checkout, or AccelOpt's trace set")
    prepare.add_argument("--suffix", metavar="NAME", default="klineage", help="for adaexplore (default: %(default)s)")
    _add_case(prepare)
    prepare.set_defaults(command=run_prepare)
    judge = actions.add_parser("judge", help="submit a kernel to the run that KLINEAGE_URL names, and say the verdict")
    judge.add_argument("kernel", metavar="FILE", type=Path, help="the kernel's main file")
    judge.add_argument("also", metavar="ALSO", type=Path, nargs="*", help="files that it includes")
    judge.add_argument("--note", metavar="TEXT", default="", help="what reports show beside the step")
    judge.add_argument("--json", action="store_true", help="print the whole answer instead of its text")
    judge.set_defaults(command=run_judge)
    task = actions.add_parser("task", help="print the contract of the run that KLINEAGE_URL names")
    task.add_argument("--json", action="store_true", help="print the whole answer instead of its text")
    task.set_defaults(command=run_task)


def _add_case(parser: argparse.ArgumentParser) -> None:
    case = parser.add_argument_group("the case")
    case.add_argument("--op", metavar="NAME", required=True, help="operator, as `pytest-klineage cases` lists it")
    case.add_argument("--shape", metavar="N,N,...", help="sizes in the operator's order (default: the paper's)")
    case.add_argument("--dtype", metavar="NAME", help="with --shape: the main data type")
    case.add_argument("--option", metavar="NAME=VALUE", action="append", default=[], help="of the operator; repeatable")
    case.add_argument("--ref", metavar="NAME", default="torch", help="reference (default: %(default)s)")
    case.add_argument("--surface", metavar="NAME", default="cpp", help="language (default: %(default)s)")
    case.add_argument("--entry", metavar="NAME", default="run", help="what a kernel defines (default: %(default)s)")
    case.add_argument("--root", metavar="FILE", type=Path, help="a kernel to begin with; judged first, as step 0")
    add_gate_options(parser, platform="cpu")


def _add_run(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("the run")
    run.add_argument("--method", metavar="NAME", required=True, help="what tables call the optimizer")
    run.add_argument("--name", metavar="NAME", help="of the trajectory (default: METHOD-CASE)")
    run.add_argument("--trajectories", metavar="DIR", type=Path, default=Path("results/trajectories"))
    run.add_argument("--model", metavar="NAME", required=True, help="the one model of the run, as its price is listed")
    run.add_argument("--alias", metavar="NAME", action="append", default=[], help="another name for it; repeatable")
    run.add_argument("--prices", metavar="FILE", type=Path, help="a price table of your own")
    run.add_argument("--budget", metavar="USD", type=float, default=10.0, help="for model calls (default: %(default)s)")
    run.add_argument("--rewrite", metavar="NAME", action="append", default=[], help="sampling, thinking, "
                     "completion-tokens or empty-system: for models that refuse them; repeatable")  # fmt: skip
    for protocol, (variable, address) in PROVIDERS.items():
        run.add_argument(
            f"--{protocol}-upstream", metavar="URL", help=f"provider; {variable} is its key (default: {address})"
        )
    run.add_argument("--max-steps", metavar="N", type=int, default=1000, help="submissions (default: %(default)s)")
    run.add_argument("--deadline", metavar="S", type=float, default=21600.0, help="seconds in all (default: 6 hours)")
    run.add_argument("--silence", metavar="S", type=float, default=1800.0, help="seconds without call or submission")
    run.add_argument("--grace", metavar="S", type=float, default=30.0, help="seconds from the budget's end to the kill")
    run.add_argument("--port", metavar="N", type=int, default=0, help="of the servers (default: a free one)")
    run.add_argument("--stand-in", action="store_true", help="put our flashinfer_bench first on PYTHONPATH")
    help_text = "show the optimizer how fast a wrapper is, as if it were a kernel; it never counts"
    run.add_argument("--ordinary-wrappers", action="store_true", help=help_text)


def run_external(arguments: argparse.Namespace) -> int:
    """`external run`."""
    from pytest_klineage.lab.external.runner import run_optimizer

    setup = _setup(arguments)
    path = arguments.trajectories / f"{setup.name}.jsonl"
    log = path.with_suffix(".log")
    with _run(setup, arguments, path) as run:
        say(f"{setup.name}: {run.url}, budget ${setup.limits.budget_usd:g}, trajectory {path}, output {log}")
        outcome = run_optimizer(run, arguments.command_line, folder=Path.cwd(), log=log)
    say(_ended(outcome))
    if outcome.best is not None:
        files = [(file.name, file.text) for file in outcome.best.files]
        say(f"best kernel: {write_files(path.with_suffix('.best'), files)[0]}")
    say(f"report: pytest-klineage report {path}")
    return FAILED if outcome.stopped in BAD_ENDS else OK


def run_prepare(arguments: argparse.Namespace) -> int:
    """`external prepare`."""
    from pytest_klineage.lab.external.problems import write_kernelbench, write_trace_set

    target = _target(arguments)
    if arguments.format == "adaexplore":
        say(f"{write_kernelbench(target, arguments.folder, arguments.suffix)}")
        return OK
    if target.root is None:
        raise UsageError("AccelOpt begins with a kernel that is right: name one with --root")
    gate = _OwnGate(target.platform, given_settings(arguments))
    try:
        verdict = gate.judge(target.case, target.root)
    finally:
        gate.close()
    say(f"{write_trace_set(target, verdict, arguments.folder)}")
    return OK


def run_judge(arguments: argparse.Namespace) -> int:
    """`external judge`."""
    files = [{"name": path.name, "text": _read(path)} for path in (arguments.kernel, *arguments.also)]
    found = _asked("/v1/judge", {"files": files, "note": arguments.note})
    say(json.dumps(found, indent=2) if arguments.json else found["feedback"])
    return OK if found["scored"] else FAILED


def run_task(arguments: argparse.Namespace) -> int:
    """`external task`."""
    found = _asked("/v1/task")
    say(json.dumps(found, indent=2) if arguments.json else found["instructions"].rstrip())
    return OK


# --- putting a run together -------------------------------------------------------------------------------------------


class _OwnGate:
    """A gate that is made, used and closed in one thread, as its processes need it."""

    def __init__(self, platform: str, settings: GateSettings) -> None:
        self._platform, self._settings = platform, settings
        self._gate: Gate | None = None

    def judge(self, case: KernelCase, source: KernelSource) -> Verdict:
        from pytest_klineage.gate import Gate

        if self._gate is None:
            self._gate = Gate(self._platform, self._settings)
        return self._gate.judge(case, source)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()


def _run(setup: Setup, arguments: argparse.Namespace, path: Path) -> ExternalRun:
    from pytest_klineage.lab.external.runner import ExternalRun
    from pytest_klineage.lab.llm.prices import Prices

    gate = _OwnGate(setup.target.platform, given_settings(arguments))
    prices = Prices.load(*([arguments.prices] if arguments.prices else []))
    return ExternalRun(setup, gate.judge, prices, path, on_step=_show, finish=gate.close)


def _setup(arguments: argparse.Namespace) -> Setup:
    from pytest_klineage.lab.external.rewrites import check_rewrites
    from pytest_klineage.lab.external.runner import Limits, Setup
    from pytest_klineage.lab.external.wire import ProxySettings

    target = _target(arguments)
    limits = Limits(
        budget_usd=arguments.budget, deadline_s=arguments.deadline, silence_s=arguments.silence,
        grace_s=arguments.grace, max_steps=arguments.max_steps,
    )  # fmt: skip
    proxy = ProxySettings(
        model=arguments.model, aliases=frozenset(arguments.alias), rewrites=check_rewrites(arguments.rewrite)
    )
    return Setup(
        name=arguments.name or f"{arguments.method}-{target.case.id}", method=arguments.method, target=target,
        proxy=proxy, upstreams=_upstreams(arguments), limits=limits, port=arguments.port,
        stand_in=arguments.stand_in, ordinary_wrappers=arguments.ordinary_wrappers,
    )  # fmt: skip


def _upstreams(arguments: argparse.Namespace) -> dict[str, Upstream]:
    """Providers whose key is set, or that were named."""
    from pytest_klineage.lab.external.proxy import Upstream

    found = {}
    for protocol, (variable, address) in PROVIDERS.items():
        named, key = getattr(arguments, f"{protocol}_upstream"), os.environ.get(variable, "")
        if named or key:
            found[protocol] = Upstream(base_url=named or address, key=key)
    return found


def _target(arguments: argparse.Namespace) -> EvaluationTarget:
    from pytest_klineage.gate.host.platforms import resolve_platform
    from pytest_klineage.lab.external.evaluating import EvaluationTarget
    from pytest_klineage.lab.optimizers.instructions import instructions_for
    from pytest_klineage.records import Surface
    from pytest_klineage.surfaces import read_source, surface_backend

    surface_backend(arguments.surface)
    case, platform = _case(arguments), resolve_platform(given(arguments, "platform"))
    root = None
    if arguments.root is not None:
        root = read_source(arguments.root, surface=arguments.surface, entry=arguments.entry, label="root")
    surface = Surface(arguments.surface)
    return EvaluationTarget(
        case=case, platform=platform, surface=surface, entry=arguments.entry, root=root,
        instructions=instructions_for(case, surface, platform, arguments.entry),
    )  # fmt: skip


def _case(arguments: argparse.Namespace) -> KernelCase:
    from pytest_klineage.operators import make_case, paper_case

    if not arguments.shape:
        if arguments.dtype or arguments.option:
            raise UsageError("--dtype and --option need a --shape; without one the case is the paper's")
        return paper_case(arguments.op, "cpu" if given(arguments, "platform") == "cpu" else "gpu", arguments.ref)
    if not arguments.dtype:
        raise UsageError("--shape needs a --dtype, such as fp32")
    try:
        shape = tuple(int(size) for size in arguments.shape.split(","))
    except ValueError as error:
        raise UsageError(f"--shape is written 512,512,512, got {arguments.shape!r}") from error
    options = dict(_option(text) for text in arguments.option)
    return make_case(arguments.op, shape, arguments.dtype, arguments.ref, **options)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--option is written NAME=VALUE, got {text!r}")
    return name, {"true": True, "false": False}.get(value.lower(), value)


# --- telling ----------------------------------------------------------------------------------------------------------


def _show(step: SubmissionStep) -> None:
    """One line for every step."""
    best = "none yet" if step.best_speedup is None else f"{step.best_speedup:.2f}x"
    speed = "" if step.speedup is None else f"{step.speedup:.2f}x "
    again = "" if step.repeats is None else f", the same as step {step.repeats}"
    say(f"step {step.number}: {speed}({step.verdict.code.value}{again}), best {best}")


def _ended(outcome: ExternalResult) -> str:
    best = "no kernel was scored" if outcome.best_speedup is None else f"best {outcome.best_speedup:.2f}x"
    return (
        f"ended: {outcome.stopped} ({outcome.message}); {sum(step.number > 0 for step in outcome.steps)} kernels, "
        f"${outcome.spent_usd:.4f}, {best}"
    )


def _asked(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer of the run's evaluation server. Raises UsageError without one, KlineageError for a refusal."""
    url = os.environ.get("KLINEAGE_URL")
    if not url:
        raise UsageError("KLINEAGE_URL is not set: this works below `pytest-klineage external run -- COMMAND`")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_S) as reply:
            found: dict[str, Any] = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            raise KlineageError(_refusal(error.read())) from error
    except (OSError, ValueError) as error:
        raise KlineageError(f"{url} does not answer: {error}; is the run over?") from error
    return found


def _refusal(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
