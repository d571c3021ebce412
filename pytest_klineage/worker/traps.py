"""Traps in front of the machine code by which loaded libraries compute, for callers that go past the dispatcher.

The static runtime, AOTInductor's C functions and users of a mangled name call the kernels of operators directly.
They are overwritten from their first byte to their last, in copies of the pages that no process can write to
(code_copies.py); who calls them crashes, and who enters them behind their beginning. Functions that are reached through
a pointer in data and exported by no name are not found.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pytest_klineage.surfaces.elf import DYNAMIC_SYMBOLS, UNDEFINED, sections, text_at
from pytest_klineage.worker.code_copies import Copy, Place, copied, filling, page_ranges, put_in_place

TRAPS = {"x86_64": b"\x0f\x0b", "aarch64": b"\x00\x00\x00\x00"}
"""An undefined instruction: ud2, udf #0."""
LONGEST = max(map(len, TRAPS.values()))
LIBRARIES = re.compile(r"/lib(torch_cpu|gfortran|[^/]*(openblas|blis|mkl|dnnl))[^/]*\.so")
"""Libraries that compute and may be there before a candidate is: the framework's, and NumPy's BLAS and run-time library
of Fortran."""
FUNCTION = 2
"""Type of a symbol that is one."""
BLAS = re.compile(
    r"gem[mv]|trmm|trsm|s[yp]r2?k?(?=\b|_?64)|symm|hemm|syrk|symv|sparse_[sdcz]_(m[mv]|spmmd|add)|spmm"
    r"|Dfti(Commit|Compute)|^(?:scipy_)?(?:cblas_)?(?:[sdcz]|ds|sds|sc|dz|cs|zd)"
    r"(?:dotc?u?|dot[cu]_sub|axpb?y[cu]?|geadd|ger[uc]?|her2?|hpr2?|scal|rotm?|nrm2|a?sum|a?max|a?min|[oi]matcopy)"
    r"(?:_?64_?|_)?$|^(?:[sdcz]|ds|sds|cs|zd)(?:axpb?y|dot|scal|ger|rotm?|a?sum|nrm2|geadd|a?max|a?min|[oi]matcopy)"
    r"[cudv]?_k(?:_|$)|^dnnl_|^nnc_",
    re.I,
)
"""Names without a C++ mangling by which a BLAS, a sparse one, an FFT or a DNN library computes."""
VENDORED = re.compile(
    r"^mkl_(?!serv_|set_|get_|verbose|progress|gf_)|^mklgdft|^(?:scipy_)?(?:LAPACKE_|cblas_)?[sdcz]"
    r"(?:(?:ge|gb|gg|gt|po|pb|pp|pt|sy|sp|sb|st|he|hb|hp|tr|tb|tp|tg|or|un|la)[a-z0-9]{2,5}|scal)(?:_?64)?_?$"
    r"|^v[sd][a-z]|^vm[sdcz][a-z]|^nnp_(?!initialize|deinitialize)|__(?:avx\w*|fma3)$"
    r"|^pytorch_qnnp_(?!initialize|deinitialize|delete)|^xnn_(?!initialize|deinitialize|delete)"
    r"|^_gfortran_(?:matmul|norm2|count|[ms]?(?:sum|product|(?:min|max)(?:val|loc\d)|findloc\d|i?(?:all|any|parity)))_",
    re.I,
)
"""The same by which LAPACK, the vector functions and inner parts of MKL, NNPACK, QNNPACK and XNNPACK compute, and
Fortran's functions of whole arrays.

Sleef's functions take one register of values, as those of the C library take one value: they are left alone.
"""
EMBEDDED = re.compile(
    r"_ZNK?(?:6fbgemm(?!\d+(?:fbgemm(?:Supported|Has|Is|Inst|Env|Get)|is|cpuinfo"
    r"|(?:FloatTo|B?[Ff]loat16To)(?:B?[Ff]loat(?:16)?)))|6asmjit|7qnnpack|2ao6sparse|4dnnl"
    r"|\d+Packed(?:Conv|Linear|Embedding)|4gloo\d+(?:sum|product|max|min)I)(?!\w*D[012]Ev$)"
)
"""Mangled functions of libraries that lie within the framework's. Destructors run as the process ends; copies
to and from half precision call FBGEMM's casts."""
KERNELS = re.compile(r"_ZN2at(3cpu|6native)(\d+)(\w+)")
"""Mangled functions of namespaces with kernels: one for each operator, and what those are made of."""
MOVING = re.compile(
    r"_ZN2at(?:6native|25compositeexplicitautograd)(?:5copy_|8_to_copy|5clone|22copy_ignoring_overlaps)"
    r"E|^(?:scipy_)?(?:cblas_)?[sdcz](?:copy|swap)(?:_?64_?|_)?$|^[sdcz](?:copy|swap)_k(?:_|$)"
    r"|_ZN6fbgemm\d+(?:FloatTo|B?[Ff]loat16To)B?[Ff]loat(?:16)?"
    r"|^_gfortran_(?:transpose|reshape|spread|(?:internal_)?(?:un)?pack|(?:c|eo)shift\d)(?:_|$)"
)
"""Functions that copy and convert: left alone but where a definition does nothing else."""
SERVES = re.compile(
    r"^_(?:init|fini)$|^blas_(?!level1)|^exec_blas|^(?:scipy_)?goto|^get_num_procs$|^(?:scipy_)?openblas_|^(?:scipy_)?_*(?:cblas_)?xerbla"
    r"|^(?:scipy_)?(?:cblas_)?[sdczqx](?:copy|swap)(?:_?64_?|_)?$|^[sdczqx](?:copy|swap)_k(?:_|$)"
)
"""Functions of OpenBLAS that compute nothing: for memory, threads, settings and errors, and those of MOVING. All others
that it exports are trapped."""
SHIM = re.compile(r"aoti_torch_(?:cpu|mkldnn)_(\w+)")
BACKEND = re.compile(r"^structured_|_(?:cpu|sparse|mkldnn|quantized|nested|kernel)|mkldnn|onednn")
"""Marks of a function for one kind of tensors, which is no wrapper around the dispatcher."""
ARANGE = re.compile(r"_ZN2at6native10arange_outERKN3c106ScalarES\d_S\d_")
"""What computes a range; another function of the same name is a wrapper around the dispatcher."""
WORKS = re.compile(
    r"gem[mv]|matmul|bmm|(?:^|_)mm(?:_|$)|linear|conv|(?:^|_)dot|attention|softmax|blas|sparse$|onednn|^mkldnn_(?!view)"
)
"""Words in the names of parts that no operator is called by."""


