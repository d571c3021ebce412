"""A report as one HTML file that needs nothing else: styles, figures, script and data are in it.

Everything recorded is escaped by the template or in XML, or travels as JSON and becomes text nodes. A content security
policy names the one script and the one style by their digests, so that nothing else runs even if an escape were
missing.
"""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from importlib.resources import files as resources
from pathlib import Path

import msgspec

from pytest_klineage.errors import MissingDependency
from pytest_klineage.report.document import Figure, Point, Report
from pytest_klineage.report.figures import FAILED, INK, PALETTE, POINTS, TITLE, WRAPPER, svg_text
from pytest_klineage.report.tables import milliseconds

PAGE = resources("pytest_klineage.report").joinpath("page")
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that must not stand in a script element as they are."""
REMEDY = "pip install 'pytest-klineage[report]'"


def html_report(report: Report, version: str, drawn: Mapping[str, Path] | None = None) -> str:
    """The page; `drawn` has SVG files of figures by key, the others are drawn here.

    Raises MissingDependency without Jinja2, and without matplotlib where there is something to draw.
    """
    try:
        import jinja2
        import markupsafe
    except ImportError as error:
        raise MissingDependency("Jinja2, which HTML reports are made with,", REMEDY) from error
    files = drawn or {}

    def svg(figure: Figure) -> str:
        text = files[figure.key].read_text(encoding="utf-8") if figure.key in files else svg_text(figure)
        return markupsafe.Markup(inline_svg(figure, text))

    # The two files of this package, and figures, which are written by an XML library, are all that is not escaped.
    style, script = (markupsafe.Markup(_text(name)) for name in ("report.css", "report.js"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["figure"] = _figure
    environment.filters["svg"] = svg
    template = environment.from_string(_text("report.html.j2"))
    return template.render(
        report=report, version=version, style=style, script=script, style_hash=_digest(style),
        script_hash=_digest(script), data=markupsafe.Markup(script_safe({"details": report.details})),
    )  # fmt: skip


def script_safe(data: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = msgspec.json.encode(data).decode()
    for character, escaped in UNSAFE.items():
        text = text.replace(character, escaped)
    return text


def _figure(value: float | None) -> str:
    """A number of a figure, in its table."""
    return "-" if value is None else milliseconds(value)


def _text(name: str) -> str:
    return PAGE.joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
COLOURS = {
    INK: "ink", "#ffffff": "paper", "#57606a": "soft", "#e3e7eb": "rule", "#eceff2": "band",
    WRAPPER: "wrapper", FAILED: "failed", **{colour: f"s{position}" for position, colour in enumerate(PALETTE)},
}  # fmt: skip
"""By a colour that figures are drawn with: the variable of the page's style, which has one for each theme."""
FONT = re.compile(r"(?:(\d+) )?([\d.]+)px")
LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")


def inline_svg(figure: Figure, text: str) -> str:
    """The element that the page has for a figure, from the `text` of its SVG file.

    The page's content security policy allows no style attributes, so each property becomes an attribute.
    """
    root = ET.fromstring(text[text.index("<svg") :])
    _drop(root)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": figure.title}
    for element in root.iter():
        kind, *positions = element.get("id", "").split("-")
        if kind == POINTS:
            _aim(element, [figure.points[int(position)] for position in positions])
    _own_ids(root, figure.key)
    for element in root.iter():
        _restyle(element)
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    return ET.tostring(root, encoding="unicode")


def _drop(parent: ET.Element) -> None:
    """Take out what the page has itself: styles, metadata, the title; and the paper's colour."""
    for child in list(parent):
        if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style") or child.get("id") in (TITLE, "patch_1"):
            parent.remove(child)
        else:
            _drop(child)


def _aim(group: ET.Element, points: list[Point]) -> None:
    """What a point says when it is pointed at, and its detail. Markers are uses of one shape, in order."""
    shapes = list(group.iter(f"{{{SVG}}}use")) or list(group.iter(f"{{{SVG}}}path"))
    for shape, point in zip(shapes, points, strict=False):
        if point.detail:
            shape.set("data-detail", point.detail)
        ET.SubElement(shape, f"{{{SVG}}}title").text = point.text


def _own_ids(root: ET.Element, key: str) -> None:
    """Ids that something refers to become the figure's own; the others go."""
    text = ET.tostring(root, encoding="unicode")
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    for element in root.iter():
        name = element.attrib.pop("id", "")
        if name in used:
            element.set("id", f"{key}-{name}")
        for attribute, value in element.attrib.items():
            element.set(attribute, re.sub(r"^(url\()?#", rf"\g<0>{key}-", value))


def _restyle(element: ET.Element) -> None:
    for part in element.attrib.pop("style", "").split(";"):
        name, _, value = (text.strip() for text in part.partition(":"))
        if name == "font" and (font := FONT.search(value)):
            element.set("font-size", font[2])
            element.attrib |= {"font-weight": font[1]} if font[1] else {}
        elif name:
            element.set(name, f"var(--{COLOURS[value]})" if value in COLOURS else value)
    for name in ("d", "x", "y"):
        if name in element.attrib:
            element.set(name, LONG_NUMBER.sub(r"\1", element.attrib[name]))
