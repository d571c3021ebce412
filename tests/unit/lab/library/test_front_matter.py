"""Front matter: what is read is what YAML says, as text."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_klineage.lab.library.front_matter import FrontMatterError, markdown_sections, split_front_matter

CARD = """\
---
# a comment
skill_id: topk.histogram
intent: Replace private buckets
  by shared ones  # and say so
preconditions:
- 'Layout: keys don''t
  overlap, and

  are aligned'
- "Storage: \\"room\\" for \\u00fc"
- plain: text with a colon
scope:
  cases: [topk, 'top k', "a, b"]
  languages:
    - cuda
  platforms: []
empty:
---

# Overview
"""


def read(text: str) -> dict[str, Any]:
    return split_front_matter(f"---\n{text}\n---\n")[0]


def test_front_matter_is_read_as_yaml_has_it() -> None:
    front, body = split_front_matter(CARD)
    assert front == {
        "skill_id": "topk.histogram",
        "intent": "Replace private buckets by shared ones",
        "preconditions": [
            "Layout: keys don't overlap, and\nare aligned",
            'Storage: "room" for ü',
            {"plain": "text with a colon"},
        ],
        "scope": {"cases": ["topk", "top k", "a, b"], "languages": ["cuda"], "platforms": []},
        "empty": "",
    }
    assert body == "\n# Overview\n"


def test_line_ends_of_other_systems_are_read() -> None:
    assert split_front_matter("---\r\na: b\r\n---\r\ntext\r\n") == ({"a": "b"}, "text\n")


def test_a_flow_list_may_go_over_lines() -> None:
    assert read("a: [one,\n  two]\nb: c") == {"a": ["one", "two"], "b": "c"}


def test_scalars_stay_text() -> None:
    assert read("a: 1.10\nb: no\nc: |\n  two\n  lines") == {"a": "1.10", "b": "no", "c": "two\nlines"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2", "line 3 of the front matter gives a a second time"),
        ("a:\n  b: 1\n  b: 2", "line 4 of the front matter gives b a second time"),
        ("a: 'open", "is not YAML"),
        ("a: [x, y", "is not YAML"),
        ("a:\n\tb: c", "is not YAML"),
        ("- a\n- b", "is not a mapping"),
        ("just text", "is not a mapping"),
        ("", "is not a mapping"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(FrontMatterError, match=says):
        read(text)


@pytest.mark.parametrize(("text", "says"), [("a: b\n", "there is no front matter"), ("---\na: b\n", "is not closed")])
def test_front_matter_has_two_rules(text: str, says: str) -> None:
    with pytest.raises(FrontMatterError, match=says):
        split_front_matter(text)


def test_sections_go_by_headings_outside_of_code() -> None:
    text = "lead\n# One\na\n## Two\n```cpp\n# not a heading\n``` no\n# nor this\n```\n### three\n# Four\n~~~\n# no\n~~~"
    assert markdown_sections(text) == {
        "": "lead",
        "One": "a",
        "Two": "```cpp\n# not a heading\n``` no\n# nor this\n```\n### three",
        "Four": "~~~\n# no\n~~~",
    }
    assert list(markdown_sections(text, level=1)) == ["", "One", "Four"]
    assert markdown_sections(text, level=1)["One"].startswith("a\n## Two\n```cpp")
