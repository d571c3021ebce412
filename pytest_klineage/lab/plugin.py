"""The laboratory's own pytest plugin: language models for tests that ask for them. None by default.

pytest finds it by an entry point beside the gate's plugin, whose session it reads. Importing it loads no model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.plugin.options import Option, add_options, given_path, number, one_of, option_value, switch, word
from pytest_klineage.plugin.session import SESSION_KEY, KlineageSession

if TYPE_CHECKING:
    from pytest_klineage.lab.llm.backend import Backend
    from pytest_klineage.lab.llm.prices import Prices
    from pytest_klineage.lab.llm.session import Session

DEFAULT_BUDGET_USD = 10.0
"""The paper's, per workload."""
ALL = "all"
BACKENDS = ("none", "anthropic", "command", "exchange", "replay")
PATHS = ("prices", "exchange", "trajectories")
"""Options that are paths."""
OPTIONS = (
    Option(
        "llm", "BACKEND", one_of(*BACKENDS),
        "Language model of suites that need one: none, anthropic, command, exchange or replay (default: none)",
    ),
    Option("model", "NAME", word, "Model that is asked, as the price table calls it; unbilled where it costs nothing"),
    Option("budget", "USD", number(float, 0), "Dollars that one optimization may spend (default: 10)"),
    Option("prices", "FILE", word, "Price table of your own, over the shipped one"),
    Option("command", "PROGRAM", word, "With --klineage-llm=command: reads a prompt on its input, prints the reply"),
    Option("exchange", "DIR", word, "With --klineage-llm=exchange: prompts go out to DIR/<name>/, replies come in"),
    Option(
        "trajectories", "DIR", word,
        "Where trajectories are written, or replayed from (default: trajectories in --klineage-results)",
    ),
    Option(
        "screen", "", switch,
        "In a search, time a kernel only until its interval excludes the best so far, for a second at most; what seems"
        " better is judged in full",
    ),
    Option("resume", "NAME", word, "Go on with the trajectories that match NAME, such as gemm/1, 'gemm/*' or all"),
)  # fmt: skip
MODELS_KEY = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register options and ini keys."""
    add_options(parser, OPTIONS)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Read the options: a bad value of the ini file stops the run before anything is collected."""
    settings = config.stash[MODELS_KEY] = _read_settings(config)
    session = config.stash.get(SESSION_KEY, None)
    if settings and session is not None:
        session.note_given(tuple(settings))


def model_settings(config: pytest.Config) -> dict[str, Any]:
    """What the user gave of OPTIONS, by name; paths are absolute."""
    return config.stash[MODELS_KEY]


def _read_settings(config: pytest.Config) -> dict[str, Any]:
    values = {option.name: option_value(config, option) for option in OPTIONS}
    return {
        name: given_path(config, name, value) if name in PATHS else value
        for name, value in values.items()
        if value is not None
    }


@pytest.fixture
def klineage_models(klineage_session: KlineageSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Language models as --klineage-llm chooses them: klineage_models.session("gemm/1") opens a trajectory."""
    models = Models(
        model_settings(klineage_session.config),
        trajectories=klineage_session.settings.results / "trajectories",
        replays=lambda: tmp_path_factory.mktemp("klineage-replay"),
        in_turns=klineage_session.elsewhere,
    )
    yield models
    models.close()


class Models:
    """What the fixture `klineage_models` returns. Making it sends nothing and reads nothing.

    A trajectory lies at <trajectories>/<name>.jsonl. With `replay` that file is read, and what the replay itself writes
    goes to a folder of pytest's, since it is the same again.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, trajectories: Path, replays: Callable[[], Path], in_turns: bool = False
    ) -> None:
        """`in_turns`: a run ends its turn where something has not come yet, and goes on with the same command."""
        self._settings = settings
        self._in_turns = in_turns
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
    def screens(self) -> bool:
        """Whether a search screens kernels before it judges them in full."""
        return bool(self._settings.get("screen")) and not self.is_replay

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
        from pytest_klineage.results.packed import is_there

        return is_there(self.path(name))

    def is_under_way(self, name: str) -> bool:
        """Whether the trajectory of that name waits: runs go in turns, and it has not come to an end of its own."""
        if not self._in_turns or self.is_replay or not self.is_recorded(name):
            return False
        from pytest_klineage.lab.llm.trajectory import read_trajectory
        from pytest_klineage.lab.optimizers.session import CUT_SHORT
        from pytest_klineage.records import Stopped

        last = next((line.event for line in reversed(read_trajectory(self.path(name))[0])), None)
        return not isinstance(last, Stopped) or last.reason in CUT_SHORT

    def is_done(self, name: str) -> bool:
        """Whether the trajectory of that name was recorded by an earlier run, and this one is not to go on with it."""
        recorded = self.is_recorded(name) and not self.is_replay
        return recorded and not self.is_under_way(name) and not self._is_resumed(name)

    def session(
        self, name: str, *, limit_usd: float | None = None, settings: Mapping[str, str] | None = None
    ) -> Session:
        """A session whose trajectory has that name: begun, resumed where --klineage-resume names it, or replayed.

        `limit_usd` is the session's own budget instead of --klineage-budget, and instead of the recorded one when it is
        resumed with that option. Raises NoBackend, NoKey, NoPrice, MissingDependency or UsageError; each says what to
        do next.
        """
        from pytest_klineage.lab.llm.session import Session
        from pytest_klineage.results.packed import is_there, unpack

        path = self.path(name)
        limit = self.limit_usd if limit_usd is None else limit_usd
        backend = self._backend(name)
        if self.is_replay:
            session = Session.begin(
                self._replays() / f"{name}.jsonl", backend, limit_usd=limit, name=name, settings=settings
            )
        elif self._is_resumed(name) and is_there(path):
            unpack(path)
            given = limit_usd is not None or self._settings.get("budget") is not None
            session = Session.resume(path, backend, limit_usd=limit if given else None)
        elif self.is_under_way(name):
            session = Session.resume(path, backend, note=False)
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
        behind = self._details_of(kind, name)
        return make_backend(f"{kind}:{behind}", self._prices(), model="" if own else model, waits=not self._in_turns)

    def _details_of(self, kind: str, name: str) -> str:
        """What stands after the colon of a backend's name. Raises UsageError for an option that is missing."""
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
