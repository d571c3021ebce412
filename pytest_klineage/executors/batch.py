"""The executor of a folder: requests and replies are files, judged later where the GPU is.

request/<digest>.json     what is asked; written whole, again where the files that it carries have changed
reply/<digest>.json       the verdict; written whole, once: the first one stays
fault/<digest>.<n>.json   the n-th time that a machine failed
claim/<digest>            locked by the judge that works on it; the lock ends with the judge, however it ends
machine/<platform>.json   the machine that judged last
artifacts/                kernels that were built ahead, where there are some

Claims are file locks: judges of one folder share a machine, or a file system on which flock holds between machines. A
folder that is copied to a judge and back needs none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord, StoreError, WaitsForVerdict
from pytest_klineage.files import written_beside
from pytest_klineage.records import Machine, from_json, to_json
from pytest_klineage.records.codec import finite_json
from pytest_klineage.records.judging import MOST_FAULTS, CarriedFile, FaultCode, JudgeReply, JudgeRequest, MachineFault

REQUEST, REPLY, FAULT, CLAIM, MACHINE, ARTIFACTS = "request", "reply", "fault", "claim", "machine", "artifacts"


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How a folder stands, in requests."""

    open: int
    """Neither answered, given up nor worked on."""
    claimed: int
    done: int
    failed: int
    """Given up after faults."""
    refused: int
    """Files whose name is not the digest of what they ask, or that cannot be read."""
    faults: int
    """Faults in all, those of requests that were judged later included."""
    platforms: tuple[tuple[str, int], ...] = ()
    """Open and claimed requests by platform."""


class Claim:
    """A request that is being judged. Hold it until the answer is written, then `release`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def release(self) -> None:
        """Give the request back, answered or not; a second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            # The name goes while the lock is held: who opened it meanwhile sees that it is no longer the claim.
            self._path.unlink(missing_ok=True)
            os.close(descriptor)


class BatchFolder:
    """Requests and replies as files. Any number of processes may ask, judge and look at once. Raises StoreError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def where(self) -> str:
        """The folder, as messages name it."""
        return str(self.root)

    @property
    def artifacts(self) -> Path | None:
        """The folder of kernels that were built ahead; None without one."""
        path = self.root / ARTIFACTS
        return path if path.is_dir() else None

    def submit(self, request: JudgeRequest) -> None:
        """Write the request, unless it is answered, or there with the same files."""
        path = self._path(REQUEST, request.digest)
        if self._path(REPLY, request.digest).exists():
            return
        if not path.exists() or (request.files and _files_in(path) != request.files):
            write_whole(path, to_json(request), replace=True)

    def lookup(self, request: JudgeRequest) -> JudgeReply | None:
        """The verdict; else the last fault of a request that was given up; else None. Raises BadRecord."""
        path = self._path(REPLY, request.digest)
        reply = self._read_reply(path)
        if reply is None:
            reply = self._given_up(request.digest)
        if reply is None:
            return None
        try:
            reply.check_answers(request)
        except BadRecord as error:
            raise BadRecord(f"{path} is refused: {error}; remove the file and have the kernel judged") from error
        return reply

    def machine(self, platform: str) -> Machine:
        """The machine that judged last for a platform. Raises WaitsForVerdict while none has; the folder is made then,
        for the judge that the message asks for."""
        try:
            return from_json((self.root / MACHINE / f"{platform}.json").read_bytes(), Machine)
        except FileNotFoundError as error:
            _make(self.root)
            judge = f"pytest-klineage judge {self.root} --platform {platform}"
            message = f"{self.root} does not know its {platform} machine yet: {judge}"
            raise WaitsForVerdict(self.where, message) from error

    def note_machine(self, machine: Machine) -> None:
        """Write down which machine judges."""
        write_whole(self.root / MACHINE / f"{machine.platform}.json", to_json(machine), replace=True)

    def open_requests(self, platform: str) -> list[JudgeRequest]:
        """What a judge of a platform has to do, in its order: what failed before comes last, then priority, and
        what shares settings, case and reference together. Requests that others work on are among them; `claim` tells.
        """
        found = [request for request in self._requests() if request is not None and request.platform == platform]
        left = [request for request in found if not self._is_finished(request.digest)]
        return sorted(left, key=lambda request: (len(self._faults(request.digest)), *_order(request)))

    def claim(self, request: JudgeRequest) -> Claim | None:
        """Take a request; None when another judge has it, or it is done.

        A claim whose judge died counts as a fault, so that a request which kills judges is given up.
        """
        digest = request.digest
        path = self._path(CLAIM, digest)
        descriptor = _locked(path)
        if descriptor is None:
            return None
        claim = Claim(path, descriptor)
        if not self._is_finished(digest) and (dead := os.read(descriptor, 200).decode(errors="replace")):
            message = f"the judge that had claimed it ({dead.strip()}) ended before it answered"
            self._fault(digest, MachineFault(code=FaultCode.DIED, message=message))
        if self._is_finished(digest):
            claim.release()
            return None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
        return claim

    def answer(self, reply: JudgeReply) -> None:
        """Keep a judge's reply, a verdict for good; to be called while the request is claimed."""
        if reply.fault is not None:
            self._fault(reply.request, reply.fault)
        else:
            attempt = len(self._faults(reply.request)) + 1
            data = finite_json(msgspec.structs.replace(reply, attempt=attempt))
            write_whole(self._path(REPLY, reply.request), data)

    def unjudged(self, platform: str) -> list[tuple[JudgeRequest, MachineFault, bool]]:
        """Requests of a platform that faults have left without a verdict: the last fault, and whether it gave them up.

        What another judge works on is left out.
        """
        known = [request for request in self._requests() if request is not None and request.platform == platform]
        left = [request for request in known if not self._path(REPLY, request.digest).exists()]
        failed = [
            (request, from_json(faults[-1].read_bytes(), MachineFault), self._given_up(request.digest) is not None)
            for request in left if (faults := self._faults(request.digest))
        ]  # fmt: skip
        return [found for found in failed if found[2] or not _is_locked(self._path(CLAIM, found[0].digest))]

    def retry(self) -> int:
        """Forget all faults, so that what was given up is open again. Returns how many requests that were."""
        given_up = {path.name.partition(".")[0] for path in self._files(FAULT)}
        for path in self._files(FAULT):
            path.unlink(missing_ok=True)
        return len(given_up)

    def counts(self) -> Counts:
        """How the folder stands."""
        requests = self._requests()
        states = [(self._state(request.digest), request.platform) for request in requests if request is not None]
        count = Counter(state for state, _ in states)
        left = Counter(platform for state, platform in states if state in ("open", "claimed"))
        return Counts(
            open=count["open"], claimed=count["claimed"], done=count["done"], failed=count["failed"],
            refused=len(requests) - len(states), faults=len(self._files(FAULT)), platforms=tuple(sorted(left.items())),
        )  # fmt: skip

    def _requests(self) -> list[JudgeRequest | None]:
        """Every request; None for a file that is refused."""
        return [_request_in(path) for path in self._files(REQUEST)]

    def _state(self, digest: str) -> str:
        """What `Counts` calls the state of a request."""
        if self._path(REPLY, digest).exists():
            return "done"
        if self._given_up(digest) is not None:
            return "failed"
        return "claimed" if _is_locked(self._path(CLAIM, digest)) else "open"

    def _is_finished(self, digest: str) -> bool:
        return self._path(REPLY, digest).exists() or self._given_up(digest) is not None

    def _given_up(self, digest: str) -> JudgeReply | None:
        """The last fault as a reply, when the request is not to be tried again."""
        faults = self._faults(digest)
        if not faults:
            return None
        last = from_json(faults[-1].read_bytes(), MachineFault)
        if len(faults) < MOST_FAULTS and not last.is_final:
            return None
        return JudgeReply(request=digest, fault=last, attempt=len(faults))

    def _faults(self, digest: str) -> list[Path]:
        return sorted((self.root / FAULT).glob(f"{digest}.*.json"))

    def _fault(self, digest: str, fault: MachineFault) -> None:
        write_whole(self.root / FAULT / f"{digest}.{len(self._faults(digest)) + 1}.json", to_json(fault))

    def _read_reply(self, path: Path) -> JudgeReply | None:
        try:
            return from_json(path.read_bytes(), JudgeReply)
        except FileNotFoundError:
            return None
        except BadRecord as error:
            raise BadRecord(f"{path}: {error}; remove the file and have the kernel judged") from error

    def _files(self, kind: str) -> list[Path]:
        return sorted((self.root / kind).glob("[0-9a-f]*.json"))

    def _path(self, kind: str, digest: str) -> Path:
        return self.root / kind / (digest if kind == CLAIM else f"{digest}.json")


