"""What a build reads comes to light in whatever spelling a source asks for it; what it may read is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.gate.stages.audit import foreign_file_reasons, included_libraries
from pytest_klineage.records import Build, Code, KernelSource, SourceFile, Surface
from pytest_klineage.surfaces import SurfaceFailure
from pytest_klineage.surfaces.cpp import CppBackend
from pytest_klineage.surfaces.reads import ASSEMBLED, INCLUDED, foreign_reads, lies_in, listed

KERNEL = '#include "klineage.h"\nextern "C" int run(const klineage_call *) { return 0; }\n'
FOREIGN = {
    "a directive in two strings": 'asm(".inc" "bin \\"FILE\\"");\n',
    "a directive that the assembler puts together": (
        'asm(".macro joined a, b\\n\\\\a\\\\b \\"FILE\\"\\n.endm\\njoined .inc, bin");\n'
    ),
    "assembly that is included": 'asm(".inc" "lude \\"FILE\\"");\n',
    "an include from a macro": '#define NAME "FILE"\n#include NAME\n',
}
OWN = {
    "headers of the language": "#include <algorithm>\n#include <omp.h>\n#include <unistd.h>\n",
    "a table in assembly": 'asm(".pushsection .rodata\\n.byte 1, 2, 3\\n.popsection");\n',
    "a file beside it": '#include "own.h"\n',
    "assembly beside it": 'asm(".inc" "lude \\"own.s\\"");\n',
}


def reads(text: str, cache: Path, flags: tuple[str, ...]) -> tuple[str, ...]:
    """What a build of a kernel with some more text read beside its own."""
    files = (SourceFile("k.cpp", text + KERNEL), SourceFile("own.h", "struct own {};"), SourceFile("own.s", ".byte 1"))
    source = KernelSource(surface=Surface.CPP, files=files, entry="run", flags=flags)
    built = CppBackend().build(source, cache, platform="cpu", timeout_s=60).build
    again = CppBackend().build(source, cache, platform="cpu", timeout_s=60).build
    assert (again.cached, again.reads) == (True, built.reads)
    assert len(foreign_file_reasons(built)) == len(built.reads)
    assert {reason.code for reason in foreign_file_reasons(built)} <= {Code.TAMPERING}
    return built.reads


@pytest.mark.parametrize("flags", [("-O0",), ("-O3", "-g", "-fopenmp", "-flto")], ids=["plain", "lto"])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_found(what: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    foreign = tmp_path / "another file.h"
    foreign.write_text("\n")
    assert reads(FOREIGN[what].replace("FILE", str(foreign)), tmp_path / "cache", flags) == (str(foreign),)


@pytest.mark.parametrize("flags", [("-O0",), ("-O3", "-g", "-fopenmp", "-flto")], ids=["plain", "lto"])
@pytest.mark.parametrize("what", OWN)
def test_what_belongs_to_it_is_left_alone(what: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    assert reads(OWN[what], tmp_path, flags) == ()


def test_a_rule_of_make_is_read_with_its_escapes(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("k.o: a.h \\\n /usr/b\\ c.h \\\n d\\\\e.h\n")
    assert listed(tmp_path / "list") == ["a.h", "/usr/b c.h", "d\\e.h"]


@pytest.mark.parametrize("header", ["eigen3/Eigen/Core", "boost/numeric/ublas/matrix.hpp", "mkl.h", "blaze/Math.h"])
def test_a_librarys_header_counts_as_the_library(header: str, tmp_path: Path) -> None:
    (tmp_path / INCLUDED).write_text(f"k.o: k.cpp /usr/include/{header} /usr/include/math.h")
    (tmp_path / ASSEMBLED).write_text("k.o: k.s")
    found = foreign_reads(tmp_path, lambda: ("/usr/include",))
    build = Build(digest="", reads=found)
    assert found == (f"/usr/include/{header}",)
    assert included_libraries(build) == (f"{header.rpartition('/')[2]} as a header",)
    assert foreign_file_reasons(build) == ()


def test_without_a_list_nothing_is_built(tmp_path: Path) -> None:
    with pytest.raises(SurfaceFailure, match="CXX") as caught:
        listed(tmp_path / "list")
    assert caught.value.code is Code.BUILD_IO


def test_a_folder_is_no_prefix_of_a_name(tmp_path: Path) -> None:
    assert lies_in("/usr/include/math.h", ("/usr/include",))
    assert not lies_in("/usr/include2/math.h", ("/usr/include",))
