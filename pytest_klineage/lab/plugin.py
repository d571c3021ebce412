"""Language models for tests that ask for them: the backend, the budget, where trajectories lie. None by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_klineage.errors import UsageError

if TYPE_CHECKING:
    from pytest_klineage.lab.llm.backend import Backend
    from pytest_klineage.lab.llm.prices import Prices
    from pytest_klineage.lab.llm.session import Session

DEFAULT_BUDGET_USD = 10.0
"""The paper's, per workload."""
ALL = "all"


class Models:
    """What the fixture `klineage_models` returns. Making it sends nothing and reads nothing.

    A trajectory lies at <trajectories>/<name>.jsonl. With `replay` that file is read, and what the replay itself writes
    goes to a folder of pytest's, since it is the same again.
    """

    def __init__(self, settings: Mapping[str, Any], *, trajectories: Path, replays: Callable[[], Path]) -> None:
        self._settings = settings
        self._replays = replays
        self._opened: list[Session] = []
        self.trajectories: Path = settings.get("trajectories") or trajectories

    @property
    def backend(self) -> str:
        """The kind of backend that was chosen, "none" by default."""
        chosen: str = self._settings.get("llm") or "none"
        return chosen

    @property
    def is_replay(self) -> bool:
        """Whether recorded trajectories are replayed."""
        return self.backend == "replay"

    @property
    def limit_usd(self) -> float:
        """Dollars that a session may spend."""
        limit = self._settings.get("budget")
        return DEFAULT_BUDGET_USD if limit is None else float(limit)

    def path(self, name: str) -> Path:
        """Where the trajectory of that name lies, or will lie. Raises UsageError for a name that leaves the folder."""
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UsageError(f"a trajectory is called by a plain name, such as gemm/1, got {name!r}")
        return self.trajectories / f"{name}.jsonl"

    def is_recorded(self, name: str) -> bool:
        """Whether there is a trajectory of that name."""
        return self.path(name).is_file()

    def session(
        self, name: str, *, limit_usd: float | None = None, settings: Mapping[str, str] | None = None
    ) -> Session:
        """A session whose trajectory has that name: begun, resumed where --klineage-resume names it, or replayed.

        `limit_usd` is the session's own budget instead of --klineage-budget, and instead of the recorded one when it is
        resumed with that option. Raises NoBackend, NoKey, NoPrice, MissingDependency or UsageError; each says what to
        do next.
        """
        from pytest_klineage.lab.llm.session import Session

        path = self.path(name)
        limit = self.limit_usd if limit_usd is None else limit_usd
        backend = self._backend(name)
        if self.is_replay:
            session = Session.begin(
                self._replays() / f"{name}.jsonl", backend, limit_usd=limit, name=name, settings=settings
            )
        elif self._is_resumed(name) and path.exists():
            given = limit_usd is not None or self._settings.get("budget") is not None
            session = Session.resume(path, backend, limit_usd=limit if given else None)
        else:
            session = self._begun(path, backend, limit, name, settings)
        self._opened.append(session)
        return session

    def close(self) -> None:
        """Release the files of all sessions."""
        for session in self._opened:
            session.close()
        self._opened.clear()

    def _begun(
        self, path: Path, backend: Backend, limit_usd: float, name: str, settings: Mapping[str, str] | None
    ) -> Session:
        from pytest_klineage.lab.llm.session import Session

        if path.exists():
            raise UsageError(
                f"the trajectory {path} exists: go on with it by --klineage-resume={name}, replay it by "
                "--klineage-llm=replay, or name another folder with --klineage-trajectories"
            )
        return Session.begin(path, backend, limit_usd=limit_usd, name=name, settings=settings)

    def _is_resumed(self, name: str) -> bool:
        pattern: str = self._settings.get("resume") or ""
        return pattern == ALL or bool(pattern and fnmatch(name, pattern))

    def _backend(self, name: str) -> Backend:
        """A backend of the chosen kind for one trajectory."""
        from pytest_klineage.lab.llm.choose import make_backend
        from pytest_klineage.lab.llm.faults import NoBackend

        kind, model = self.backend, self._settings.get("model") or ""
        if kind == "none":
            raise NoBackend
        if kind == "anthropic" and not model:
            raise UsageError("--klineage-llm=anthropic needs a model: --klineage-model=NAME, a name of the price table")
        if kind == "replay" and not self.is_recorded(name):
            raise UsageError(
                f"there is no trajectory {self.path(name)} to replay: record it with a model, or name the folder with "
                "--klineage-trajectories"
            )
        own = kind in ("anthropic", "replay")
        return make_backend(f"{kind}:{self._behind(kind, name)}", self._prices(), model="" if own else model)

    def _behind(self, kind: str, name: str) -> str:
        """What stands behind the colon of a backend's name. Raises UsageError for an option that is missing."""
        if kind == "anthropic":
            return str(self._settings["model"])
        if kind == "command":
            return self._needed("command", "PROGRAM", "reads a prompt on its input and prints the reply")
        if kind == "exchange":
            return str(Path(self._needed("exchange", "DIR", "takes prompts and replies as files")) / name)
        return str(self.path(name))

    def _needed(self, option: str, metavar: str, what: str) -> str:
        value = self._settings.get(option)
        if not value:
            raise UsageError(f"--klineage-llm={option} needs --klineage-{option}={metavar}, which {what}")
        return str(value)

    def _prices(self) -> Prices:
        from pytest_klineage.lab.llm.prices import Prices

        own = self._settings.get("prices")
        return Prices.load(*([own] if own else []))
