"""The executor of a Ray cluster: sends orders to its desk, keeps what comes back on disk, and waits for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pytest_klineage.errors import BadRecord, HarnessError, MissingDependency, UsageError, WaitsForVerdict
from pytest_klineage.executors.answers import Answers
from pytest_klineage.executors.cluster import CPU_RESOURCE, PROTOCOL, ClusterLimits, DeskState, last_line, pool_name
from pytest_klineage.executors.desk import Desk
from pytest_klineage.executors.ray_judge import Judge, Order, recipe_of
from pytest_klineage.executors.sealing import opened, read_secret, secret_path
from pytest_klineage.records import Machine, from_json, to_json
from pytest_klineage.records.judging import JudgeReply, JudgeRequest

NAME, NAMESPACE = f"desk-{PROTOCOL}", "klineage"
HEAD = "node:__internal_head__"
"""Ray's resource of the head node, where the desk lives."""
SENT_AT_ONCE = 64
ASK_AGAIN_S = 30.0
"""What has not been answered for so long is asked for again: a desk that began again has forgotten it."""
CONNECT_S = 60.0
CALLS = 3
"""Calls of a desk that may be lost before it is given up."""


class RayExecutor:
    """Asks the desk of a cluster. What was answered stays in `answers`; only what was not is asked for.

    where: "ray" for the cluster of this machine, or "ray://HOST:PORT". Raises UsageError, MissingDependency.
    """

    def __init__(self, where: str, platform: str, answers: Path, *, product: str = "") -> None:
        self.where, self.platform, self._secret = where, platform, read_secret()
        self.desk = ClusterDesk(where)
        self.product = self._chosen(product)
        self.answers = Answers(answers, self._secret)
        self._asker = self.answers.ticket("asker")
        self._open: dict[str, bytes] = {}
        self._unsent: list[str] = []
        self._fetched: list[tuple[str, str]] = []
        self._doubted: list[tuple[str, str]] = []
        self._asked_at = time.monotonic()
        self._incarnation = ""
        self._believed, self.refused = False, 0
        """Whether a reply was believed, and how many were not."""

    def submit(self, request: JudgeRequest) -> None:
        """Ask, unless it is asked for or answered."""
        digest = request.digest
        if self.answers.has(digest) or digest in self._open:
            return
        order = Order(
            digest=digest, ticket=self.answers.ticket(digest), platform=request.platform, product=request.product,
            priority=request.priority, recipe=recipe_of(request), request=msgspec.Raw(to_json(request)),
        )  # fmt: skip
        self._open[digest] = to_json(order)
        self._unsent.append(digest)
        if len(self._unsent) >= SENT_AT_ONCE:
            self._send()

    def lookup(self, request: JudgeRequest) -> JudgeReply | None:
        """The answer; None while there is none. Raises BadRecord for one about something else."""
        reply = self.answers.get(request.digest)
        if reply is not None:
            reply.check_answers(request)
        return reply

    def collect(self, wait_s: float) -> set[str]:
        """Take answers that have come, after at most `wait_s`: the digests of those that are new.

        Raises HarnessError when none of those that ever came is believed.
        """
        self._send()
        if time.monotonic() - self._asked_at > ASK_AGAIN_S:
            self._unsent = list(self._open)
            self._send()
        incarnation, lines = self._call("replies", self._asker, self._fetched, self._doubted, wait_s)
        self._fetched, self._doubted = [], []
        found = {digest for line in lines if (digest := self._take(line))}
        if found or self._doubted:
            self.answers.sync()
            self._asked_at = time.monotonic()
        if self.refused and not self._believed:
            why = f"the secret of this machine, {secret_path()}, must be that of the cluster"
            raise HarnessError(f"none of the {self.refused} replies of {self.where} is believed: {why}")
        if incarnation != self._incarnation:
            self._unsent, self._incarnation = list(self._open), incarnation
        return found

    @property
    def num_open(self) -> int:
        """Requests without an answer."""
        return len(self._open)

    def state(self) -> DeskState:
        """How the cluster stands."""
        return from_json(self._call("state"), DeskState)

    def machine(self, platform: str) -> Machine:
        """A machine that judges. Raises WaitsForVerdict while none is ready."""
        self._call("warm", platform)
        for judge in self.state().judges:
            if judge.machine is not None and (judge.platform, judge.product) == (platform, self.product):
                return judge.machine
        raise WaitsForVerdict(self.where, f"no judge of {pool_name(platform, self.product)} is ready yet")

    def progress(self) -> str:
        """How the cluster stands, in a line."""
        state = self.state()
        busy = sum(1 for judge in state.judges if judge.state == "judging")
        line = f"klineage: {self.num_open} asked for; {self.where}: {sum(state.queued.values())} wait, "
        line += f"{state.building} are built, {busy} of {len(state.judges)} judges are at work"
        line += f", {self.refused} replies were refused" if self.refused else ""
        pace = state.verdicts_per_minute
        ahead = sum(state.queued.values()) + state.judging
        return line + (f", about {ahead / pace:.0f} min left" if pace else "")

    def doubt_lines(self) -> list[str]:
        """For each judge that went into quarantine, how many verdicts of this run are in doubt, and why."""
        doubts = self.answers.doubts.values()
        reasons = {doubt.judge: doubt.why for doubt in doubts}
        counts = {judge: sum(doubt.judge == judge for doubt in doubts) for judge in reasons}
        return [
            f"klineage: {counts[judge]} verdicts of the judge {judge} are in doubt: {why}"
            for judge, why in reasons.items()
        ]

    def finish(self) -> None:
        """The run is over: its answers stay as a record, and the same command begins afresh."""
        self.answers.path.rename(self.answers.path.with_suffix(".done.jsonl"))

    def close(self) -> None:
        """Leave the cluster. What is asked for is judged all the same, and kept for this run's next call."""
        with contextlib.suppress(HarnessError):
            if self._fetched or self._doubted:
                self._call("replies", self._asker, self._fetched, self._doubted, 0.0)
        self.answers.close()
        disconnect()

    def _send(self) -> None:
        """Send what was not, in parts."""
        unsent, self._unsent = self._unsent, []
        for start in range(0, len(unsent), SENT_AT_ONCE):
            orders = [self._open[digest] for digest in unsent[start : start + SENT_AT_ONCE] if digest in self._open]
            self._incarnation = self._call("submit", self._asker, orders)
            self._asked_at = time.monotonic()

    def _take(self, line: bytes) -> str:
        """Keep one line. Returns the digest that it answers; empty for a doubt, and for what is refused."""
        try:
            if (doubt := self.answers.add_doubt(line)) is not None:
                self._doubted.append((doubt.request, doubt.ticket))
                found = ""
            else:
                found = self._take_reply(from_json(opened(line, self._secret), JudgeReply), line)
        except BadRecord:
            self.refused += 1
            return ""
        self._believed = True
        return found

    def _take_reply(self, reply: JudgeReply, line: bytes) -> str:
        if self.answers.tickets.get(reply.request) != reply.ticket:
            raise BadRecord("it bears the ticket of another run")
        self._fetched.append((reply.request, reply.ticket))
        if reply.request not in self._open:
            return ""
        self.answers.keep(reply, line)
        del self._open[reply.request]
        return reply.request

    def _chosen(self, product: str) -> str:
        """The product that this run is judged on: the one that was asked for, or the only one. Raises UsageError."""
        there = self.state().products.get(self.platform, [])
        if not there:
            step = f"ray start --resources '{{\"{CPU_RESOURCE}\": 1}}'" if self.platform == "cpu" else "ray start"
            raise UsageError(f"no node of {self.where} judges for {self.platform}; add one: {step} --address=HOST:6379")
        if product and product not in there:
            raise UsageError(f"{self.where} has no {product} for {self.platform}, but {', '.join(filter(None, there))}")
        if not product and len(there) > 1:
            names = ", ".join(name or "one without a name" for name in there)
            raise UsageError(f"{self.where} has several products for {self.platform} ({names}): --klineage-gpu-product")
        return product or there[0]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self.desk.call(method, *arguments)


