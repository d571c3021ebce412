"""One tiny gemm through the whole gate, real processes and all: one test for every outcome."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from pytest_klineage import surfaces
from pytest_klineage.errors import HarnessError, UnknownName, UsageError, WorkerDied
from pytest_klineage.gate import DEFENCES, Gate, Progress, findings
from pytest_klineage.gate.host.cpu import cache_sizes, flush_size
from pytest_klineage.gate.timing.policy import LEAST_PAIRS
from pytest_klineage.operators import DEFAULT_DISTRIBUTION
from pytest_klineage.records import Code, KernelCase, KernelSource, LibraryPolicy, Status, Surface, Verdict
from pytest_klineage.surfaces.cpp import CppBackend

Judge = Callable[..., Verdict]
Cpp = Callable[..., KernelSource]
Python = Callable[[str], KernelSource]
Case = Callable[..., KernelCase]
Change = Callable[..., None]
nightly = pytest.mark.nightly
"""Of a parameter whose way through the gate another one takes in `.ci/run`."""


class GpuOnly(CppBackend):
    """A surface of a third party that has no CPU."""

    platforms: ClassVar[tuple[str, ...]] = ("sm90", "sm120")


@pytest.fixture(scope="session")
def accepted(gate: Gate, request: pytest.FixtureRequest) -> list[Verdict]:
    """Filled by the first test that gets it: the verdict about the right kernel."""
    return []


@pytest.fixture
def right(accepted: list[Verdict], judge: Judge, cpp: Cpp) -> Verdict:
    """The verdict about the right kernel, judged once."""
    if accepted:
        return accepted[0]
    verdict = judge(cpp())
    if verdict.status is Status.ACCEPTED:
        accepted.append(verdict)
    return verdict


class TestAccepted:
    def test_a_right_kernel_is_accepted(self, right: Verdict) -> None:
        assert right.status is Status.ACCEPTED
        assert right.ok
        assert right.scored

    def test_every_input_distribution_was_checked(self, right: Verdict) -> None:
        input_distributions = [check.input_distribution for check in right.checks]
        assert {"well_conditioned", "one_element_changed", "spikes", "shifted", "large_magnitude"} <= set(
            input_distributions
        )
        assert input_distributions.count("well_conditioned") == 2
        assert all(check.passed and 0 <= check.error <= check.bound for check in right.checks)

    def test_every_raw_sample_is_kept(self, right: Verdict) -> None:
        timing = right.timing
        assert timing is not None
        assert len(timing.reference_samples_ms) == len(timing.candidate_samples_ms) >= LEAST_PAIRS
        assert min(*timing.reference_samples_ms, *timing.candidate_samples_ms) > 0
        assert timing.policy == "paired"
        assert timing.stopped in ("precise", "time limit")
        assert timing.speedup.low <= timing.speedup.estimate <= timing.speedup.high

    def test_all_caches_are_emptied_unless_less_is_asked_for(
        self, right: Verdict, gate: Gate, change: Change, judge: Judge, cpp: Cpp
    ) -> None:
        assert right.timing is not None
        assert right.timing.flush_bytes == gate.settings.flush_bytes
        change(flush_bytes=None)
        emptied = judge(cpp()).timing
        assert emptied is not None
        assert emptied.flush_bytes == flush_size(3 * 64 * 64 * 4, cache_sizes())

    def test_machine_versions_and_reference_are_named(self, right: Verdict) -> None:
        assert right.machine is not None
        assert {"python", "torch"} <= set(right.machine.software)
        assert right.machine.platform == "cpu"
        assert right.reference["label"] == "torch"
        assert "torch" in right.reference
        assert right.judged_at.endswith("Z")

    def test_the_build_is_named_with_its_toolchain(self, right: Verdict, cpp: Cpp) -> None:
        assert right.build is not None
        assert right.build.command.startswith("g++ ")
        assert right.build.toolchain
        assert right.source_digest == cpp().digest
        assert (right.surface, right.label) == ("cpp", "unit")

    def test_the_containment_is_named(self, right: Verdict) -> None:
        assert "rlimits" in right.containment

    def test_a_second_judgement_takes_the_build_from_the_cache(self, right: Verdict, judge: Judge, cpp: Cpp) -> None:
        again = judge(cpp())
        assert again.status is Status.ACCEPTED
        assert again.build is not None
        assert again.build.cached
        assert again.build.digest == (right.build.digest if right.build else "")

    def test_a_kernel_against_itself(self, judge: Judge, cpp: Cpp) -> None:
        source = cpp(label="K*")
        verdict = judge(source, reference_source=source)
        assert verdict.status is Status.ACCEPTED
        assert verdict.reference["label"] == "K*"
        assert verdict.reference["digest"] == source.digest

    def test_a_python_kernel_where_the_framework_is_allowed(self, judge: Judge, python: Python) -> None:
        verdict = judge(python("def run(a, b):\n    return a @ b\n"), library=LibraryPolicy.ALLOW)
        assert verdict.status is Status.ACCEPTED

    def test_a_further_shape_is_checked_too(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(), also_shapes=[(16, 8, 24)])
        assert verdict.status is Status.ACCEPTED
        assert {"M": 16, "N": 8, "K": 24} in [check.shape for check in verdict.checks]

    def test_progress_is_reported_by_stage(
        self, gate: Gate, judge: Judge, cpp: Cpp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Progress] = []
        monkeypatch.setattr(gate._context, "_report", seen.append)
        judge(cpp())
        stages = list(dict.fromkeys(progress.stage for progress in seen))
        assert stages == ["build", "oracle", "start", "check", "time"]

    def test_a_kernel_slower_than_required_is_slower(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(), at_least=1e6)
        assert verdict.code is Code.SLOWER_THAN_REQUIRED
        assert not verdict.ok
        assert verdict.scored

    def test_a_caller_may_only_ask_for_a_sharper_interval(
        self, gate: Gate, case: Case, cpp: Cpp, change: Change
    ) -> None:
        for allowed, asked in ((0.3, 1e-5), (1e-5, 0.3)):
            change(precision=allowed)
            timing = gate.judge(case(), cpp(), precision=asked).timing
            assert timing is not None
            assert timing.stopped == "time limit"

    def test_a_further_policy_is_reported_beside_the_deciding_one(self, change: Change, judge: Judge, cpp: Cpp) -> None:
        change(also_policies=("paper",))
        verdict = judge(cpp())
        assert verdict.timing is not None
        assert verdict.timing.policy == "paired"
        assert [(timing.policy, len(timing.candidate_samples_ms)) for timing in verdict.other_timings] == [
            ("paper", 100)
        ]

    def test_a_policy_without_pairs_decides_as_well(
        self, change: Change, judge: Judge, cpp: Cpp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where its clock may leave something out, with another count of calls on either side."""
        change(policy="do_bench")
        monkeypatch.setattr(findings, "unheard_ms", lambda samples: 1e-6)
        timing = judge(cpp(before="usleep(30000);")).timing
        assert timing is not None
        assert timing.policy == "do_bench"
        assert len(timing.reference_samples_ms) > len(timing.candidate_samples_ms)


