"""What a shared library exports and asks for, read from its bytes: a judge never loads what a candidate has built."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator

from pytest_klineage.surfaces.native import no_entry

MAGIC = b"\x7fELF\x02\x01"
"""ELF, 64 bits, little-endian: what every platform here uses."""
DYNAMIC_SYMBOLS = 11
"""Type of the section that the loader looks names up in."""
DYNAMIC_SECTION, NEEDED = 6, 1
"""Type of the section with the loader's orders, and the order for another library."""
UNDEFINED = 0
"""Section of a symbol that comes from another library."""
LOCAL = 0
"""Binding of a symbol that is not visible outside."""


def check_entry(content: bytes, entry: str) -> None:
    """Raise SurfaceFailure unless a library exports a symbol. What is no such library is left to the loader."""
    names = exported_names(content)
    if names is not None and entry not in names:
        raise no_entry(entry)


def exported_names(content: bytes) -> frozenset[str] | None:
    """Names that a shared library defines for others; None for bytes that are not a 64-bit ELF file."""
    return _read(_names, content)


def needed_libraries(content: bytes) -> frozenset[str]:
    """Names of the libraries that a shared library asks the loader for; none of other bytes."""
    return _read(_needed, content) or frozenset()


def _read(names: Callable[[bytes], Iterator[str]], content: bytes) -> frozenset[str] | None:
    if not content.startswith(MAGIC):
        return None
    try:
        return frozenset(names(content))
    except (struct.error, IndexError, ValueError):
        return None


def _names(content: bytes) -> Iterator[str]:
    for table, strings in sections(content, DYNAMIC_SYMBOLS):
        # st_name, st_info, st_other, st_shndx, st_value, st_size
        for symbol in struct.iter_unpack("<IBBHQQ", table):
            if symbol[3] != UNDEFINED and symbol[1] >> 4 != LOCAL:
                yield text_at(content, strings + symbol[0])


def _needed(content: bytes) -> Iterator[str]:
    for table, strings in sections(content, DYNAMIC_SECTION):
        # d_tag, d_val
        for tag, value in struct.iter_unpack("<qQ", table):
            if tag == NEEDED:
                yield text_at(content, strings + value)


def sections(content: bytes | mmap.mmap, kind: int) -> Iterator[tuple[bytes, int]]:
    """Contents of the sections of a type, and where the text lies that they name by offsets.

    Layouts are those of elf(5): Elf64_Ehdr, Elf64_Shdr, Elf64_Sym, Elf64_Dyn.
    """
    (start,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info, sh_addralign, sh_entsize
    found = [struct.unpack_from("<IIQQQQIIQQ", content, start + index * size) for index in range(count)]
    for section in found:
        if section[1] == kind:
            yield content[section[4] : section[4] + section[5]], found[section[6]][4]


def text_at(content: bytes | mmap.mmap, first: int) -> str:
    """The text that begins there. Raises ValueError where it does not end."""
    if (end := content.find(b"\0", first)) < 0:
        raise ValueError(f"the text at {first} has no end")
    return content[first:end].decode(errors="replace")
