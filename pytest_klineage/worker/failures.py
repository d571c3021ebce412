"""What a worker says of an exception: bounded text."""

from __future__ import annotations

import traceback

MESSAGE_LIMIT = 4_000
"""Characters of a failure that a message carries."""


def describe(error: BaseException) -> str:
    """An exception as bounded text; an exception that cannot even be printed is described by its type."""
    try:
        lines = traceback.format_exception(error)
        return bounded("".join(lines[-6:]))
    except BaseException:  # process boundary: __str__ of a candidate's exception may raise anything
        return f"{type(error).__name__} (its message cannot be printed)"


def bounded(text: str) -> str:
    """The end of a text: the last lines of a traceback are the ones that help."""
    return text if len(text) <= MESSAGE_LIMIT else "..." + text[-MESSAGE_LIMIT:]
