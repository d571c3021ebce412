"""Threads are bound within the processors that the job has: by core with SMT, else by processor; and really are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_klineage.gate.host.threads import Binding, binding_here, binding_of, parse_list, siblings_of
from pytest_klineage.records import KernelSource, LibraryPolicy, Status, Verdict

SMT = {n: frozenset({n % 4, n % 4 + 4}) for n in range(8)}
"""Four cores with two threads each, numbered as Linux does: 0 and 4 are one core."""

NATIVE = """
static int calls = 0; static cpu_set_t pool; static int wanted = omp_get_max_threads();
int wrong = 0;
std::thread([&] {
    if (calls == 0) pthread_getaffinity_np(pthread_self(), sizeof pool, &pool);
}).join();
cpu_set_t seen; CPU_ZERO(&seen);
#pragma omp parallel num_threads(wanted) reduction(+ : wrong)
{
    cpu_set_t mine;
    pthread_getaffinity_np(pthread_self(), sizeof mine, &mine);
    if (calls > 0 && CPU_COUNT(&mine) != 1) wrong += 1;
    #pragma omp critical
    CPU_OR(&seen, &seen, &mine);
}
if (wrong || CPU_COUNT(&seen) < wanted || CPU_COUNT(&pool) < wanted) return 1;
++calls;
"""
"""Refuses unless every thread has one processor in all calls but the first, in which a pool may have them all."""

PYTHON = """
import os
calls = 0
def run(a, b):
    global calls
    mine, calls = len(os.sched_getaffinity(0)), calls + 1
    if mine != (1 if calls > 1 else ALL):
        raise RuntimeError(f"{mine} processors in call {calls}")
    return a @ b
"""


def test_places_are_processors_where_no_two_share_a_core() -> None:
    found = binding_of(3, [6, 1, 0], SMT)
    assert found == Binding(name="by thread", places=((0,), (1,), (6,)))
    assert found.environment == {"OMP_PROC_BIND": "close", "OMP_PLACES": "{0},{1},{6}"}


def test_places_are_cores_where_two_processors_share_one() -> None:
    found = binding_of(8, range(8), SMT)
    assert (found.name, found.places) == ("by core", ((0, 4), (1, 5), (2, 6), (3, 7)))
    assert found.processors == tuple(range(8))


def test_a_core_of_which_only_half_is_allowed_is_a_place_of_one() -> None:
    assert binding_of(3, [0, 4, 1], SMT).places == ((0, 4), (1,))


def test_fewer_threads_than_processors_are_not_bound() -> None:
    assert binding_of(7, range(8), SMT) == Binding()
    assert Binding().environment == {}


def test_here_it_is_within_the_affinity_of_this_process() -> None:
    allowed = os.sched_getaffinity(0)
    assert binding_here(len(allowed)).processors == tuple(sorted(allowed))


def test_lists_of_the_system_are_read(tmp_path: Path) -> None:
    assert parse_list("0-2,7\n") == frozenset({0, 1, 2, 7})
    folder = tmp_path / "cpu3" / "topology"
    folder.mkdir(parents=True)
    (folder / "thread_siblings_list").write_text("3,11\n")
    assert siblings_of(3, tmp_path) == frozenset({3, 11})
    assert siblings_of(4, tmp_path) == frozenset({4})


several = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: nothing to bind")


@several
def test_openmp_threads_are_bound_and_own_pools_are_not(
    judge: Callable[..., Verdict], cpp: Callable[..., KernelSource]
) -> None:
    source = cpp(before=NATIVE, flags=("-fopenmp",))
    text = "#include <omp.h>\n#include <pthread.h>\n#include <sched.h>\n#include <thread>\n" + source.files[0].text
    verdict = judge(with_text(source, text))
    assert verdict.status is Status.ACCEPTED, verdict.reasons
    assert verdict.timing is not None
    assert verdict.timing.binding in ("by core", "by thread")
    assert verdict.timing.threads == len(os.sched_getaffinity(0))


@several
def test_python_main_thread_is_bound_after_its_first_call(
    judge: Callable[..., Verdict], python: Callable[[str], KernelSource]
) -> None:
    if binding_here(len(os.sched_getaffinity(0))).name != "by thread":
        pytest.skip("a place has two processors here")
    verdict = judge(python(PYTHON.replace("ALL", str(len(os.sched_getaffinity(0))))), library=LibraryPolicy.ALLOW)
    assert verdict.status is Status.ACCEPTED, verdict.reasons


def with_text(source: KernelSource, text: str) -> KernelSource:
    """The same source with other text."""
    import msgspec

    return msgspec.structs.replace(source, files=(msgspec.structs.replace(source.files[0], text=text),))
