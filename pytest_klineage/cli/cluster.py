"""`pytest-klineage judges ray`: how a cluster stands, its canaries, its quarantine, its end."""

from __future__ import annotations

import argparse

import msgspec
from tabulate import tabulate

from pytest_klineage.cli.console import OK, say, say_all
from pytest_klineage.executors.cluster import DeskState, JudgeState, pool_name

HEADERS = ("judge", "pool", "device", "state", "canary", "verdicts", "faults", "remark")


def run_cluster(arguments: argparse.Namespace) -> int:
    """`judges` with a cluster."""
    from pytest_klineage.executors.canary import read_pools
    from pytest_klineage.executors.ray import cluster
    from pytest_klineage.records import from_json

    pools = read_pools(arguments.pools) if arguments.pools else None
    with cluster(arguments.where) as desk:
        if pools is not None:
            desk.call("set_pools", msgspec.json.encode(pools))
            for name in pools:
                desk.call("warm", name.partition("/")[0])
        if arguments.retry:
            say(f"{desk.call('release')} judges begin again")
        state = from_json(desk.call("state"), DeskState)
        say_all(state_lines(arguments.where, state))
        if arguments.end:
            desk.end()
            say(f"{arguments.where}: the judges have ended")
    return OK


def state_lines(where: str, state: DeskState) -> list[str]:
    """A cluster in a few lines: its judges as a table, its queue, and what must not judge."""
    lines = tabulate([_row(judge) for judge in state.judges], HEADERS).splitlines() if state.judges else []
    queued = ", ".join(f"{count} for {pool}" for pool, count in state.queued.items()) or "nothing"
    held = sum(judge.state == "quarantine" for judge in state.judges)
    lines.append(
        f"{where}: {len(state.judges)} judges, {held} in quarantine; queued: {queued}; {state.building} are built, "
        f"{state.judging} judged, {state.unfetched} not fetched; {state.verdicts_per_minute:g} verdicts/minute"
    )
    lines += [f"{state.refused} replies were refused"] if state.refused else []
    return lines + [f"no judge starts: {why}" for why in state.unfit]


def _row(judge: JudgeState) -> tuple[object, ...]:
    canary = f"{judge.canary:.3f}" if judge.canary is not None else ""
    pool = pool_name(judge.platform, judge.product)
    where = f"{judge.host} {judge.machine.device if judge.machine else ''} {judge.device}".strip()
    return judge.name, pool, where, judge.state, canary, judge.verdicts, judge.faults, judge.why