def write_whole(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file that appears whole and synced, and the folder that it lies in; one that is there stays unless it is
    to be replaced. Raises StoreError."""
    _make(path.parent)
    try:
        with written_beside(path, data, synced=True, shared=True) as name:
            if replace or not path.exists():
                os.replace(name, path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error.strerror or error}") from error


def _order(request: JudgeRequest) -> tuple[object, ...]:
    """By priority, then such that a reference that a judge keeps serves the next one: full judgements come first, since
    they find out what a screening need not."""
    reference_digest = request.reference_source.digest if request.reference_source is not None else ""
    settings, case = msgspec.json.encode(request.settings), msgspec.json.encode(request.case)
    screened = request.screen_against is not None
    return -request.priority, settings, request.case.id, case, reference_digest, screened, request.digest


def _request_in(path: Path) -> JudgeRequest | None:
    """The request of a file; None unless it is one, and the file is called by its digest."""
    try:
        request = from_json(path.read_bytes(), JudgeRequest)
    except (OSError, BadRecord):
        return None
    return request if request.digest == path.stem else None


def _files_in(path: Path) -> tuple[CarriedFile, ...]:
    request = _request_in(path)
    return request.files if request is not None else ()


def _locked(path: Path) -> int | None:
    """An open claim file that this process alone has locked; None when another has. Raises StoreError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            if _names(path, descriptor):
                return descriptor
            os.close(descriptor)  # released by its holder between our open and our lock: what has the name is another
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error.strerror or error}") from error


def _names(path: Path, descriptor: int) -> bool:
    """Whether the path is still the name of this open file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _is_locked(path: Path) -> bool:
    """Whether a judge holds the claim, as the kernel's table of locks says; asking takes no lock."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return any(_same_file(line, status) for line in _lock_lines())


def _lock_lines() -> Iterator[str]:
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as file:
        yield from file


def _same_file(line: str, status: os.stat_result) -> bool:
    """Whether a line of /proc/locks is about this file: its sixth word is major:minor:inode, the first two in hex."""
    words = line.split()
    location = words[5 if "->" not in words else 6].split(":") if len(words) > 6 else []
    return len(location) == 3 and int(location[2]) == status.st_ino and words[1 if "->" not in words else 2] == "FLOCK"
