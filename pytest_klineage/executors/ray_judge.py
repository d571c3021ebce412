"""What runs on the machines of a Ray cluster: the judge of one device, and builds on CPUs. Only bytes go in and out."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform as host_platform
import tempfile
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord, KlineageError
from pytest_klineage.executors.answers import Answers
from pytest_klineage.executors.local import LocalExecutor
from pytest_klineage.executors.sealing import open_reply, opened, read_secret, seal_reply, sealed
from pytest_klineage.gate.settings import GateSettings, default_cache_dir
from pytest_klineage.records import KernelSource, Machine, Status, from_json, to_json
from pytest_klineage.records.judging import FaultCode, JudgeReply, JudgeRequest, MachineFault
from pytest_klineage.surfaces import artifacts, surface_backend
from pytest_klineage.surfaces.base import SurfaceFailure


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A request in a cluster, with all that its queue must know, so that nothing else decodes it."""

    digest: str
    ticket: str
    platform: str
    product: str
    priority: int
    recipe: str
    """Name of the artifact that can be built ahead; empty without one."""
    request: msgspec.Raw


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge says about itself when it starts."""

    machine: Machine
    host: str
    device: str
    """UUID of the GPU; on a CPU, the node."""
    answers: str
    """Its file of answers, on its own disk."""
    note: str = ""


class Judge:
    """The judge of one device: today's gate, one request at a time. Its replies are on its disk before they leave."""

    def __init__(self, name: str, platform: str, product: str, node: str) -> None:
        self.name, self.platform, self.product, self.node = name, platform, product, node
        self._secret = read_secret()
        self._artifacts = default_cache_dir() / "ray-artifacts"
        self._executor = LocalExecutor(platform, GateSettings(artifacts=self._artifacts))
        self._answers = Answers(default_cache_dir() / "judges" / f"{name}.jsonl", self._secret)

    def start(self) -> bytes:
        """Find the device. Raises KlineageError where it cannot judge for its platform."""
        note = at_usual_priority()
        machine = self._executor.machine()
        introduction = Introduction(
            machine=machine, host=host_platform.node(), device=machine.device_uuid or f"cpu@{self.node[:8]}",
            answers=str(self._answers.path), note=note,
        )  # fmt: skip
        return to_json(introduction)

    def judge(self, order: bytes, attempt: int, artifact: bytes) -> bytes:
        """The sealed reply to an order. `artifact` is what `build` returned for its recipe, or empty."""
        asked = from_json(order, Order)
        reply = self._reply(asked, artifact)
        if reply.fault is not None:
            self._executor.close()
        named = msgspec.structs.replace(
            reply, ticket=asked.ticket, attempt=attempt, judge=self.name, product=asked.product and self.product
        )
        line = seal_reply(named, self._secret)
        self._answers.keep(named, line)
        self._answers.sync()
        return line

    def close(self) -> None:
        """End the gate, and release the file of answers."""
        self._executor.close()
        self._answers.close()

    def _reply(self, asked: Order, artifact: bytes) -> JudgeReply:
        try:
            request = from_json(bytes(asked.request), JudgeRequest)
            if request.digest != asked.digest:
                raise BadRecord(f"the request {asked.digest[:12]} has the digest {request.digest[:12]}")
        except BadRecord as error:
            return _fault(asked.digest, FaultCode.MISUSE, str(error))
        try:
            if artifact:
                keep_artifact(artifact, asked.recipe, request.source, self._artifacts, self._secret)
        except (BadRecord, OSError) as error:
            return _fault(asked.digest, FaultCode.ARTIFACT, str(error))
        return self._executor.judge(request)


def recipe_of(request: JudgeRequest) -> str:
    """Name of the artifact that a build elsewhere makes for a request; empty where nothing can be built ahead."""
    try:
        return surface_backend(request.source.surface.value).recipe(request.source, platform=request.platform)
    except (SurfaceFailure, KlineageError):
        return ""  # the judge says why, as a verdict


def build(order: bytes) -> bytes:
    """Build the kernel of an order, on a CPU: a sealed description, a line end, and the kernel's bytes.

    A kernel that does not build is a sealed reply with its verdict. Empty when this machine cannot build it: the judge
    then does.
    """
    asked, secret = from_json(order, Order), read_secret()
    request = from_json(bytes(asked.request), JudgeRequest)
    settings = {**request.settings, "stage": "compile"}
    with tempfile.TemporaryDirectory(prefix="klineage-build-") as folder:
        executor = LocalExecutor(request.platform, GateSettings(artifacts=Path(folder)))
        try:
            reply = executor.judge(msgspec.structs.replace(request, settings=settings))
        finally:
            executor.close()
        if reply.verdict is not None and reply.verdict.status in (Status.BUILD_ERROR, Status.TIMEOUT):
            final = msgspec.structs.replace(
                reply, request=asked.digest, ticket=asked.ticket, judge="build", product=asked.product
            )
            return seal_reply(final, secret)
        with contextlib.suppress(SurfaceFailure):
            if (found := artifacts.read(Path(folder) / asked.recipe)) is not None:
                return sealed(to_json(found[0]), secret) + b"\n" + found[1]
    return b""


def build_verdict(built: bytes, secret: bytes) -> JudgeReply | None:
    """The verdict that a build ended with; None when it made a kernel, or nothing."""
    with contextlib.suppress(BadRecord):
        return open_reply(built, secret)
    return None


def keep_artifact(built: bytes, recipe: str, source: KernelSource, folder: Path, secret: bytes) -> None:
    """Put a kernel where the gate takes it from, checked. Raises BadRecord for one that is not what was asked for.

    One that is there stays: the folder is written once for each recipe, and its digest is checked again at loading.
    """
    line, _, content = built.partition(b"\n")
    record = from_json(opened(line, secret), artifacts.ArtifactRecord)
    if (digest := hashlib.sha256(content).hexdigest()) != record.sha256:
        raise BadRecord(f"the artifact {recipe[:12]} has the SHA-256 {digest[:12]}, not {record.sha256[:12]}")
    if (record.recipe, record.source_digest) != (recipe, source.digest):
        raise BadRecord(f"the artifact {record.recipe[:12]} is not the one asked for, {recipe[:12]}")
    with contextlib.suppress(SurfaceFailure):
        if artifacts.read(folder / recipe) is not None:
            return
    artifacts.publish(folder / recipe, content, source, record.build)


def at_usual_priority() -> str:
    """Undo Ray's niceness of 15, which candidates would be timed with; what remains is said."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return f"niceness {nice}: start Ray with RAY_worker_niceness=0" if nice else ""


def _fault(digest: str, code: FaultCode, message: str) -> JudgeReply:
    return JudgeReply(request=digest, fault=MachineFault(code=code, message=message))
