"""Judges that stand in for real ones, to lie, to fail, or to take no time; all else of a judge is the real one."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from pytest_klineage.executors.ray_judge import Judge, Order
from pytest_klineage.executors.sealing import open_reply, seal_reply
from pytest_klineage.records import Code, Interval, Machine, Reason, Timing, Verdict, from_json
from pytest_klineage.records.judging import FaultCode, JudgeReply, JudgeRequest, MachineFault


class Quick(Judge):
    """Says at once that a kernel is twice as fast. A file named `sick` beside its answers changes what canaries say."""

    ratio = 2.0

    def _reply(self, asked: Order, artifact: bytes) -> JudgeReply:
        request = from_json(bytes(asked.request), JudgeRequest)
        interval = Interval(self.ratio, self.ratio, self.ratio)
        timing = Timing(
            policy="paired", reference_ms=self.ratio, candidate_ms=1.0, speedup=interval, reference_samples_ms=(),
            candidate_samples_ms=(), warmup=0, flush_bytes=0, statistic="pretended",
        )  # fmt: skip
        code = Code.ACCEPTED_FASTER
        verdict = Verdict(
            case=request.case, status=code.status, reasons=(Reason(code=code, message="pretended"),), timing=timing,
            source_digest=request.source.digest, machine=Machine(platform="cpu", device=self.product or "pretended"),
        )  # fmt: skip
        return JudgeReply(request=asked.digest, verdict=verdict)

    def mark(self, name: str) -> Path:
        """A file by which one judge of several knows that it is the bad one."""
        return self._answers.path.parent / f"{name}.mark"

    def is_first(self, name: str) -> bool:
        """Whether no other judge has come first."""
        try:
            with self.mark(name).open("x") as file:
                file.write(self.name)
        except FileExistsError:
            return self.mark(name).read_text() == self.name
        return True


class Sick(Quick):
    """The first to judge measures another ratio from its second canary on."""

    canaries = 0

    def _reply(self, asked: Order, artifact: bytes) -> JudgeReply:
        time.sleep(0.02)
        if from_json(bytes(asked.request), JudgeRequest).reference_source is not None:
            self.canaries += 1
            self.ratio = 3.0 if self.canaries > 1 and self.is_first("sick") else 2.0
        return super()._reply(asked, artifact)


class Broken(Quick):
    """The first to judge has a fault each time, but not with canaries."""

    def _reply(self, asked: Order, artifact: bytes) -> JudgeReply:
        request = from_json(bytes(asked.request), JudgeRequest)
        if request.reference_source is None and self.is_first("broken"):
            fault = MachineFault(code=FaultCode.HARNESS, message="pretended")
            return JudgeReply(request=asked.digest, fault=fault)
        time.sleep(0.05)
        return super()._reply(asked, artifact)


class Liar(Quick):
    """The first to judge answers with what its class says: another name, an old reply, or another seal."""

    lie = "name"
    before = b""

    def judge(self, order: bytes, attempt: int, artifact: bytes) -> bytes:
        request = from_json(bytes(from_json(order, Order).request), JudgeRequest)
        if request.reference_source is not None or not self.is_first("liar"):
            time.sleep(0.05)
            return super().judge(order, attempt, artifact)
        honest = super().judge(order, attempt, artifact)
        forged = open_reply(honest, self._secret)
        if self.lie == "name":
            return seal_reply(msgspec.structs.replace(forged, judge="another"), self._secret)
        if self.lie == "old":
            return seal_reply(msgspec.structs.replace(forged, ticket="of an earlier run"), self._secret)
        return seal_reply(forged, b"another secret")


class OldReplies(Liar):
    """Says what it said to an earlier run."""

    lie = "old"


class OtherSeals(Liar):
    """Does not know the secret."""

    lie = "seal"


class Wanderer(Quick):
    """Takes its time, so that the order of verdicts can be seen."""

    def _reply(self, asked: Order, artifact: bytes) -> JudgeReply:
        time.sleep(0.2)
        return super()._reply(asked, artifact)
