"""The controller's side of recording: verdicts from this process and from xdist workers into the run store."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_klineage.errors import BadRecord, StoreError
from pytest_klineage.records import SCHEMA_VERSION, Verdict, from_plain, to_plain
from pytest_klineage.results.runs import Record, RunInfo, RunStore, now

if TYPE_CHECKING:
    from pytest_klineage.plugin.session import KlineageSession


class Ledger:
    """Appends every verdict as it arrives, and keeps it for the summary.

    When the run store fails, the run goes on: records move to a store in the temporary folder, and `problems` says so.
    """

    def __init__(self, session: KlineageSession) -> None:
        self._session = session
        self._store: RunStore | None = None
        self._rescued = False
        self._broken = False
        self.records: list[Record] = []
        self.problems: list[str] = []
        self.paths: list[Path] = []

    @property
    def verdicts(self) -> list[Verdict]:
        """Every verdict of the run, in order of arrival."""
        return [record.verdict for record in self.records]

    def add(self, nodeid: str, verdict: Verdict) -> None:
        """Keep and write one verdict; trouble with the store is noted, not raised."""
        record = Record(nodeid=nodeid, verdict=verdict, recorded_at=now())
        self.records.append(record)
        self._write(record)

    def add_plain(self, entries: list[dict[str, Any]]) -> None:
        """The same for what came with a report from a worker process."""
        for entry in entries:
            try:
                self.add(entry["nodeid"], from_plain(entry["verdict"], Verdict))
            except BadRecord as error:
                self.problems.append(f"a verdict of {entry.get('nodeid')} could not be read: {error}")

    def finish(self) -> None:
        """Close the store and write the file of --klineage-json."""
        if self._store is not None:
            self._store.close()
            self._store = None
        path = self._session.settings.json
        if path is not None:
            try:
                self._write_json(path)
            except OSError as error:
                self.problems.append(f"{path} cannot be written: {error.strerror or error}")

    def _write(self, record: Record) -> None:
        if self._broken:
            return
        try:
            if self._store is None:
                self._open(self._session.settings.results, record.verdict)
            self._append(record)
        except StoreError as error:
            self.problems.append(str(error))
            self._rescue(record)

    def _rescue(self, record: Record) -> None:
        """A second store in the temporary folder, once; after that the records stay in memory only."""
        if self._store is not None:
            self._store.close()
            self._store = None
        try:
            if self._rescued:
                raise StoreError("the temporary folder fails as well")
            self._rescued = True
            self._open(Path(tempfile.mkdtemp(prefix="klineage-")), record.verdict)
            self._append(record)
            self.problems.append(f"records from {record.verdict.case.id} on are kept in {self.paths[-1]}")
        except (StoreError, OSError) as error:
            self._broken = True
            self.problems.append(f"records from {record.verdict.case.id} on are not kept on disk: {error}")

    def _open(self, root: Path, first: Verdict) -> None:
        self._store = RunStore.create(root, self._info(first))
        self.paths.append(self._store.path)

    def _append(self, record: Record) -> None:
        if self._store is not None:
            self._store.append(record)

    def _info(self, first: Verdict) -> RunInfo:
        session = self._session
        settings = session.settings
        return RunInfo(
            started_at=now(),
            platform=first.machine.platform if first.machine is not None else session.platform,
            name=settings.run_name,
            settings={
                "mode": settings.mode,
                "methods": list(settings.methods),
                "given": list(settings.given),
                "workers": session.num_workers,
                "gate": msgspec.to_builtins(session.gate_settings, enc_hook=str),
            },
            machine=first.machine,
            argv=tuple(str(argument) for argument in session.config.invocation_params.args),
            versions=versions(),
        )

    def _write_json(self, path: Path) -> None:
        from pytest_klineage.report.aggregate import summarise

        document = {
            "schema_version": SCHEMA_VERSION,
            "store": [str(path) for path in self.paths],
            "summary": dataclasses.asdict(summarise(self.verdicts)),
            "records": [to_plain(record) for record in self.records],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(document) + b"\n")


def versions() -> dict[str, str]:
    """Versions of what took part, without importing any of it."""
    found = {"python": platform.python_version(), "pytest": pytest.__version__}
    for name in ("pytest-klineage", "msgspec", "torch", "pytest-xdist"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
