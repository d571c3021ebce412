"""What problems take and give, found by running them.

One process loads PyTorch and forks one for each problem, under limits of memory and processor time. Requests come as
lines of JSON on the standard input, answers leave as lines of JSON. Problems are trusted: the limits stop a mistake.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import msgspec

from pytest_klineage.errors import HarnessError, UsageError
from pytest_klineage.formats.sizes import shrunk, with_sizes
from pytest_klineage.operators.modules import Described, describe

PROCESSOR_S, MEMORY_BYTES = 120, 16 << 30
"""What one problem may take. Its tensors have no memory, unless its code asks for their values."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One problem."""

    text: str
    sizes: dict[str, Any] = {}
    """Values of names at the file's top, as literals in text."""
    at_most: int = 0
    """Where above 0: what the other sizes become at most."""
    precision: str = ""
    training: bool = True


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    text: str = ""
    """With other sizes."""
    sizes: dict[str, str] = {}
    """All that were set, as text."""
    found: Described | None = None
    error: str = ""


class Server(NamedTuple):
    """The process that starts others for problems, and its pipes."""

    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    answers: IO[bytes]


def ask(requests: Sequence[Request]) -> list[Answer]:
    """Have problems run. Raises HarnessError when the process that starts them has ended."""
    server, answers = started(), []
    for request in requests:
        try:
            server.requests.write(msgspec.json.encode(request) + b"\n")
            server.requests.flush()
            answers.append(msgspec.json.decode(server.answers.readline(), type=Answer))
        except (OSError, msgspec.DecodeError) as error:
            started.cache_clear()
            raise HarnessError(f"the process that runs problems has ended: {error}") from error
    return answers


@functools.cache
def started() -> Server:
    """The server, which ends with this process."""
    command = f"from {__name__} import main; main()"
    process = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if process.stdin is None or process.stdout is None:
        raise HarnessError("the process that runs problems has no pipes")
    server = Server(process, process.stdin, process.stdout)
    atexit.register(end, server)
    return server


def end(server: Server) -> None:
    """End a server, which may have ended already."""
    with contextlib.suppress(OSError):
        server.requests.close()
    server.process.wait()
    server.answers.close()


def answer(request: Request) -> Answer:
    """Run one problem here."""
    try:
        sizes = {name: literal(name, value) for name, value in request.sizes.items()}
        if request.at_most:
            values = executed(with_sizes(request.text, sizes))
            sizes = {**shrunk(request.text, values, request.at_most), **sizes}
        text = with_sizes(request.text, sizes) if sizes else request.text
        found = describe(executed(text), precision=request.precision, training=request.training)
        return Answer(text=text, sizes={name: repr(value) for name, value in sizes.items()}, found=found)
    except Exception as error:  # a problem's code may raise anything
        said = " ".join(str(error).split())[:400]
        return Answer(error=said if isinstance(error, UsageError) else f"{type(error).__name__}: {said}")


def literal(name: str, value: Any) -> Any:
    """A size from its text. Raises UsageError."""
    import ast

    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        raise UsageError(f"{name} must be a number or a tuple of them, got {value!r}") from None


def executed(text: str) -> dict[str, Any]:
    """The names of a file that has been executed."""
    namespace: dict[str, Any] = {"__name__": "klineage_problem"}
    exec(compile(text, "problem.py", "exec"), namespace)
    return namespace


def answered_apart(request: Request) -> bytes:
    """The answer of a process of its own, as JSON."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        os.dup2(2, 1)  # what a problem prints is no answer
        with os.fdopen(write, "wb") as pipe:
            pipe.write(msgspec.json.encode(answer(request)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    ended = f"it ended: over {PROCESSOR_S} s of processor time or {MEMORY_BYTES >> 30} GiB, or a crash"
    return data or msgspec.json.encode(Answer(error=ended))


def main() -> None:
    """Answer requests until there are no more."""
    import torch

    torch.set_num_threads(1)
    torch.empty(2, 2, device="meta").triu()  # loads what tensors without memory need, once for all problems
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answered_apart(msgspec.json.decode(line, type=Request)) + b"\n")
        sys.stdout.buffer.flush()