class TestWrong:
    @pytest.mark.parametrize(
        ("change", "code"),
        [
            ({"after": "for (int64_t i = 0; i < M * N; ++i) cp[i] *= 1.001f;"}, Code.MISMATCH),
            pytest.param({"after": "cp[M * N - 1] *= 1.001f;"}, Code.MISMATCH, marks=nightly),
            ({"before": "rows = M - 1;"}, Code.UNWRITTEN),
            pytest.param({"before": "rows = 0;"}, Code.UNWRITTEN, marks=nightly),
            ({"after": "cp[7] = INFINITY;"}, Code.NON_FINITE),
            ({"after": "ap[5] += 1.0f;"}, Code.INPUT_MUTATED),
            pytest.param({"after": "bp[K * N - 1] = 0.0f;"}, Code.INPUT_MUTATED, marks=nightly),
            ({"after": "((unsigned char *)cp)[M * N * 4] ^= 1;"}, Code.OUT_OF_BOUNDS),
            ({"after": "((unsigned char *)cp)[-1] ^= 1;"}, Code.OUT_OF_BOUNDS),
        ],
        ids=["all", "last", "tail", "nothing", "infinite", "input", "other-input", "behind", "before"],
    )
    def test_a_wrong_kernel_is_rejected_with_its_reason(
        self, change: dict[str, str], code: Code, judge: Judge, cpp: Cpp
    ) -> None:
        verdict = judge(cpp(**change))
        assert verdict.code is code
        assert verdict.status is Status.WRONG_VALUE
        assert verdict.timing is None

    def test_nan_is_never_right(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(after="cp[7] = NAN;"))
        assert verdict.status is Status.WRONG_VALUE
        assert not all(check.passed for check in verdict.checks)

    def test_a_kernel_wrong_only_at_a_further_shape_is_rejected(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(after="if (M == 16) cp[0] += 1.0f;"), also_shapes=[(16, 8, 24)])
        assert verdict.code is Code.MISMATCH
        wrong = {check.input_distribution: check.shape for check in verdict.checks if not check.passed}
        assert DEFAULT_DISTRIBUTION in wrong
        assert all(shape == {"M": 16, "N": 8, "K": 24} for shape in wrong.values())

    @pytest.mark.parametrize(
        ("result", "code"),
        [
            ("(a @ b)[:-1]", Code.OUTPUT_SHAPE),
            pytest.param("(a @ b).flatten()", Code.OUTPUT_SHAPE, marks=nightly),
            ("(a @ b).double()", Code.OUTPUT_DTYPE),
            pytest.param("(a @ b).half()", Code.OUTPUT_DTYPE, marks=nightly),
            ("(a @ b, a)", Code.OUTPUT_COUNT),
            pytest.param("(a @ b).tolist()", Code.OUTPUT_COUNT, marks=nightly),
            ("a.new_zeros(1).expand(64, 64)", Code.OUTPUT_STRIDES),
            pytest.param("(a @ b).to_sparse()", Code.FAKE_TENSOR, marks=nightly),
            ("'c'", Code.FAKE_TENSOR),
            ("a", Code.ALIASED_OUTPUT),
        ],
    )
    def test_an_output_of_another_kind_is_rejected_with_its_reason(
        self, result: str, code: Code, judge: Judge, python: Python
    ) -> None:
        verdict = judge(python(f"def run(a, b):\n    return {result}\n"), library=LibraryPolicy.ALLOW)
        assert code in [reason.code for reason in verdict.reasons]
        assert verdict.code.status is code.status


