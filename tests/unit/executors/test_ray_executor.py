"""An asker of a cluster and its desk, without Ray: what a desk that is lost, silent or foreign leads to."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pytest_klineage.cli.main import main
from pytest_klineage.errors import HarnessError
from pytest_klineage.executors import ray as asking
from pytest_klineage.executors.answers import Doubt
from pytest_klineage.executors.cluster import CPU_RESOURCE, PROTOCOL, ClusterLimits, DeskState
from pytest_klineage.executors.desk import Desk
from pytest_klineage.executors.ray import CALLS, NAME, ClusterDesk, RayExecutor, find_desk
from pytest_klineage.executors.sealing import SECRET_VARIABLE, seal_reply, sealed
from pytest_klineage.records import from_json, to_json
from pytest_klineage.records.judging import FaultCode, JudgeReply, JudgeRequest, MachineFault

Ask = Callable[..., JudgeRequest]
SECRET, ANOTHER = b"s" * 32, b"t" * 32
STATE = DeskState(
    judges=[], queued={}, building=0, judging=0, unfetched=0, verdicts_per_minute=0, products={"cpu": [""]}, refused=0
)
LIMIT_S = 30.0


class RayError(Exception):
    """As Ray's errors descend from one another."""


class RayActorError(RayError):
    """The desk is lost."""


class GetTimeoutError(RayError):
    """The desk does not answer in time."""


class StandInDesk:
    """A desk whose methods answer what a test says; an exception is raised when the answer is fetched."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"state": to_json(STATE), "submit": "one", "replies": ("one", [])} | answers
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: lambda: self.answer(method, *arguments))

    def answer(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        found = self.answers[method]
        if isinstance(found, Exception):
            raise found
        return found(*arguments) if callable(found) else found


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray, as far as these tests need it; with a secret and a cache of their own."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv(SECRET_VARIABLE, str(tmp_path / "secret"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stand_in = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError, RayActorError=RayActorError, GetTimeoutError=GetTimeoutError),
        get=lambda reference, timeout: reference(), shutdown=lambda: None, nodes=list,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


@pytest.fixture
def join(ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[StandInDesk], RayExecutor]:
    """Joins the cluster of a desk as a run does."""

    def build(desk: StandInDesk) -> RayExecutor:
        at(desk, monkeypatch)
        return RayExecutor("ray", "cpu", tmp_path / "run.jsonl")

    return build


def at(desk: StandInDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this be the desk that is found."""
    monkeypatch.setattr(asking, "connect", lambda where: desk)
    monkeypatch.setattr(asking, "find_desk", lambda: desk)


def reply_line(executor: RayExecutor, request: JudgeRequest, secret: bytes) -> bytes:
    fault = MachineFault(code=FaultCode.MISUSE, message="pretended")
    ticket = executor.answers.ticket(request.digest)
    return seal_reply(JudgeReply(request=request.digest, fault=fault, ticket=ticket), secret)


def test_another_secret_ends_the_run(join: Callable[..., RayExecutor], ask: Ask, tmp_path: Path) -> None:
    """It would ask again for ever: no reply of the cluster bears this machine's seal."""
    desk = StandInDesk()
    executor = join(desk)
    executor.submit(ask())
    desk.answers["replies"] = ("one", [reply_line(executor, ask(), ANOTHER)])
    with pytest.raises(HarnessError, match=f"none of the 1 replies of ray is believed: .* {tmp_path / 'secret'}, must"):
        executor.collect(0.0)
    executor.close()


def test_one_reply_that_is_not_believed_is_counted(join: Callable[..., RayExecutor], ask: Ask) -> None:
    desk, requests = StandInDesk(), [ask(), ask("// forged")]
    executor = join(desk)
    for request in requests:
        executor.submit(request)
    lines = [reply_line(executor, request, key) for request, key in zip(requests, (SECRET, ANOTHER), strict=True)]
    desk.answers["replies"] = ("one", lines)
    assert executor.collect(0.0) == {requests[0].digest}
    assert executor.num_open == 1
    assert "1 replies were refused" in executor.progress()
    executor.close()


def test_doubts_are_acknowledged(join: Callable[..., RayExecutor], ask: Ask) -> None:
    """By the next call, as replies are: what is lost between the desk and the disk is sent again."""
    desk = StandInDesk()
    executor = join(desk)
    ticket = executor.answers.ticket(ask().digest)
    doubt = Doubt(request=ask().digest, ticket=ticket, judge="sick", why="the canary")
    desk.answers["replies"] = ("one", [sealed(to_json(doubt), SECRET)])
    executor.collect(0.0)
    assert executor.answers.doubts == {doubt.request: doubt}
    desk.answers["replies"] = RayError("cut off")
    with pytest.raises(HarnessError):
        executor.collect(0.0)
    executor.close()
    acknowledged = [doubted for method, _, _, doubted, _ in filter(lambda call: call[0] == "replies", desk.asked)]
    assert acknowledged == [[], [(doubt.request, ticket)], [(doubt.request, ticket)]]


