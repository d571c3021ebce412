"""The part of YAML that the front matter of skills is written in, and the sections of Markdown below it. Read only.

Mappings, lists (block and flow), and scalars (plain, quoted, over several lines). Whatever else YAML has is refused
by name: a card that is read half is worse than one that is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from pytest_klineage.errors import UsageError

KEY = re.compile(r"([A-Za-z_][\w-]*):(?:\s+(.*))?")
REFUSED = {
    "&": "an anchor", "*": "an alias", "!": "a tag", "|": "a literal block", ">": "a folded block",
    "{": "a flow mapping",
}  # fmt: skip
FLOW_ITEM = re.compile(r"""\s*('(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|[^,'"\[\]]+)\s*(,|$)""")
ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0", " ": " ",
    '"': '"', "\\": "\\", "/": "/",
}  # fmt: skip
"""What stands behind a backslash in double quotes; \\x, \\u and \\U are read as numbers."""

Node: TypeAlias = "str | list[Node] | dict[str, Node]"


class FrontMatterError(UsageError):
    """Front matter that is none, or that uses more of YAML than is read here; the message has the line."""


def split_front_matter(text: str) -> tuple[dict[str, Node], str]:
    """The front matter as strings, lists and dicts, and the text below it. Raises FrontMatterError."""
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != "---":
        raise FrontMatterError("line 1 is not '---': there is no front matter")
    end = next((number for number, line in enumerate(lines[1:], start=1) if line.rstrip() == "---"), 0)
    if not end:
        raise FrontMatterError("the front matter is not closed by '---'")
    node = _Reader(lines[1:end]).read()
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


class _Reader:
    """Lines of YAML and the place that reading has come to."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.at = lines, 0

    def read(self) -> Node:
        """The whole. Raises FrontMatterError for lines that belong to nothing."""
        if not self._more():
            raise FrontMatterError("the front matter is empty")
        node = self._node(self._indent())
        if self._more():
            raise self._error("is not part of what stands before it")
        return node

    def _error(self, what: str) -> FrontMatterError:
        shown = self.lines[min(self.at, len(self.lines) - 1)].strip()
        return FrontMatterError(f"line {self.at + 2} of the front matter {what}: {shown!r}")

    def _more(self) -> bool:
        while self.at < len(self.lines) and re.fullmatch(r"\s*(#.*)?", self.lines[self.at]):
            self.at += 1
        return self.at < len(self.lines)

    def _indent(self) -> int:
        line = self.lines[self.at]
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise self._error("is indented by a tab")
        return len(line) - len(line.lstrip())

    def _node(self, indent: int) -> Node:
        return self._list(indent) if self._is_item(indent) else self._mapping(indent)

    def _is_item(self, indent: int) -> bool:
        return re.match(r"-(\s|$)", self.lines[self.at][indent:]) is not None

    def _list(self, indent: int) -> list[Node]:
        items: list[Node] = []
        while self._more() and self._indent() == indent and self._is_item(indent):
            items.append(self._scalar(self.lines[self.at][indent + 1 :].strip(), indent))
        return items

    def _mapping(self, indent: int) -> dict[str, Node]:
        result: dict[str, Node] = {}
        while self._more() and self._indent() == indent and not self._is_item(indent):
            found = KEY.fullmatch(self.lines[self.at][indent:].rstrip())
            if found is None:
                raise self._error("is not 'key: value'")
            key, rest = found.group(1), (found.group(2) or "").strip()
            if key in result:
                raise self._error(f"gives {key} a second time")
            if rest and not rest.startswith("#"):
                result[key] = self._scalar(rest, indent)
                continue
            self.at += 1
            deeper = self._more() and (self._indent() > indent or (self._indent() == indent and self._is_item(indent)))
            result[key] = self._node(self._indent()) if deeper else ""
        return result

    def _scalar(self, text: str, indent: int) -> Node:
        if text[:1] in REFUSED:
            raise self._error(f"has {REFUSED[text[0]]}, which is not read here")
        if text[:1] in ("'", '"'):
            return _unquoted(self._joined(text, indent, _closed_quote))
        if text.startswith("["):
            return self._flow(self._joined(text, indent, lambda so_far: so_far.rstrip().endswith("]")))
        text = self._joined(text, indent, lambda so_far: False)
        return re.sub(r"\s+#.*$", "", text, flags=re.S).strip()

    def _joined(self, text: str, indent: int, closed: Callable[[str], bool]) -> str:
        """A scalar and the deeper lines that go on with it: a line end is a blank, an empty line a line end."""
        start = self.at
        self.at += 1
        while not closed(text) and self.at < len(self.lines):
            line = self.lines[self.at]
            if line.strip() and self._indent() <= indent:
                break
            text += "\n" if not line.strip() else line.strip() if text.endswith("\n") else f" {line.strip()}"
            self.at += 1
        text = text.rstrip("\n")
        if text[:1] in ("'", '"', "[") and not closed(text):
            self.at = start
            raise self._error("begins what is never closed")
        return text

    def _flow(self, text: str) -> list[Node]:
        inner, items, at = text.strip()[1:-1].strip(), list[Node](), 0
        while at < len(inner):
            found = FLOW_ITEM.match(inner, at)
            if found is None:
                self.at -= 1
                raise self._error("has a list that is not read here")
            item = found.group(1).strip()
            items.append(_unquoted(item) if item[:1] in ("'", '"') else item)
            at = found.end()
        return items


def _closed_quote(text: str) -> bool:
    body = r"'(?:[^']|'')*'" if text[0] == "'" else r'"(?:[^"\\]|\\.)*"'
    return re.fullmatch(rf"{body}\s*(#.*)?", text, flags=re.S) is not None


def _unquoted(text: str) -> str:
    text = text.strip()
    if text[0] == "'":
        return text[1 : text.rindex("'")].replace("''", "'")
    return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", _unescaped, text[1 : text.rindex('"')])


def _unescaped(found: re.Match[str]) -> str:
    code = found.group(1)
    if len(code) > 1:
        return chr(int(code[1:], 16))
    if code not in ESCAPES:
        raise FrontMatterError(f"the escape \\{code} is not read here")
    return ESCAPES[code]