class TestBuild:
    def test_a_build_error_has_the_compilers_message(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(before="int tile = undeclared_tile;"))
        assert verdict.code is Code.COMPILE
        assert "undeclared_tile" in verdict.log
        assert "kernel.cpp" in verdict.log

    def test_an_invalid_python_file_is_a_build_error(self, judge: Judge, python: Python) -> None:
        verdict = judge(python("def run(a, b:\n    return a\n"))
        assert verdict.code is Code.COMPILE
        assert "kernel.py" in verdict.reasons[0].message

    def test_a_flag_that_is_not_allowed_is_named(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(flags=("-O3", "-lblas")))
        assert verdict.code is Code.FLAG_REFUSED
        assert "'-lblas'" in verdict.reasons[0].message

    @pytest.mark.parametrize("surface", ["cpp", "python"])
    def test_a_missing_entry_is_named(self, surface: str, judge: Judge, cpp: Cpp, python: Python) -> None:
        source = cpp() if surface == "cpp" else python("def run(a, b):\n    return a\n")
        verdict = judge(msgspec.structs.replace(source, entry="sgemm"))
        assert verdict.code is Code.ENTRY_MISSING
        assert "'sgemm'" in verdict.reasons[0].message

    def test_a_cache_that_cannot_be_written_is_named(
        self, change: Change, judge: Judge, cpp: Cpp, tmp_path: Path
    ) -> None:
        file = tmp_path / "file"
        file.write_text("")
        change(cache_dir=file)
        verdict = judge(cpp())
        assert verdict.code is Code.BUILD_IO
        assert str(file) in verdict.reasons[0].message

    def test_tampering_is_rejected_before_anything_is_built(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(before="syntax error; ptrace(0);"))
        assert verdict.code is Code.TAMPERING
        assert verdict.build is None


