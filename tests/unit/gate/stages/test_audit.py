"""The static audit: tampering is found, its benign counterpart is not, and no source makes it raise."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.gate.stages.audit import MAX_NOTES, audit
from pytest_klineage.records import Code, KernelSource, SourceFile, Surface


def python(*texts: str) -> KernelSource:
    files = tuple(SourceFile(f"kernel{index}.py", text) for index, text in enumerate(texts))
    return KernelSource(surface=Surface.PYTHON, files=files, entry="run")


def native(*texts: str, surface: Surface = Surface.CPP) -> KernelSource:
    files = tuple(SourceFile(f"kernel{index}.cpp", text) for index, text in enumerate(texts))
    return KernelSource(surface=surface, files=files, entry="run")


@pytest.mark.parametrize(
    ("tampering", "benign"),
    [
        ("ptrace(PTRACE_ATTACH, pid);", "int ptrace_level = 0;"),
        ("process_vm_readv (pid, a, 1, b, 1, 0);", "// like process_vm_readv(pid)"),
        ("process_vm_writev(pid, a, 1, b, 1, 0);", "/* process_vm_writev(\n) */"),
        ('open("/proc/%d/mem", 0);', 'open("/proc/cpuinfo", 0);'),
        ('open("/proc/self/environ", 0);', 'puts("the environ");'),
        ('fopen("/proc/1/maps", "r");', 'puts("/procedure/maps");'),
        ('asm(".incbin \\"answer.bin\\"");', "int incbin;"),
        ("# embed <answer.bin>", "int embed;"),
        ("#include </etc/passwd>", "#include <vector>"),
        ('#  include "../answer.h"', '#include "tile.h"'),
        ("__attribute__((constructor)) void f();", "__attribute__((always_inline)) void f();"),
        ("__attribute__ ((destructor)) void f();", "struct A { A(); ~A(); };"),
        ('auto a = "/*"; ptrace(0, pid); auto b = "*/";', 'auto a = "/*"; /* ptrace(0, pid); */ auto b = "*/";'),
        ('auto a = R"x(/*)"/*)x"; ptrace(0, pid); auto b = "*/";', 'auto a = R"x("/*)x"; // ptrace(0, pid)'),
        ('auto a = "\\"/*"; ptrace(0, pid); auto b = "*/";', "char a = '\"'; /* ptrace(0, pid) */ char b = '\"';"),
        ('auto a = "??/"/*"; ptrace(0, pid); auto b = "*/";', 'auto a = "??/??/"; /* ptrace(0, pid) */'),
        ("ptr\\\nace(0, pid);", "// a line that goes on \\\n ptrace(0, pid);"),
        ('int R; f(R)R"/*"; ptrace(0, pid); "*/";', "int a = 1'000'000; // ptrace(0, pid)"),
    ],
)
@pytest.mark.parametrize("surface", [Surface.CPP, Surface.CUDA])
def test_native_tampering_differs_from_benign_code(tampering: str, benign: str, surface: Surface) -> None:
    found = audit(native(tampering, surface=surface))
    assert [reason.code for reason in found.reasons] == [Code.TAMPERING]
    assert audit(native(benign, surface=surface)).reasons == ()


@pytest.mark.parametrize(
    ("tampering", "benign"),
    [
        ("import torch\ntorch.allclose = lambda *a: True", "import torch\nok = torch.allclose"),
        ("import torch as t\nt.Tensor.copy_ = f", "import torch as t\nx.copy_ = f"),
        ("import torch.cuda\ntorch.cuda.synchronize = f", "import torch.cuda\ntorch.cuda.synchronize()"),
        ("import time\ntime.perf_counter: object = f", "import time\nstart: float = time.perf_counter()"),
        ("import time\ntime.perf_counter_ns = f", "import timeit\nself.time = 3"),
        ("import sys\nsys.stdout += 1", "import sys\ncount = 1\ncount += 1"),
        ("import os\na, (os.write, b) = f, (g, h)", "import os\na, (write, b) = f, (g, h)"),
        ("def run(a):\n    import gc\n    gc.collect = None", "def run(a):\n    import gc\n    gc.collect()"),
        ("import builtins\nbuiltins.print = None", "import mymodule\nmymodule.print = None"),
        ("import ctypes\nctypes.CDLL = None", "ctypes = make()\nctypes.x = 1"),
    ],
)
def test_python_tampering_differs_from_benign_code(tampering: str, benign: str) -> None:
    reasons = audit(python(tampering)).reasons
    assert {reason.code for reason in reasons} == {Code.TAMPERING}
    assert reasons[0].message.startswith("line ")
    assert audit(python(benign)).reasons == ()


def test_tampering_in_any_file_counts() -> None:
    assert audit(native("int x;", "ptrace(0);")).reasons
    assert audit(python("x = 1", "import os\nos.read = None")).reasons


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ('dlopen("libm.so", 1);', "symbols of other libraries"),
        ("std::thread t(f);", "starts threads"),
        ("pthread_create(&t, 0, f, 0);", "starts threads"),
        ("if (fork()) {}", "deals with processes"),
        ("cblas_sgemm(a);", "names a BLAS"),
    ],
)
def test_native_hints_are_notes_and_reject_nothing(text: str, note: str) -> None:
    found = audit(native(text))
    assert found.reasons == ()
    assert any(note in item for item in found.notes)


def test_looking_into_the_interpreter_is_a_note() -> None:
    found = audit(python("import sys, gc\nframe = sys._getframe(1)\nall = gc.get_objects()"))
    assert found.reasons == ()
    assert ["_getframe" in found.notes[0], "get_objects" in found.notes[1]] == [True, True]


@pytest.mark.parametrize(
    ("text", "fallback"),
    [
        ("def run(a):\n    try:\n        return mine(a)\n    except Exception:\n        return a @ a", True),
        (
            "def run(a):\n    try:\n        return mine(a)\n    except Exception:\n        if a:\n            return a",
            True,
        ),
        ("def run(a):\n    try:\n        x = mine(a)\n    except Exception:\n        raise\n    return x", False),
        ("def run(a):\n    return a", False),
    ],
)
def test_a_handler_that_returns_a_value_looks_like_a_fallback(text: str, fallback: bool) -> None:
    assert audit(python(text)).fallback is fallback


def test_the_number_of_notes_is_bounded() -> None:
    assert len(audit(python("import sys\n" + "sys._getframe()\n" * 500)).notes) == MAX_NOTES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def run(:",
        "\x00\x01\x02",
        "\ufeffx = 1",
        "x = 1\n\ty = 2",
        "(" * 5000,
        "-" * 100_000 + "1",
        "x = " + "1 + " * 20_000 + "1",
        "a" + ".b" * 50_000,
        "\N{SNOWMAN}",
        '"unterminated',
        "/* never closed",
    ],
    ids=[
        "empty",
        "syntax",
        "binary",
        "bom",
        "indent",
        "brackets",
        "minus",
        "sum",
        "dots",
        "snowman",
        "string",
        "comment",
    ],
)
@pytest.mark.parametrize("make", [python, native])
def test_strange_source_is_no_finding_and_no_exception(make: object, text: str) -> None:
    found = make(text)  # type: ignore[operator]  # one of two functions
    assert audit(found).reasons == ()


@given(st.text(max_size=200))
def test_random_text_never_raises(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audit(python(text))
        audit(native(text))


def test_warnings_as_errors_hide_nothing_from_the_audit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert audit(python("import os\npattern = '\\d'\nos.read = None")).reasons


def test_a_source_without_files_has_no_findings() -> None:
    found = audit(KernelSource(surface=Surface.PYTHON, files=(), entry="mm", module="torch"))
    assert (found.reasons, found.notes, found.fallback) == ((), (), False)


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ("import numpy", ["numpy"]),
        ("import numpy.linalg as la, pandas", ["numpy", "pandas"]),
        ("def run(a):\n    from scipy import signal", ["scipy"]),
        ("from mpmath import fp", ["mpmath"]),
        ("import torch, math, hashlib", []),
        ("from .numpy import product", []),
        ("import numpydoc", []),
    ],
)
def test_a_package_that_could_do_the_work_is_noted(text: str, noted: list[str]) -> None:
    found = audit(python(text))
    assert found.reasons == ()
    assert [
        name for note in found.notes for name in ("numpy", "pandas", "scipy", "mpmath") if f" {name} " in note
    ] == noted
