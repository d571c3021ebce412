"""What goes to a judge and what comes back: a request with its digest, a reply that names it, a fault of a machine.

All three are plain JSON, so that folders, queues and clusters can carry them. Nothing in them is ever unpickled.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

import msgspec

from pytest_klineage.errors import BadRecord
from pytest_klineage.records.case import KernelCase
from pytest_klineage.records.codec import finite, from_plain, to_plain
from pytest_klineage.records.source import KernelSource
from pytest_klineage.records.verdict import SCHEMA_VERSION, Verdict

MOST_FAULTS = 3
"""Faults of machines after which a request is given up: the first try and two more."""


class CarriedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A user's file that defines an operator or a reference, as the asker has it."""

    name: str
    """As the case names it: relative to its project's root."""
    digest: str
    """`definition_digest` of the text."""
    text: str


class JudgeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel to be judged on one case, with everything that decides its verdict."""

    case: KernelCase
    source: KernelSource
    platform: str
    """Canonical name, such as "sm90": only a judge of this platform takes it."""
    settings: dict[str, Any]
    """Settings of the gate that decide a verdict, as plain data; folders of the machine are not among them."""
    reference_source: KernelSource | None = None
    """The kernel that stands in for the case's reference."""
    platforms: tuple[str, ...] = ()
    """Those that the kernel was written for; empty for all of its surface."""
    repeat: int = 0
    """0 for the first judgement; one more for each that is asked for because the one before was not sharp."""
    screen_against: float | None = None
    """Speedup of the best kernel so far, when a screening is asked for; None for a full judgement."""
    priority: int = 0
    """Higher ones are judged first. Not part of the digest."""
    product: str = ""
    """The GPU product that judges, such as "H200", where a cluster has several; empty for any."""
    files: tuple[CarriedFile, ...] = ()
    """What a judge imports where it has no checkout. Digests of a reference's files are part of the digest; the case
    has that of its operator's."""
    schema_version: int = SCHEMA_VERSION

    @property
    def digest(self) -> str:
        """SHA-256 over all that decides the verdict, in hexadecimal: the request's name."""
        reference_digest = self.reference_source.digest if self.reference_source is not None else ""
        content = (
            self.schema_version, self.case, self.source.digest, self.platform, self.settings, reference_digest,
            sorted(self.platforms), self.repeat, *([] if self.screen_against is None else [self.screen_against]),
            *filter(None, (self.product, self._reference_files())),
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()

    def _reference_files(self) -> list[tuple[str, str]]:
        """Names and digests of the files of the reference's functions."""
        definition = self.case.definition
        own = definition.source.rpartition(":")[0] if definition is not None else ""
        return sorted((file.name, file.digest) for file in self.files if file.name != own)


class FaultCode(StrEnum):
    """What went wrong with a machine, or with a request, and says nothing about the kernel."""

    HARNESS = "harness_failed"
    """The gate's own machinery failed."""
    DIED = "judge_died"
    """The judge ended in the middle of a judgement: killed, cut off, or crashed."""
    ARTIFACT = "artifact_refused"
    """A kernel that was built elsewhere came with another digest than its own."""
    DEFINITION = "definition_missing"
    """A definition, a function, a library or a compiler that the request needs is not on the judge's machine."""
    MISUSE = "misuse"
    """The request asks for something that cannot be; no other machine would judge it either."""


class MachineFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no verdict."""

    code: FaultCode
    message: str
    device: str = ""
    """UUID of the GPU, or "cpu"."""

    @property
    def is_final(self) -> bool:
        """Whether trying again elsewhere is of no use."""
        return self.code is FaultCode.MISUSE


class JudgeReply(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's answer: a verdict, or a fault that is no verdict."""

    request: str
    """Digest of the request that it answers."""
    verdict: Verdict | None = None
    fault: MachineFault | None = None
    attempt: int = 1
    ticket: str = ""
    """What the asker drew for this request; a reply with another one is an old one. Empty in folders."""
    judge: str = ""
    """Name of the judge in its cluster."""
    product: str = ""
    """GPU product of the judge."""
    schema_version: int = SCHEMA_VERSION

    def check_answers(self, request: JudgeRequest) -> None:
        """Raise BadRecord unless this answers that request: another digest, case or kernel is refused."""
        if self.request != request.digest:
            raise BadRecord(f"a reply to the request {self.request[:12]} stands for {request.digest[:12]}")
        if (self.verdict is None) == (self.fault is None):
            raise BadRecord("a reply holds a verdict or a fault, and not both")
        if self.product != request.product:
            raise BadRecord(f"a judge of the product {self.product!r} answers for {request.product!r}")
        if self.verdict is None:
            return
        if self.verdict.source_digest != request.source.digest:
            raise BadRecord(f"its verdict is about the kernel {self.verdict.source_digest[:12]}, not the one asked for")
        if self.verdict.case != request.case:
            raise BadRecord(f"its verdict is about {self.verdict.case.id}, not the case that was asked for")
        if request.screen_against is None and self.verdict.screened is not None:
            raise BadRecord("its verdict is a screening, and a full judgement was asked for")


def as_it_travels(verdict: Verdict) -> Verdict:
    """The verdict as it comes out of `finite_json` again."""
    return from_plain(finite(to_plain(verdict)), Verdict)