class TestRunning:
    def test_a_kernels_own_error_is_quoted(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(before='KLINEAGE_REQUIRE(call, M == 65, "only 65 rows");'))
        assert verdict.code is Code.RETURNED_ERROR
        assert "only 65 rows" in verdict.reasons[0].message

    def test_an_exception_is_reported_with_its_line(self, judge: Judge, python: Python) -> None:
        verdict = judge(python("def run(a, b):\n    raise ArithmeticError('tile too large')\n"))
        assert verdict.code is Code.EXCEPTION
        assert "ArithmeticError: tile too large" in verdict.reasons[0].message
        assert "line 2" in verdict.reasons[0].message

    def test_an_exception_at_import_is_reported(self, judge: Judge, python: Python) -> None:
        verdict = judge(python("import tile_language_of_tomorrow\n"))
        assert verdict.code is Code.EXCEPTION
        assert "tile_language_of_tomorrow" in verdict.reasons[0].message

    @pytest.mark.parametrize(
        ("crash", "name"),
        [("*(volatile int *)0 = 1;", "SIGSEGV"), ("__builtin_trap();", "SIGILL"), ("abort();", "SIGABRT")],
    )
    def test_a_crash_ends_the_kernel_alone(self, crash: str, name: str, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(before=crash))
        assert verdict.code is Code.CRASH
        assert name in verdict.reasons[0].message

    def test_an_exit_with_status_0_is_no_success(self, judge: Judge, cpp: Cpp) -> None:
        assert judge(cpp(after="_exit(0);")).code is Code.EARLY_EXIT

    def test_an_exit_with_another_status_is_reported(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(after="_exit(3);"))
        assert verdict.code is Code.EXITED
        assert verdict.reasons[0].evidence["exit_code"] == 3

    def test_a_hang_ends_at_its_limit(self, change: Change, judge: Judge, cpp: Cpp) -> None:
        change(run_timeout_s=1.0)
        verdict = judge(cpp(before="for (;;) usleep(1000);"))
        assert verdict.code is Code.TIMEOUT_RUN
        assert "1 s" in verdict.reasons[0].message

    def test_a_hang_at_import_ends_at_its_limit(self, change: Change, judge: Judge, python: Python) -> None:
        change(load_timeout_s=1.0)
        assert judge(python("import time\ntime.sleep(60)\n")).code is Code.TIMEOUT_LOAD

    def test_what_it_printed_is_kept_and_made_harmless(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(after=r'printf("\033[31mtile 3\n::error::x\n"); fflush(stdout); _exit(3);'))
        assert "tile 3" in verdict.log
        assert "\x1b" not in verdict.log
        assert not any(line.lstrip().startswith("::") for line in verdict.log.splitlines())

    def test_a_right_kernel_that_prints_without_end_is_ended(self, judge: Judge, cpp: Cpp) -> None:
        verdict = judge(cpp(after="char line[1000] = {}; for (int i = 0; i < 9000; ++i) write(1, line, 1000);"))
        assert verdict.code is Code.LOG_FLOOD
        assert len(verdict.log) < 10_000


