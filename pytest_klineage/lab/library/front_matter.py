"""The YAML front matter of skills, with every scalar as text, and the sections of Markdown below it. Read only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

from pytest_klineage.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    import yaml

REMEDY = "pip install 'pytest-klineage[skills]'"
Node: TypeAlias = "str | list[Node] | dict[str, Node]"


class FrontMatterError(UsageError):
    """Front matter that is missing, or that is not YAML; the message has the line."""


def split_front_matter(text: str) -> tuple[dict[str, Node], str]:
    """The front matter as strings, lists and dicts, and the text below it.

    Raises FrontMatterError, and MissingDependency without PyYAML.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != "---":
        raise FrontMatterError("line 1 is not '---': there is no front matter")
    end = next((number for number, line in enumerate(lines[1:], start=1) if line.rstrip() == "---"), 0)
    if not end:
        raise FrontMatterError("the front matter is not closed by '---'")
    node = _read("\n".join(lines[1:end]))
    if not isinstance(node, dict):
        raise FrontMatterError("line 2: the front matter is not a mapping")
    return node, "\n".join(lines[end + 1 :])


def markdown_sections(text: str, level: int = 2) -> dict[str, str]:
    """Text below each heading of at most `level` by its title, up to the next one; code in fences has no headings."""
    found: dict[str, list[str]] = {}
    title, fence = "", ""
    for line in text.split("\n"):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark.group(1)
        elif mark and mark.group(1).startswith(fence) and line.strip() == mark.group(1):
            fence = ""
        head = None if fence or mark else re.fullmatch(rf"#{{1,{level}}} (.+?)\s*", line)
        if head:
            title = head.group(1)
            found.setdefault(title, [])
        else:
            found.setdefault(title, []).append(line)
    return {name: "\n".join(lines).strip("\n") for name, lines in found.items()}


def _read(text: str) -> Node:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency("PyYAML, which skills are read with,", REMEDY) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise FrontMatterError(f"the front matter is not YAML: {error}") from error
    return _plain(root) if root is not None else ""


def _plain(node: yaml.Node) -> Node:
    """Scalars stay the text that they are: a version is no number, and "no" is a word."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return str(node.value)
    found: dict[str, Node] = {}
    for key, value in node.value:
        if key.value in found:
            line = key.start_mark.line + 2
            raise FrontMatterError(f"line {line} of the front matter gives {key.value} a second time")
        found[str(key.value)] = _plain(value)
    return found
