"""Seals of replies: an HMAC with a secret that the asker and all judges of a cluster share. Nothing is encrypted."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.records import from_json
from pytest_klineage.records.codec import finite_json
from pytest_klineage.records.judging import JudgeReply

SECRET_VARIABLE = "KLINEAGE_JUDGE_SECRET_FILE"
LEAST_BYTES = 32


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a cluster or of a file of answers: exactly these bytes, and the seal over them."""

    seal: str
    """HMAC-SHA-256, in hexadecimal."""
    content: msgspec.Raw


def secret_path() -> Path:
    """The file that SECRET_VARIABLE names, else ~/.klineage/judge_secret."""
    return Path(os.environ.get(SECRET_VARIABLE) or Path.home() / ".klineage" / "judge_secret")


def read_secret() -> bytes:
    """The shared secret. Raises UsageError when it is absent, short, or open to other users."""
    path = secret_path()
    try:
        mode, secret = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        step = f"(umask 077; mkdir -p {path.parent}; openssl rand -hex 32 > {path}), the same on every machine"
        raise UsageError(f"the judges' secret {path} cannot be read ({error.strerror}): {step}") from error
    if mode & 0o077:
        raise UsageError(f"other users may read the judges' secret: chmod 600 {path}")
    if len(secret) < LEAST_BYTES:
        raise UsageError(f"the judges' secret {path} has less than {LEAST_BYTES} bytes: openssl rand -hex 32 > {path}")
    return secret


def sealed(content: bytes, secret: bytes) -> bytes:
    """The line that carries a JSON document with its seal."""
    return msgspec.json.encode(Sealed(seal=_seal(content, secret), content=msgspec.Raw(content)))


def opened(line: bytes, secret: bytes) -> bytes:
    """The document of a line. Raises BadRecord for one without the seal of this secret."""
    found = from_json(line, Sealed)
    content = bytes(found.content)
    if not hmac.compare_digest(found.seal, _seal(content, secret)):
        raise BadRecord("its seal is not that of the judges' secret")
    return content


def seal_reply(reply: JudgeReply, secret: bytes) -> bytes:
    """A reply as a line that can be sent or kept."""
    return sealed(finite_json(reply), secret)


def open_reply(line: bytes, secret: bytes) -> JudgeReply:
    """The reply of a line. Raises BadRecord."""
    return from_json(opened(line, secret), JudgeReply)


def _seal(content: bytes, secret: bytes) -> str:
    return hmac.new(secret, content, "sha256").hexdigest()
