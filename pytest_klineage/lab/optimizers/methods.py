"""Every method by name, and how one is made: klineage and its ablations, the two published ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.retrieval import DEFAULT_K, CardIndex
from pytest_klineage.lab.optimizers.accelopt.method import AccelOpt
from pytest_klineage.lab.optimizers.accelopt.policy import AccelOptSettings
from pytest_klineage.lab.optimizers.adaexplore.method import AdaExplore
from pytest_klineage.lab.optimizers.adaexplore.tree import AdaExploreSettings, MemoryMode
from pytest_klineage.lab.optimizers.klineage import CARD_METHODS, CardMethod, Serving
from pytest_klineage.lab.optimizers.session import Method

ACCELOPT = "accelopt"
ADAEXPLORE: dict[str, MemoryMode] = {
    "adaexplore" if mode is MemoryMode.RESET else f"adaexplore-{mode.value}": mode for mode in MemoryMode
}
"""By name: where the rules of its memory come from."""
METHOD_NAMES: tuple[str, ...] = (*CARD_METHODS, *ADAEXPLORE, ACCELOPT)
COMPARED: tuple[str, ...] = ("klineage", "generated-only", "adaexplore", "accelopt")
"""The four of a head-to-head, all on equal terms."""


class MethodSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What methods need beside their name. Each takes what concerns it."""

    index: CardIndex = CardIndex(())
    """The library that cards are retrieved from."""
    k: int = DEFAULT_K
    """Cards retrieved in each dimension."""
    capabilities: tuple[str, ...] = ()
    """Instruction sets of the target, for retrieval."""
    contaminated: bool = True
    """Whether cards that were lifted from the workload's own operator and shape are among them."""
    max_steps: int = 0
    """The loop's limit: a published method goes on at least so long."""
    rules_path: Path | None = None
    """The rule file of adaexplore-shared."""


def make_method(name: str, settings: MethodSettings | None = None) -> Method:
    """The method of that name. Raises UnknownName, and UsageError for adaexplore-shared without a rule file."""
    given = settings if settings is not None else MethodSettings()
    if name in CARD_METHODS:
        return CardMethod(
            name, given.index, k=given.k, capabilities=given.capabilities, contaminated=given.contaminated
        )
    if name in ADAEXPLORE:
        return _adaexplore(name, given)
    if name == ACCELOPT:
        return AccelOpt(AccelOptSettings())
    raise UnknownName("method", name, METHOD_NAMES)


def needs_cards(name: str) -> bool:
    """Whether a method shows cards to its model, so that it needs a library."""
    return name in CARD_METHODS and CARD_METHODS[name][0] is not Serving.NOTHING


def recorded_method(settings: Mapping[str, str], max_steps: int) -> Method:
    """The method of a recorded run, from the settings its trajectory begins with, to be replayed.

    Cards, rules and the texts that hold them come from the recording. Raises UnknownName, or UsageError when the
    settings name no method.
    """
    name = settings.get("method")
    if name is None:
        raise UsageError("the trajectory names no method; it is no optimization of the head-to-head")
    shared = Path("recorded") if ADAEXPLORE.get(name) is MemoryMode.SHARED else None
    return make_method(name, MethodSettings(max_steps=max_steps, rules_path=shared))


def _adaexplore(name: str, given: MethodSettings) -> AdaExplore:
    mode = ADAEXPLORE[name]
    if mode is MemoryMode.SHARED and given.rules_path is None:
        raise UsageError(f"{name} begins with the rules of other workloads: give it their file (--rules=FILE)")
    # Steps say only when a search is over. Its policy does not look ahead, so that a larger loop may have more.
    steps = max(AdaExploreSettings().total_steps, given.max_steps)
    path = given.rules_path if mode is MemoryMode.SHARED else None
    return AdaExplore(AdaExploreSettings(memory=mode, rules_path=path, total_steps=steps))