@pytest.mark.parametrize("arguments", [(), ("--retry",), ("--end",)])
def test_the_command_without_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["judges", "ray", *arguments]) == 1
    assert 'Ray is missing. Install it with: pip install "pytest-klineage[ray]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RayActorError("it died when it began\nUsageError: the secret cannot be read"),
            "does not answer (UsageError: ",
        ),
        (RayError("ray::Desk.state()\nOSError: no answer"), "the desk of ray failed: OSError: no answer"),
    ],
)
def test_the_command_says_what_the_desk_met(
    ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception,
    said: str,
) -> None:  # fmt: skip
    """A head node without a secret, and a desk that fails."""
    at(StandInDesk(state=error), monkeypatch)
    assert main(["judges", "ray"]) == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_a_desk_that_is_lost_is_found_again(ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, found = StandInDesk(release=RayActorError("lost")), StandInDesk(release=2)
    at(found, monkeypatch)
    monkeypatch.setattr(asking, "connect", lambda where: lost)
    assert ClusterDesk("ray").call("release") == 2
    at(lost, monkeypatch)
    with pytest.raises(HarnessError, match=r"does not answer \(lost\)"):
        ClusterDesk("ray").call("release")
    assert len(lost.asked) == 1 + CALLS


CALLS_OF_A_DESK = {
    2: {
        "release": "(self) -> 'int'",
        "replies": (
            "(self, asker: 'str', fetched: 'list[tuple[str, str]]', doubted: 'list[tuple[str, str]]', "
            "wait_s: 'float') -> 'tuple[str, list[bytes]]'"
        ),
        "set_pools": "(self, pools: 'bytes') -> 'None'",
        "state": "(self) -> 'bytes'",
        "submit": "(self, asker: 'str', orders: 'list[bytes]') -> 'str'",
        "warm": "(self, platform: 'str') -> 'None'",
    }
}
"""By protocol. A call that changes is a new protocol: a desk that runs has the old one."""


def test_the_protocol_says_how_a_desk_is_called() -> None:
    found = {
        name: str(inspect.signature(call))
        for name, call in vars(Desk).items()
        if inspect.isfunction(call) and not name.startswith("_")
    }
    assert found == CALLS_OF_A_DESK[PROTOCOL]


def test_a_desk_is_found_by_its_protocol(ray: SimpleNamespace) -> None:
    """One that another version has left would be called with what it does not know."""
    asked: dict[str, Any] = {}

    def options(**given: Any) -> SimpleNamespace:
        asked.update(given)
        return SimpleNamespace(remote=lambda *arguments: "the desk")

    ray.remote = lambda desk: SimpleNamespace(options=options)
    assert find_desk() == "the desk"
    assert (asked["name"], asked["namespace"], asked["lifetime"]) == (f"desk-{PROTOCOL}", "klineage", "detached")


def test_the_desks_of_other_versions_end_as_well(ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the devices; another namespace's actors stay, and one that has gone meanwhile is no fault."""
    own = StandInDesk()
    killed: list[object] = []
    names = [("desk", "klineage"), (NAME, "klineage"), ("desk-1", "klineage"), ("judge", "klineage"), ("desk", "yours")]

    def get_actor(name: str, *, namespace: str) -> str:
        if name == "desk-1":
            raise ValueError("no such actor")
        return f"{namespace}/{name}"

    ray.kill, ray.get_actor = killed.append, get_actor
    ray.util = SimpleNamespace(
        list_named_actors=lambda all_namespaces: [{"name": name, "namespace": space} for name, space in names]
    )
    at(own, monkeypatch)
    ClusterDesk("ray").end()
    assert killed == [own, "klineage/desk"]


# --- the desk's look at the nodes -------------------------------------------------------------------------------------


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():
            await asyncio.sleep(0.001)


def test_a_desk_goes_on_after_a_look_that_failed(ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray refused is said in the cluster's state until it goes well."""
    ray.nodes = lambda: [{"Alive": True, "NodeID": "a", "Resources": {CPU_RESOURCE: 1.0}}]
    refused: list[bool] = [True]
    seated: list[object] = []

    def seat(desk: Desk, position: object, product: str) -> None:
        if refused:
            raise RuntimeError("no process\nno actor can be made")
        seated.append(position)

    monkeypatch.setattr(Desk, "_seat", seat)

    async def states() -> list[DeskState]:
        desk = Desk(msgspec.json.encode(ClusterLimits(tend_s=0.001)))
        await desk.warm("cpu")
        await until(lambda: desk._trouble)
        before = from_json(await desk.state(), DeskState)
        refused.clear()
        await until(lambda: seated and not desk._trouble)
        return [before, from_json(await desk.state(), DeskState)]

    before, after = asyncio.run(states())
    assert before.unfit == ["the desk's look at the nodes failed: RuntimeError: no actor can be made"]
    assert after.unfit == []


def test_a_desk_begins_when_the_nodes_are_known(ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call that fails leaves the rest to the next one, and two at once begin one look after the nodes."""
    ray.nodes = lambda: 1 / 0
    begun: list[Desk] = []

    async def tend(desk: Desk) -> None:
        begun.append(desk)

    monkeypatch.setattr(Desk, "_tend", tend)

    async def calls() -> None:
        desk = Desk()
        with pytest.raises(ZeroDivisionError):
            await desk.warm("cpu")
        ray.nodes = list
        await asyncio.gather(desk.warm("cpu"), desk.warm("cpu"))
        await until(lambda: begun)

    asyncio.run(calls())
    assert len(begun) == 1