class TestForgery:
    """A candidate shares its process with the code that answers; what it answers must not matter."""

    SEND = "import os, struct\ndef send(text):\n    os.write(3, struct.pack('<I', len(text)) + text)\n"

    @pytest.mark.parametrize(
        "code",
        [
            "accepted.faster",
            pytest.param("inconclusive.interval", marks=nightly),
            pytest.param("skipped.platform", marks=nightly),
            pytest.param("slower.than_required", marks=nightly),
        ],
    )
    def test_a_worker_cannot_name_its_own_verdict_at_import(self, code: str, judge: Judge, python: Python) -> None:
        text = self.SEND + f'send(b\'{{"type":"LoadFailed","code":"{code}","message":""}}\')\ndef run(a, b): pass\n'
        verdict = judge(python(text))
        assert verdict.code is Code.FORGED_REPLY

    @pytest.mark.parametrize("code", ["accepted.same", "skipped.not_scorable"])
    def test_a_worker_cannot_name_its_own_verdict_when_called(
        self, code: str, change: Change, judge: Judge, python: Python
    ) -> None:
        change(defences=DEFENCES - {"audit"})
        text = (
            "from pytest_klineage.records import Code\nfrom pytest_klineage.surfaces.base import SurfaceFailure\n"
            f"def run(a, b): raise SurfaceFailure(Code({code!r}), 'trust me')\n"
        )
        verdict = judge(python(text))
        assert verdict.code is Code.FORGED_REPLY

    @pytest.mark.parametrize(
        "frame",
        [
            pytest.param("b'rubbish'", marks=nightly),
            """b'{"type":"OutputsReady","nonce":1}'""",
            """b'{"type":"Returned","nonce":1,"x":' + b'[' * 20000 + b']' * 20000 + b'}'""",
            pytest.param("b'x' * 100000", marks=nightly),
        ],
        ids=["rubbish", "unasked", "deep", "long"],
    )
    def test_a_forged_answer_is_the_kernels_fault_not_ours(self, frame: str, judge: Judge, python: Python) -> None:
        verdict = judge(python(self.SEND + f"def run(a, b):\n    send({frame})\n    return a @ b\n"))
        assert verdict.code is Code.FORGED_REPLY

    def test_a_worker_that_exits_after_loading_is_detected(self, judge: Judge, python: Python) -> None:
        text = self.SEND + """send(b'{"type":"KernelLoaded"}')\nos._exit(0)\n"""
        assert judge(python(text)).code is Code.EARLY_EXIT

    def test_a_worker_that_leaves_after_a_wrong_answer_is_found_out(self, judge: Judge, python: Python) -> None:
        text = (
            "import os, threading, time\n"
            "def leave():\n    time.sleep(0.01)\n    os._exit(0)\n"
            "def run(a, b):\n    threading.Thread(target=leave).start()\n    return a\n"
        )
        assert judge(python(text)).status in (Status.CHEAT, Status.WRONG_VALUE)

    def test_a_call_that_took_no_time_is_not_believed(self, change: Change, judge: Judge, python: Python) -> None:
        change(defences=DEFENCES - {"audit"})
        text = (
            "import pytest_klineage.worker.host.calls as calls\n"
            "calls.CallLoop.run.__defaults__ = (lambda: 5,)\n"
            "def run(a, b):\n    return a @ b\n"
        )
        assert judge(python(text), library=LibraryPolicy.ALLOW).code is Code.CLOCK


