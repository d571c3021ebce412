"""Values of foreign cards: their kind checked, their words replaced by ours. Which field is which is not known here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.library.rendering import NAME, NAME_LIMIT
from pytest_klineage.records import Category, Surface
from pytest_klineage.records.card import ANY

T = TypeVar("T")

CATEGORY_NAMES = {
    "tile": Category.TILE_STAGE, "sm_stage": Category.TILE_STAGE, "shared_memory_staging": Category.TILE_STAGE,
    "cp_async": Category.PIPELINE, "cp_async_pipeline": Category.PIPELINE, "software_pipelining": Category.PIPELINE,
    "vectorize": Category.VECTORIZE_GLOBAL, "warp_specialization": Category.WARP_SPECIALIZE, "tma": Category.TMA_LOAD,
    "gemm_phase_decomposition": Category.PHASE_DECOMPOSITION, "warp_shuffle_scan": Category.SHUFFLE_SCAN,
    "multi_threaded_block_parallelism": Category.BLOCK_PARALLEL, "threads": Category.BLOCK_PARALLEL,
    "persistent_scheduling": Category.PERSISTENT, "cluster_multicast": Category.MULTICAST,
}  # fmt: skip
"""Words for our categories that are not their names; written with underscores."""
LANGUAGE_NAMES = {"c++": Surface.CPP, "cuda c++": Surface.CUDA, "cuda-c++": Surface.CUDA}


class UnmappedField(UsageError):
    """A field of a foreign card that has no place in ours, or that is not what its format says."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(f"the card cannot be imported: {field}: {problem}")


def decoded(data: bytes | str) -> Any:
    """What the JSON says. Raises UnmappedField when it is none."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise UnmappedField("the card", f"not JSON: {error}") from error


def mapping_of(value: Any, field: str) -> Mapping[str, Any]:
    """The value as an object. Raises UnmappedField when it is something else."""
    if not isinstance(value, dict):
        raise UnmappedField(field, f"an object is expected, got {type(value).__name__}")
    return value


def object_of(value: Any, field: str, known: frozenset[str]) -> Mapping[str, Any]:
    """The value as an object without unknown keys. Raises UnmappedField, which names the first of those."""
    found = mapping_of(value, field)
    for key in sorted(set(found) - known):
        raise UnmappedField(key, f"unknown in {field}; known: {', '.join(sorted(known))}")
    return found


def text_of(card: Mapping[str, Any], field: str) -> str:
    """A text that is there and not blank. Raises UnmappedField."""
    value = card.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UnmappedField(field, "a text is expected")
    return value


def list_of(card: Mapping[str, Any], field: str) -> list[Any]:
    """A list, empty when the field is absent. Raises UnmappedField for anything else."""
    value = card.get(field, [])
    if not isinstance(value, list):
        raise UnmappedField(field, f"a list is expected, got {type(value).__name__}")
    return value


def texts_of(card: Mapping[str, Any], field: str) -> list[str]:
    """A list of texts. Raises UnmappedField, which names the first that is none."""
    values = list_of(card, field)
    for at, value in enumerate(values):
        if not isinstance(value, str):
            raise UnmappedField(f"{field}[{at}]", f"a text is expected, got {type(value).__name__}")
    return values


def card_name(text: str) -> str:
    """A card's name made of this text. Raises UnmappedField when it cannot be one."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(name) > NAME_LIMIT or not NAME.fullmatch(name):
        raise UnmappedField("skill_id", f"{name!r} cannot be a card's name of at most {NAME_LIMIT}; give name=")
    return name


def mapped(values: Sequence[str], field: str, canonical: Callable[[str], T]) -> tuple[T | str, ...]:
    """Each value in our words; "*" stays. Raises UnmappedField."""
    found: list[T | str] = []
    for value in values:
        try:
            found.append(value if value == ANY else canonical(value))
        except UnknownName as error:
            raise UnmappedField(field, str(error)) from error
    return tuple(dict.fromkeys(found))


def language_of(name: str) -> Surface:
    """The surface behind the name of a language. Raises UnknownName."""
    lower = name.strip().lower()
    if lower in list(Surface):
        return Surface(lower)
    if lower in LANGUAGE_NAMES:
        return LANGUAGE_NAMES[lower]
    raise UnknownName("surface", name, list(Surface))


def category_of(name: str) -> Category:
    """The category behind the name of an action. Raises UnknownName."""
    lower = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if lower in list(Category):
        return Category(lower)
    if lower in CATEGORY_NAMES:
        return CATEGORY_NAMES[lower]
    raise UnknownName("category", name, list(Category))
