"""Texts that induction puts together for models: prompts of prompts/ filled in, kernels, short lines."""

from __future__ import annotations

from pathlib import Path

from pytest_klineage.lab.library.rendering import fenced
from pytest_klineage.lab.optimizers.instructions import code_language
from pytest_klineage.lab.optimizers.prompts import prompt
from pytest_klineage.records import Category, KernelSource

FOLDER = Path(__file__).with_name("prompts")


def filled(name: str, **values: str) -> str:
    """The text of prompts/NAME.md with every $WORD replaced. Raises KeyError for a word that is not given."""
    return prompt(name, FOLDER, **values) + "\n"


def kernel_text(source: KernelSource) -> str:
    """All files of a kernel by name, the first of them the one that is compiled."""
    language = code_language(source.surface)
    return "\n".join(f"`{file.name}`:\n\n{fenced(file.text, language)}\n" for file in source.files)


def one_line(text: str, limit: int = 300) -> str:
    """The text on one line, at most `limit` characters of it."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def meaning_of(category: Category) -> str:
    """What a step of this category adds, in the words of prompts/categories.md."""
    mark = f"- `{category.value}`: "
    return next((line.removeprefix(mark) for line in filled("categories").splitlines() if line.startswith(mark)), "")