class TestWrapper:
    def test_a_call_of_the_framework_is_no_kernel(self, judge: Judge, python: Python) -> None:
        verdict = judge(python("def run(a, b):\n    return a @ b\n"))
        assert verdict.code is Code.WRAPPER_FRAMEWORK
        assert verdict.timing is None

    def test_a_fallback_to_the_framework_is_called_so(self, judge: Judge, python: Python) -> None:
        text = "def run(a, b):\n    try:\n        return mine(a, b)\n    except NameError:\n        return a @ b\n"
        assert judge(python(text)).code is Code.WRAPPER_FALLBACK

    def test_where_wrappers_are_labelled_the_note_says_so(self, judge: Judge, python: Python) -> None:
        verdict = judge(python("def run(a, b):\n    return a @ b\n"), library=LibraryPolicy.LABEL)
        assert verdict.status is Status.ACCEPTED
        assert any(note.startswith("wrapper.framework") for note in verdict.notes)

    def test_a_caught_refusal_is_noted_where_it_is_labelled(self, judge: Judge, python: Python) -> None:
        text = (
            "import torch\ndef run(a, b):\n    try:\n        return torch.mm(a, b)\n    except RuntimeError:\n"
            "        columns = list(zip(*b.tolist()))\n"
            "        return torch.tensor([[sum(x * y for x, y in zip(r, c)) for c in columns] for r in a.tolist()])\n"
        )
        verdict = judge(python(text), library=LibraryPolicy.LABEL)
        assert verdict.status is Status.ACCEPTED
        assert any(note.startswith("wrapper.fallback") and "aten::mm" in note for note in verdict.notes)


class TestMisuse:
    def test_a_surface_that_does_not_run_here_is_skipped(
        self, judge: Judge, cpp: Cpp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(surfaces.SURFACES, "cuda", GpuOnly())
        verdict = judge(msgspec.structs.replace(cpp(), surface=Surface.CUDA))
        assert verdict.code is Code.SKIPPED_PLATFORM
        assert "sm90" in verdict.reasons[0].message
        assert not verdict.ok

    def test_an_unknown_reference_is_misuse(self, gate: Gate, case: Case, cpp: Cpp) -> None:
        with pytest.raises(UnknownName, match="reference"):
            gate.judge(msgspec.structs.replace(case(), reference="numpy"), cpp())

    def test_an_operator_that_the_reference_has_not_is_misuse(self, gate: Gate, case: Case, cpp: Cpp) -> None:
        with pytest.raises(UsageError, match="unknown operator 'fft'"):
            gate.judge(msgspec.structs.replace(case(), operator="fft"), cpp())

    def test_an_unknown_platform_is_misuse(self) -> None:
        with pytest.raises(UnknownName):
            Gate("tpu")


class TestOurFaults:
    """In this order: after a fault, and after misuse that only the oracle sees, all processes are started afresh."""

    def test_nothing_of_a_judgement_is_left_behind(self, judge: Judge, cpp: Cpp) -> None:
        judge(cpp())
        before = len(os.listdir("/proc/self/fd"))
        judge(cpp(before="__builtin_trap();"))
        judge(cpp())
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_a_gate_recovers_from_the_death_of_its_oracle(self, gate: Gate, case: Case, judge: Judge, cpp: Cpp) -> None:
        process = gate._context.processes.oracle().process
        process.kill()
        process.wait()
        with pytest.raises(WorkerDied, match="oracle"):
            gate.judge(case(), cpp())
        assert judge(cpp()).status is Status.ACCEPTED

    def test_a_reference_that_fails_is_no_verdict_about_the_kernel(self, gate: Gate, case: Case, cpp: Cpp) -> None:
        broken = cpp(before='KLINEAGE_REQUIRE(call, M == 65, "only 65 rows");')
        with pytest.raises(HarnessError, match="only 65 rows"):
            gate.judge(case(), cpp(), reference_source=broken)

    def test_an_operator_that_the_oracle_does_not_know_is_misuse(self, gate: Gate, case: Case, cpp: Cpp) -> None:
        with pytest.raises(UsageError, match="unknown operator 'fft'"):
            gate.judge(msgspec.structs.replace(case(), operator="fft"), cpp(), reference_source=cpp())

    def test_what_this_machine_lacks_makes_the_verdict_skipped(
        self, judge: Judge, cpp: Cpp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
        verdict = judge(cpp(before="int new_build;"))
        assert verdict.code is Code.SKIPPED_DEPENDENCY
        assert "C++ compiler" in verdict.reasons[0].message
