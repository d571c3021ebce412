"""A report as one HTML file that needs nothing else: styles, script and data are in it. Nothing is computed here.

Everything recorded is escaped by the template, or travels as JSON and becomes text nodes. A content security policy
names the one script and the one style by their digests, so that nothing else runs even if an escape were missing.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

import msgspec

from pytest_klineage.errors import MissingDependency
from pytest_klineage.report.document import Detail, Figure, Report
from pytest_klineage.report.tables import milliseconds

PAGE = files("pytest_klineage.report").joinpath("page")
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that must not stand in a script element as they are."""
REMEDY = "pip install 'pytest-klineage[report]'"


class _Data(msgspec.Struct):
    """What the script draws and shows."""

    figures: tuple[Figure, ...]
    details: tuple[Detail, ...]


def html_report(report: Report, version: str) -> str:
    """The page. Raises MissingDependency without Jinja2."""
    try:
        import jinja2
        import markupsafe
    except ImportError as error:
        raise MissingDependency("Jinja2, which HTML reports are made with,", REMEDY) from error
    # The two files of this package are the only text that is not escaped.
    style, script = (markupsafe.Markup(_text(name)) for name in ("report.css", "report.js"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["figure"] = _figure
    template = environment.from_string(_text("report.html.j2"))
    figures = tuple(figure for section in report.sections for figure in section.figures)
    return template.render(
        report=report, version=version, style=style, script=script, style_hash=_digest(style),
        script_hash=_digest(script), data=markupsafe.Markup(script_safe(_Data(figures, report.details))),
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