class ClusterDesk:
    """The desk of a cluster, which this process joins. Raises as `connect`."""

    def __init__(self, where: str) -> None:
        self.where, self._handle = where, connect(where)

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the desk returns; where it is lost, it is found or started again. Raises HarnessError."""
        import ray

        why = ""
        for _ in range(CALLS):
            try:
                if why:
                    self._handle = find_desk()
                return ray.get(getattr(self._handle, method).remote(*arguments), timeout=CONNECT_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                why = last_line(error)
            except (ray.exceptions.RayError, ConnectionError) as error:
                raise HarnessError(f"the desk of {self.where} failed: {last_line(error)}") from error
        raise HarnessError(f"the desk of {self.where} does not answer ({why}); the same command goes on later")

    def end(self) -> None:
        """End the desk and its judges, and those of other versions: they hold the same devices."""
        import ray

        ray.kill(self._handle)
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name = actor["name"]
            if actor["namespace"] == NAMESPACE and name != NAME and name.partition("-")[0] == "desk":
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def connect(where: str) -> Any:
    """Join a cluster and return its desk. Raises UsageError without one, MissingDependency without Ray."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependency("Ray", 'pip install "pytest-klineage[ray]"') from error

    address = where if "://" in where else "auto"
    try:
        if not ray.is_initialized():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        return find_desk()
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        step = "start one with `ray start --head`, or name another: --klineage-executor=ray://HOST:10001"
        raise UsageError(f"no Ray cluster answers at {where} ({' '.join(str(error).split())[:300]}): {step}") from error


def find_desk(limits: ClusterLimits | None = None, judge_class: type = Judge) -> Any:
    """The cluster's desk, started if absent. It outlives who started it."""
    import ray

    options: dict[str, Any] = {
        "name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0,
        "max_restarts": -1, "max_concurrency": 1000, "resources": {HEAD: 0.001},
    }  # fmt: skip
    return ray.remote(Desk).options(**options).remote(msgspec.json.encode(limits or ClusterLimits()), judge_class)


def disconnect() -> None:
    """Leave the cluster that this process has joined."""
    import ray

    ray.shutdown()


@contextlib.contextmanager
def cluster(where: str) -> Iterator[ClusterDesk]:
    """The desk of a cluster, for the time of a command. Raises as `connect`."""
    desk = ClusterDesk(where)
    try:
        yield desk
    finally:
        disconnect()
