"""What runs on a cluster's machines, without the cluster: builds, the check of their digests, canaries, places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.executors import cluster
from pytest_klineage.executors.canary import default_canary, read_pools
from pytest_klineage.executors.cluster import CPU_RESOURCE, PRODUCT, places_of
from pytest_klineage.executors.ray_judge import Introduction, Judge, Order, build, build_verdict, recipe_of
from pytest_klineage.executors.sealing import SECRET_VARIABLE, open_reply, sealed
from pytest_klineage.records import Code, from_json, to_json
from pytest_klineage.records.judging import FaultCode, JudgeReply, JudgeRequest
from pytest_klineage.records.platform import PLATFORMS

Ask = Callable[..., JudgeRequest]
SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret and a cache of this test's own."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv(SECRET_VARIABLE, str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def judge() -> Iterator[Judge]:
    found = Judge("judge", "cpu", "", "node")
    yield found
    found.close()


def order_of(asked: JudgeRequest, **fields: object) -> bytes:
    order = Order(
        digest=asked.digest, ticket="ticket", platform="cpu", product="", priority=0, recipe=recipe_of(asked),
        request=msgspec.Raw(to_json(asked)),
    )  # fmt: skip
    return to_json(msgspec.structs.replace(order, **fields))


def test_a_build_is_checked_before_it_is_loaded(ask: Ask, judge: Judge, tmp_path: Path) -> None:
    """One with another digest is a machine's fault; the true one is judged, and not built again."""
    request = ask()
    order, built = order_of(request), build(order_of(request))
    assert from_json(judge.start(), Introduction).device == "cpu@node"
    description, _, content = built.partition(b"\n")
    other = order_of(ask("// other"))
    for wrong in (
        description + b"\n" + content[:-1] + b"?",
        sealed(b"{}", SECRET) + b"\n" + content,
        description.replace(b'"seal":"', b'"seal":"0') + b"\n" + content,
    ):
        reply = open_reply(judge.judge(order, 1, wrong), SECRET)
        assert reply.fault is not None
        assert reply.fault.code is FaultCode.ARTIFACT
    assert open_reply(judge.judge(other, 1, built), SECRET).fault is not None
    assert not (tmp_path / "cache" / "pytest-klineage" / "ray-artifacts").exists()
    reply = open_reply(judge.judge(order, 1, built), SECRET)
    assert reply.verdict is not None
    assert reply.verdict.build is not None
    assert reply.verdict.build.artifact == from_json(description, Description).content.sha256
    assert (reply.ticket, reply.judge, reply.attempt) == ("ticket", "judge", 1)


class Content(msgspec.Struct):
    sha256: str


class Description(msgspec.Struct):
    content: Content


def test_a_kernel_that_does_not_build_is_a_verdict(ask: Ask) -> None:
    reply = build_verdict(build(order_of(ask("no code"))), SECRET)
    assert reply is not None
    assert reply.verdict is not None
    assert (reply.verdict.code, reply.request, reply.ticket) == (Code.COMPILE, ask("no code").digest, "ticket")


def test_a_machine_without_a_compiler_builds_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build(order_of(ask("// nowhere"))) == b""


@pytest.mark.parametrize("order", ["digest", "json"])
def test_an_order_that_is_not_what_it_says(ask: Ask, judge: Judge, order: str) -> None:
    asked = order_of(ask(), digest="0" * 64) if order == "digest" else order_of(ask(), request=msgspec.Raw(b"{}"))
    reply = open_reply(judge.judge(asked, 1, b""), SECRET)
    assert reply.fault is not None
    assert reply.fault.code is FaultCode.MISUSE


def test_a_judge_of_another_product_answers_nothing(ask: Ask) -> None:
    reply = JudgeReply(request=ask(product="H200").digest, product="H100")
    with pytest.raises(BadRecord):
        reply.check_answers(ask(product="H200"))
    assert ask(product="H200").digest != ask().digest


def test_pools_have_their_own_ranges(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "pair.json").write_bytes(to_json(ask()))
    path = tmp_path / "pools.toml"
    path.write_text('[cpu]\nlow = 1.5\nhigh = 3\nevery = 10\n["sm90/H200"]\nlow = 1\nhigh = 2\nrequest = "pair.json"\n')
    pools = read_pools(path)
    assert (pools["cpu"].low, pools["cpu"].high, pools["cpu"].every) == (1.5, 3.0, 10)
    assert pools["cpu"].request == default_canary("cpu").request  # type: ignore[union-attr]  # there is one
    assert pools["sm90/H200"].request == ask()


@pytest.mark.parametrize(
    "text",
    [
        "[sm90]\nlow = 1\nhigh = 2\n", "[cpu]\nlow = 1\n", "[cpu", '[cpu]\nrequest = "no"\n', "low = 1.5\nhigh = 3\n",
        "[cpu]\nlow = 1\nhigh = 2\nrequest = 5\n", '[cpu]\nrequest = "\\u0000"\n', "# \udce9\n",
    ],
)  # fmt: skip
def test_pools_that_say_too_little_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pools.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError):
        read_pools(tmp_path / "pools.toml")


def test_a_canary_that_was_not_timed_is_trouble(ask: Ask) -> None:
    canary = default_canary("cpu")
    assert canary is not None
    assert canary.trouble(build_verdict(build(order_of(ask("no code"))), SECRET))  # type: ignore[arg-type]  # it fails
    assert default_canary("sm90") is None


def test_places_are_counted_by_platform() -> None:
    nodes = [
        {"Alive": True, "NodeID": "a", "Resources": {"GPU": 2.0, f"{PRODUCT}H200": 1.0, "CPU": 8.0}},
        {"Alive": True, "NodeID": "b", "Resources": {CPU_RESOURCE: 1.0}},
        {"Alive": False, "NodeID": "c", "Resources": {"GPU": 8.0}},
    ]
    on_a = {(platform, "a", number): "H200" for platform in PLATFORMS if platform != "cpu" for number in range(2)}
    assert places_of(nodes) == on_a | {("cpu", "b", 0): ""}


def test_platforms_of_other_packages_have_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "extensions", lambda kind: {"sm121": object()} if kind == "platforms" else {})
    places = places_of([{"Alive": True, "NodeID": "a", "Resources": {"GPU": 1.0}}])
    assert set(places) == {(platform, "a", 0) for platform in (*PLATFORMS, "sm121") if platform != "cpu"}
