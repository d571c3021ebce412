"""The names that a shared library exports, read from its bytes: a judge never loads what a candidate has built."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from pytest_klineage.records import Code
from pytest_klineage.surfaces.base import SurfaceFailure

MAGIC = b"\x7fELF\x02\x01"
"""ELF, 64 bits, little-endian: what every platform here uses."""
DYNAMIC_SYMBOLS = 11
"""Type of the section that the loader looks names up in."""
UNDEFINED = 0
"""Section of a symbol that comes from another library."""
LOCAL = 0
"""Binding of a symbol that nobody outside can see."""


def check_entry(content: bytes, entry: str) -> None:
    """Raise SurfaceFailure unless a library exports a symbol. What is no such library is left to the loader."""
    names = exported_names(content)
    if names is not None and entry not in names:
        raise SurfaceFailure(
            Code.ENTRY_MISSING,
            f'the library exports no symbol {entry!r}; declare it extern "C" int {entry}(const klineage_call *)',
        )


def exported_names(content: bytes) -> frozenset[str] | None:
    """Names that a shared library defines for others; None for bytes that are not a 64-bit ELF file."""
    if not content.startswith(MAGIC):
        return None
    try:
        return frozenset(_names(content))
    except (struct.error, IndexError, ValueError):
        return None


def _names(content: bytes) -> Iterator[str]:
    """Layouts are those of elf(5): Elf64_Ehdr, Elf64_Shdr, Elf64_Sym."""
    (start,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info, sh_addralign, sh_entsize
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, start + index * size) for index in range(count)]
    for section in sections:
        if section[1] != DYNAMIC_SYMBOLS:
            continue
        offset, length, strings = section[4], section[5], sections[section[6]][4]
        # st_name, st_info, st_other, st_shndx, st_value, st_size
        for symbol in struct.iter_unpack("<IBBHQQ", content[offset : offset + length]):
            if symbol[3] != UNDEFINED and symbol[1] >> 4 != LOCAL:
                first = strings + symbol[0]
                yield content[first : content.index(b"\0", first)].decode(errors="replace")