class Operators(NamedTuple):
    """Plain names of the framework's operators, by what the functions of their names do."""

    computing: frozenset[str]
    composed: frozenset[str]
    """Those among them of which some overload is made of others: what bears the plain name may be that."""
    harmless: frozenset[str]
    """Those that move bytes, or are made of others throughout: these go through the dispatcher, and raise there."""


class Entries(NamedTuple):
    """Functions of a library that are trapped."""

    computing: tuple[Place, ...]
    moving: tuple[Place, ...]


class LoadedLibrary(NamedTuple):
    """A loaded library: where it lies in memory and in the file system."""

    path: str
    start: int
    code: tuple[tuple[int, int], ...]
    """Address ranges that can be executed."""


def loaded_libraries() -> list[LoadedLibrary]:
    """Libraries of LIBRARIES that this process has mapped."""
    starts: dict[str, int] = {}
    code: dict[str, list[tuple[int, int]]] = {}
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not LIBRARIES.search(fields[5]):
            continue
        first, last = (int(end, 16) for end in fields[0].split("-"))
        starts.setdefault(fields[5], first - int(fields[2], 16))
        if "x" in fields[1]:
            code.setdefault(fields[5], []).append((first, last))
    return [LoadedLibrary(path, start, tuple(code.get(path, ()))) for path, start in starts.items()]


class Function(NamedTuple):
    """A function that a library exports: where it begins in its file, and how many bytes it has."""

    name: str
    place: int
    size: int


