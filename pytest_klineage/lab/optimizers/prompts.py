"""Prompts as templates in folders prompts/, NAME.md each, and filling them in. What they say is written there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from string import Template

from pytest_klineage.errors import UnknownName

FOLDER = Path(__file__).with_name("prompts")


def prompt(name: str, /, folder: Path = FOLDER, **values: str) -> str:
    """The prompt of that name with its $words filled in. Raises UnknownName, or KeyError for a missing value."""
    return _template(folder, name).substitute(values)


def paragraphs(*parts: str) -> str:
    """Parts of a prompt with blank lines between them; empty ones are left out, and no part is changed inside."""
    return "\n\n".join(part for part in parts if part)


@cache
def _template(folder: Path, name: str) -> Template:
    path = folder / f"{name}.md"
    if not path.is_file():
        raise UnknownName("prompt", name, (found.stem for found in folder.glob("*.md")))
    return Template(path.read_text(encoding="utf-8").rstrip("\n"))
