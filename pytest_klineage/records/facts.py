"""Names of the facts that a verdict has of its reference, for who writes them and who reads them."""

from __future__ import annotations

MEASURED = "variant_ms."
"""How facts begin that are times, not versions or flags; a variant's name follows."""
COUNTED = "charged"
"""In a variant's place: the chosen one, in the thread that is timed, where its search may find another plan there."""
VERSION_NOTE = "version_note"
"""The fact that another version runs; of several libraries, one each with the library's name after a dot."""
NO_PART = "took no part in the reference"
"""Words of a note on a verdict whose reference lacks a library or a variant that failed."""
SLOWER_SEARCH = "did not find its best plan again"
"""Words of a note on a verdict whose reference is slower than when it was compared."""
