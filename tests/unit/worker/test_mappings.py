"""Whose code a worker has mapped: real processes for what is read, made-up lines for what follows from it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from pytest_klineage.records.messages import Job
from pytest_klineage.worker.mappings import MappedRange, foreign_code, mappings_of
from pytest_klineage.worker.sandbox import containment

NATIVE = Job(surface="cpp", artifact="/cache/cpp/1/kernel.so", workdir="/tmp/private", own_files_only=True)
BEFORE = [MappedRange("/usr/lib/libm.so.6", 0x1000, 0x2000, True), MappedRange("[vdso]", 0x9000, 0xA000, True)]


def code(path: str, start: int = 0x5000, size: int = 0x2000) -> MappedRange:
    return MappedRange(path, start, start + size, True)


def test_a_process_shows_its_files_and_its_nameless_code() -> None:
    with mmap.mmap(-1, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        found = mappings_of(os.getpid())
        here = [one for one in found if one.start <= address < one.end]
    assert [(one.path, one.executable) for one in here] in ([("", True)], [("/dev/zero (deleted)", True)])
    assert any(one.executable and Path(one.path).name.startswith(("libc.so", "libc-", "ld-musl")) for one in found)


def test_a_process_that_is_gone_has_mapped_nothing() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert mappings_of(child) == []


@pytest.mark.parametrize(
    "path",
    [
        "/cache/cpp/1/kernel.so", "/usr/lib/libgomp.so.1.0.0", "/opt/gcc/lib64/libstdc++.so.6.0.33",
        "/usr/lib/libmvec.so.1", "/usr/lib/libgcc_s.so.1",
    ],
)  # fmt: skip
def test_the_artifact_and_the_runtime_are_its_own(path: str) -> None:
    assert foreign_code([*BEFORE, code(path)], BEFORE, NATIVE) == ((), 0)


@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/libopenblas.so.0", "/usr/lib/libgfortran.so.5", "/usr/lib/libanything.so", "/tmp/private/notes.txt",
        "/tmp/private/libm.so.6", "/memfd:libc.so.6 (deleted)", "/cache/cpp/2/kernel.so",
    ],
)  # fmt: skip
def test_any_other_code_is_a_librarys(path: str) -> None:
    assert foreign_code([*BEFORE, code(path)], BEFORE, NATIVE).libraries == (Path(path).name,)


def test_what_is_no_code_is_no_library() -> None:
    data = MappedRange("/tmp/private/table", 0x5000, 0x6000, False)
    assert foreign_code([*BEFORE, data], BEFORE, NATIVE) == ((), 0)


def test_code_over_a_file_of_the_template_is_seen() -> None:
    over = [MappedRange("", 0x1000, 0x2000, True), BEFORE[1]]
    assert foreign_code(over, BEFORE, unconfined(NATIVE)).libraries == ("4 KiB of code that no file holds",)


def test_code_without_a_file_counts_where_libraries_can_be_read() -> None:
    now = [*BEFORE, code(""), code("[stack]", 0x10000, 0x1000)]
    narrow = foreign_code(now, BEFORE, NATIVE)
    if containment.landlock_abi():
        assert narrow == ((), 0x3000)
    else:
        assert narrow.libraries == ("12 KiB of code that no file holds",)
    assert foreign_code(now, BEFORE, unconfined(NATIVE)) == (("12 KiB of code that no file holds",), 0)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("/usr/lib/x86_64-linux-gnu/libsqlite3.so.0.8.6", True),
        ("/env/lib/python3.12/lib-dynload/_sqlite3.abi3.so", True),
        ("/env/lib/python3.12/lib-dynload/_tkinter.cpython-312-x86_64-linux-gnu.so", True),
        ("/env/lib/python3.12/site-packages/numexpr/interpreter.cpython-312-x86_64-linux-gnu.so", True),
        ("/env/lib/python3.12/site-packages/pandas/_libs/algos.so", True), ("/env/lib/libgmp.so.10", True),
        ("/env/lib/python3.12/lib-dynload/_decimal.cpython-312-x86_64-linux-gnu.so", False),
        ("/env/lib/python3.12/site-packages/llvmlite/binding/libllvmlite.so", False),
        ("/env/lib/python3.12/site-packages/numba/np/ufunc/omppool.cpython-312-x86_64-linux-gnu.so", False),
        ("/usr/lib/python3/dist-packages/numpy/random/_pcg64.cpython-312-x86_64-linux-gnu.so", False),
        ("/env/lib/python3.12/site-packages/_cffi_backend.cpython-312-x86_64-linux-gnu.so", False),
        ("/env/lib/libtbb.so.12.11", False), ("/usr/lib/libcrypto.so.3", False), ("/usr/lib/libLLVM-15.so.1", False),
        ("/usr/lib/libffi.so.8.1.2", False), ("/usr/lib/libgomp.so.1", False), ("/env/lib/libsvml.so", False),
    ],
)  # fmt: skip
def test_a_python_kernel_may_load_what_compiles_it(path: str, counts: bool) -> None:
    job = Job(surface="python", workdir="/tmp/private")
    names = (Path(path).name,) if counts else ()
    assert foreign_code([*BEFORE, code(path)], BEFORE, job).libraries == names
    assert foreign_code([*BEFORE, code(path)], [*BEFORE, code(path)], job) == ((), 0)
    assert foreign_code([*BEFORE, code(path)._replace(executable=False)], BEFORE, job) == ((), 0)


def test_a_kernel_of_a_package_is_held_to_names_alone() -> None:
    job = Job(surface="python", module="package.kernels", workdir="/tmp/private")
    now = [*BEFORE, code(""), code("/usr/lib/libanything.so"), code("/usr/lib/libopenblas.so.0", 0x20000)]
    assert foreign_code(now, BEFORE, job) == (("libopenblas.so.0",), 0)
    assert foreign_code([code("/tmp/private/x.so")], [], job).libraries == ("x.so",)
    stubs = Job(surface="triton", workdir="/tmp/private", allow_processes=True)
    assert foreign_code([code("/tmp/private/x.so")], [], stubs).libraries == ()


def test_the_templates_own_copies_of_code_are_no_library() -> None:
    job = Job(surface="python", workdir="/tmp/private")
    ours = MappedRange("/memfd:klineage-code (deleted)", 0x1000, 0x2000, True, "7")
    moved = ours._replace(start=0x50000, end=0x51000)
    assert foreign_code([moved], [ours], job) == ((), 0)
    assert foreign_code([moved._replace(inode="8")], [ours], job).libraries == ("memfd:klineage-code (deleted)",)
    assert foreign_code([code("/tmp/private/x.so")._replace(inode="7")], [ours], job).libraries == ("x.so",)


@pytest.mark.parametrize(
    ("library", "counts"),
    [
        ("libscipy_openblas-5f890258.so", False), ("libtorchaudio.abi3.so", False), ("libtorch_cuda_linalg.so", True),
        ("libcublasLt.so.13", True), ("libcudnn_ops.so.9", True),
    ],
)  # fmt: skip
def test_on_a_gpu_a_package_may_load_what_is_for_cpus(library: str, counts: bool) -> None:
    """Liger-Kernel imports transformers, which imports SciPy and more; a native kernel imports nothing."""
    now = [*BEFORE, code(f"/usr/lib/{library}")]
    job = Job(surface="triton", platform="sm90", workdir="/tmp/private", allow_processes=True)
    assert foreign_code(now, BEFORE, job).libraries == ((library,) if counts else ())
    native = Job(surface="cuda", platform="sm90", workdir="/tmp/private")
    assert foreign_code(now, BEFORE, native).libraries == (library,)


def unconfined(job: Job) -> Job:
    """The same job without a sandbox."""
    return Job(surface=job.surface, artifact=job.artifact, workdir=job.workdir, own_files_only=True, sandbox=False)