def functions(path: str) -> Iterator[Function]:
    """Every function that a library exports."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        for table, strings in sections(content, DYNAMIC_SYMBOLS):
            for name, kind, _other, where, value, length in struct.iter_unpack("<IBBHQQ", table):
                if kind & 15 == FUNCTION and where != UNDEFINED:
                    yield Function(text_at(content, strings + name), value, length)


def computes(name: str, operators: Operators) -> bool:
    """Whether a function computes for an operator that is not among the harmless ones."""
    if found := SHIM.fullmatch(name):
        return operator_of(found[1], operators) not in operators.harmless
    if ARANGE.match(name):
        return True
    found = KERNELS.match(name)
    if found is None:
        named = EMBEDDED.match(name) if name.startswith("_Z") else BLAS.search(name) or VENDORED.search(name)
        return named is not None
    word = found[3][: int(found[2])]
    known = operator_of(word, operators)
    if known in operators.harmless or (found[1] != "3cpu" and known in operators.composed and not BACKEND.search(word)):
        return False
    return found[1] == "3cpu" or bool(known) or bool(WORKS.search(word))


def operator_of(word: str, operators: Operators) -> str:
    """The longest beginning of a function's name that is an operator's: add of add_sparse_out; empty for none."""
    for prefix in ("structured_", "ufunc_", "foreach_tensor_", "math_"):
        word = word.removeprefix(prefix)
    parts = word.split("_")
    for count in range(len(parts), 0, -1):
        start = "_".join(parts[:count])
        if any(start in names for names in operators):
            return start
    return ""


@functools.lru_cache(maxsize=4)
def entry_addresses(operators: Operators) -> dict[LoadedLibrary, Entries]:
    """By library, what to trap. A third of a second the first time: a template asks before it forks."""
    found = {}
    for library in loaded_libraries():
        named = list(functions(library.path))
        blas = is_openblas(library.path)
        computing = {one for one in named if computes(one.name, operators) or (blas and not SERVES.match(one.name))}
        moving = {one for one in named if MOVING.match(one.name)}
        found[library] = Entries(inside(library, computing), inside(library, moving))
    return found


def is_openblas(path: str) -> bool:
    """Whether a file is OpenBLAS: by its own name, or, for Debian's libblas and liblapack, that of its folder."""
    file = Path(path)
    of_debian = file.name.startswith(("libblas", "liblapack")) and "openblas" in file.parent.name
    return of_debian or "openblas" in file.name


def inside(library: LoadedLibrary, chosen: set[Function]) -> tuple[Place, ...]:
    """Those of a library's functions that lie in its code; of names for one place, the longest."""
    sizes: dict[int, int] = {}
    for one in chosen:
        sizes[library.start + one.place] = max(one.size, LONGEST, sizes.get(library.start + one.place, 0))
    return tuple(
        Place(start, min(size, high - start))
        for start, size in sizes.items() for low, high in library.code if low <= start < high
    )  # fmt: skip


def set_traps(operators: Operators, *, moving: bool = False) -> int:
    """Overwrite all functions that compute, or those that only copy.

    Returns how many; 0 on an unknown machine. Where no copies can lie, the process's own pages are written to.
    """
    trap = TRAPS.get(platform.machine())
    if trap is None:
        return 0
    places = [one for some in trapped(operators, moving=moving).values() for one in some]
    copies = prepared(operators, moving)
    left = [(one.start, one.end) for one in copies if not put_in_place(one)] if copies else code_ranges(operators)
    for low, high in left:
        overwrite(low, high, [one for one in places if low <= one.start < high], trap)
    return len(places)


def trapped(operators: Operators, *, moving: bool) -> dict[LoadedLibrary, tuple[Place, ...]]:
    """By library, where traps are set; none without any."""
    found = {
        library: entries.moving if moving else entries.computing
        for library, entries in entry_addresses(operators).items()
    }
    return {library: places for library, places in found.items() if places}


@functools.lru_cache(maxsize=4)
def prepared(operators: Operators, moving: bool) -> tuple[Copy, ...]:
    """Copies of the pages with traps, which wait to be put in place once; empty where there can be none.

    In those of functions that copy, those that compute are trapped as well: the former come second.
    """
    places = {one for entries in entry_addresses(operators).values() for one in entries.computing}
    ranges = []
    for library, more in trapped(operators, moving=moving).items():
        places |= {*more}
        for low, high in library.code:
            ranges += page_ranges(one for one in more if low <= one.start < high)
    try:
        return tuple(copied(ranges, places, TRAPS[platform.machine()]))
    except (OSError, AttributeError):
        return ()


def code_ranges(operators: Operators) -> list[tuple[int, int]]:
    """Where the code of libraries with traps lies."""
    return [one for library in trapped(operators, moving=False) for one in library.code]


def overwrite(low: int, high: int, places: Iterable[Place], trap: bytes) -> None:
    """Fill functions in a range of code with the same few bytes; nothing where the system refuses that."""
    libc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t(high - low)
    read_and_run = mmap.PROT_READ | mmap.PROT_EXEC
    if libc.mprotect(ctypes.c_void_p(low), size, read_and_run | mmap.PROT_WRITE):
        return
    for place in places:
        ctypes.memmove(place.start, filling(trap, place.size), place.size // len(trap) * len(trap))
    libc.mprotect(ctypes.c_void_p(low), size, read_and_run)
