"""compute-sanitizer without a GPU: what its words mean, and how it is started, by a stand-in.

The stand-in takes the options of the real program, writes a log that was given to it, and runs what it is to watch or
not. The logs have the form of compute-sanitizer 2022 to 2025.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_klineage.errors import MissingDependency, UnknownName
from pytest_klineage.gate import GateSettings, judgement
from pytest_klineage.gate.settings import SANITIZERS
from pytest_klineage.gate.stages import sanitize as sanitizer
from pytest_klineage.gate.stages.sanitize import (
    CLEAN,
    Sanitized,
    SanitizerRun,
    cases_to_try,
    read_run,
    run_tool,
    sanitize,
)
from pytest_klineage.operators import make_case, operator, paper_case
from pytest_klineage.plugin import options
from pytest_klineage.records import Code, KernelCase, KernelSource, Reason, Status, Verdict
from pytest_klineage.records.messages import Job, KernelLoaded, LoadFailed
from pytest_klineage.report.advice import next_step

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at col_kernel(const unsigned int *, unsigned int *, float)+0x490 in /home/me/build-x/kernel.cu:34
=========     by thread (1,0,0) in block (0,0,0)
=========     Access at 0x7f71b9e01360 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f71b9e00a00 of size 2,400 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cudaLaunchKernel [0x83cb7] in kernel.so
=========         Host Frame: run in kernel.cu:68 [0xab50] in kernel.so
=========
========= Invalid __global__ read of size 4 bytes
=========     at col_kernel(const unsigned int *, unsigned int *, float)+0x490 in /home/me/build-x/kernel.cu:34
=========     by thread (2,0,0) in block (0,0,0)
=========
========= Error: process didn't terminate successfully
========= Target application returned an error
========= ERROR SUMMARY: 1,024 errors
========= ERROR SUMMARY: 924 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Warning: Maximum number of hazards reached. Environment variable NV_X can be used to increase this count.
=========
========= Error: Race reported between Write access at mirror(const __nv_bfloat16 *)+0xa0 in race.cu:6
=========     and Read access at mirror(const __nv_bfloat16 *)+0xd0 in race.cu:8 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 2 bytes
=========     at shift(__nv_bfloat16 *)+0x70 in shift.cu:4
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f1e03a00000
=========
========= ERROR SUMMARY: 32 errors
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at half(int *)+0xa0 in half.cu:61
=========     by thread (31,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= Target application returned an error
========= ERROR SUMMARY: 16 errors
"""
NOTHING = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
NO_HAZARD = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
UNTRACKED = """\
========= COMPUTE-SANITIZER
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching gemm and didn't track the launch.
=========
========= ERROR SUMMARY: 0 errors
"""
RETURNED = """\
========= COMPUTE-SANITIZER
========= Error: process didn't terminate successfully
========= Target application returned an error
========= ERROR SUMMARY: 0 errors
"""
UNINSTRUMENTED = """\
========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
========= Tracking kernels launched by child processes requires the --target-processes all option.
"""
DONE = KernelLoaded()
REFUSAL = LoadFailed(code=Code.RETURNED_ERROR, message="the kernel returned 1: 768 rows only")
STAND_IN = """\
#!{python}
import os, pathlib, subprocess, sys, time
arguments = sys.argv[1:]
place = arguments.index("--log-file")
watched = arguments[place + 2:]
pathlib.Path({record!r}).write_text("\\n".join([*arguments, os.environ.get("MARK", "")]))
status = subprocess.run(watched).returncode if {runs} else 0
pathlib.Path(arguments[place + 1]).write_text({log!r})
time.sleep({seconds})
print("the stand-in was here", flush=True)
sys.exit(status)
"""
MakeStandIn = Callable[..., str]


@pytest.fixture
def stand_in(tmp_path: Path) -> MakeStandIn:
    """Make a program that takes compute-sanitizer's options, and writes a given log."""

    def make(log: str, *, runs: bool = False, seconds: float = 0.0) -> str:
        program = tmp_path / "compute-sanitizer"
        text = STAND_IN.format(
            python=sys.executable, record=str(tmp_path / "record"), log=log, runs=runs, seconds=seconds
        )
        program.write_text(text)
        program.chmod(0o755)
        return str(program)

    return make


def gpu_job(case: KernelCase | None = None, surface: str = "cuda") -> Job:
    """A job as a judgement on a GPU has it, of a kernel that is nowhere."""
    case = case or paper_case("gemm", "gpu", "torch")
    return Job(surface=surface, artifact="/nowhere/kernel.so", entry="run", case=case, platform="sm90")


class TestReading:
    @pytest.mark.parametrize("log", [NOTHING, NO_HAZARD])
    def test_nothing_found_is_clean(self, log: str) -> None:
        assert read_run(log, DONE, 0, "").said == CLEAN

    def test_memcheck_reports_error_location_and_kernel(self) -> None:
        run = read_run(MEMCHECK, LoadFailed(code=Code.CUDA_ERROR, message="launch failed"), 1, "")
        assert run.count == 1024
        assert run.finding == (
            "Invalid __global__ read of size 4 bytes,"
            " at col_kernel(const unsigned int *, unsigned int *, float)+0x490 in kernel.cu:34,"
            " by thread (1,0,0) in block (0,0,0), Access at 0x7f71b9e01360 is out of bounds,"
            " and is 1 bytes after the nearest allocation at 0x7f71b9e00a00 of size 2,400 bytes"
        )

    @pytest.mark.parametrize(
        ("log", "words", "count"),
        [
            (RACECHECK, ("Error: Race reported", "race.cu:6", "race.cu:8 [508 hazards]"), 1),
            (RACECHECK.replace("Error: Race", "Warning: Race"), ("Warning: Race reported",), 1),
            (INITCHECK, ("Uninitialized __global__ memory read", "shift.cu:4"), 32),
            (SYNCCHECK, ("Barrier error detected", "half.cu:61"), 16),
        ],
        ids=["race", "warned", "init", "sync"],
    )
    def test_the_other_tools_are_read_as_well(self, log: str, words: tuple[str, ...], count: int) -> None:
        run = read_run(log, DONE, sanitizer.FOUND_STATUS, "")
        assert all(word in run.finding for word in words), run.finding
        assert run.count == count
        assert "backtrace" not in run.finding

    def test_errors_of_an_unknown_kind_are_findings(self) -> None:
        run = read_run(NOTHING.replace("0 errors", "3 errors"), DONE, sanitizer.FOUND_STATUS, "")
        assert (run.count, bool(run.finding)) == (3, True)

    def test_a_refusal_is_no_finding(self) -> None:
        run = read_run(RETURNED, REFUSAL, 1, "")
        assert (run.finding, run.refused) == ("", REFUSAL.message)
        assert run.said == "not run: the kernel returned 1: 768 rows only"

    @pytest.mark.parametrize(
        ("log", "answer", "status", "words"),
        [
            (UNTRACKED, DONE, 0, "didn't track the launch"),
            (UNINSTRUMENTED, DONE, 0, "before first instrumented API call"),
            (RETURNED, LoadFailed(code=Code.CUDA_ERROR, message="cuInit failed"), 1, "cuInit failed"),
            (NOTHING, None, 0, "last words"),
            (NOTHING, DONE, 7, "status 7"),
            ("", DONE, 0, "last words"),
        ],
        ids=["untracked", "uninstrumented", "failed", "unanswered", "status", "silent"],
    )
    def test_what_came_to_no_end_is_never_clean(
        self, log: str, answer: KernelLoaded | LoadFailed | None, status: int, words: str
    ) -> None:
        run = read_run(log, answer, status, "its last words\n")
        assert run.finding == ""
        assert run.said.startswith("not finished: ")
        assert words in run.said

    def test_words_are_bounded_and_harmless(self) -> None:
        log = MEMCHECK.replace("col_kernel", "k\x1b[31m" + "x" * 5000)
        finding = read_run(log, DONE, 1, "").finding
        assert len(finding) == sanitizer.SAID_LIMIT + len("...")
        assert "\x1b" not in finding
        assert "\n" not in finding


class TestShapes:
    def test_the_small_shape_comes_first(self) -> None:
        case = make_case("fmha", (8, 64, 2048, 128), "bf16", "torch", causal=True, also_shapes=[(1, 1, 64, 128)])
        small, own = cases_to_try(case)
        assert small.id == "fmha-1x2x256x128-bf16-causal"
        assert own.id == case.id
        assert small.also_shapes == own.also_shapes == ()

    def test_a_case_that_is_smaller_stays_as_it_is(self) -> None:
        (only,) = cases_to_try(make_case("gemm", (64, 64, 64), "bf16", "torch"))
        assert only.shape == {"M": 64, "N": 64, "K": 64}

    def test_an_operator_without_a_small_shape_keeps_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = paper_case("gemm", "gpu", "torch")
        monkeypatch.setattr(type(operator("gemm")), "small", {})
        assert cases_to_try(case) == (case,)


class TestStarting:
    def test_the_options_are_those_of_the_tool(self, stand_in: MakeStandIn, tmp_path: Path) -> None:
        run = run_tool(stand_in(NOTHING), "racecheck", gpu_job(), {"MARK": "of the place"})
        given = (tmp_path / "record").read_text().splitlines()
        assert given[:2] == ["--tool", "racecheck"]
        assert given[given.index("--error-exitcode") + 1] == str(sanitizer.FOUND_STATUS)
        assert given[given.index("-m") + 1] == "pytest_klineage.worker.sanitized"
        assert given[-1] == "of the place"
        assert run.said.startswith("not finished"), "there was no answer, for nothing was run"
        assert "the stand-in was here" in run.said

    def test_a_kernel_that_cannot_be_loaded_answers_so(self, stand_in: MakeStandIn) -> None:
        job = gpu_job(make_case("gemm", (8, 8, 8), "bf16", "torch"))
        run = run_tool(stand_in(RETURNED, runs=True), "memcheck", job, {})
        assert run.finding == ""
        assert run.unfinished
        assert "ended with status" not in run.unfinished, "the process has answered"

    def test_a_finding_counts_whatever_the_process_says(self, stand_in: MakeStandIn) -> None:
        assert "Race reported" in run_tool(stand_in(RACECHECK), "racecheck", gpu_job(), {}).finding

    def test_a_tool_that_does_not_end_is_ended(self, stand_in: MakeStandIn) -> None:
        started = time.monotonic()
        run = run_tool(stand_in(NOTHING, seconds=60), "memcheck", gpu_job(), {}, limit_s=1.0)
        assert run.said == "not finished: ended after 1 s"
        assert time.monotonic() - started < 20

    def test_the_program_is_found_on_the_path(
        self, stand_in: MakeStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        program = stand_in(NOTHING)
        assert sanitizer.find_sanitizer() == program

    def test_the_program_is_found_beside_nvcc(
        self, stand_in: MakeStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = stand_in(NOTHING)
        monkeypatch.setattr(sanitizer, "find_tool", lambda name: None)
        monkeypatch.setattr(sanitizer, "find_nvcc", lambda: str(tmp_path / "nvcc"))
        assert sanitizer.find_sanitizer() == program

    def test_without_the_program_the_message_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sanitizer, "find_tool", lambda name: None)
        monkeypatch.setattr(sanitizer, "find_nvcc", lambda: "/nowhere/bin/nvcc")
        with pytest.raises(MissingDependency, match=r"compute-sanitizer.*PATH"):
            sanitize(gpu_job(), ("memcheck",), environment={}, report=lambda tool, number: None)


class TestTools:
    """What several runs come to; the runs themselves are made up."""

    @pytest.fixture
    def runs(self, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], SanitizerRun]:
        """By tool and case: what a run comes to; clean where nothing is said."""
        results: dict[tuple[str, str], SanitizerRun] = {}

        def run(program: str, tool: str, job: Job, environment: dict[str, str]) -> SanitizerRun:
            assert job.case is not None
            return results.get((tool, job.case.id), SanitizerRun())

        monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: "compute-sanitizer")
        monkeypatch.setattr(sanitizer, "run_tool", run)
        return results

    def all_tools(self) -> tuple[Sanitized, list[tuple[str, int]]]:
        heard: list[tuple[str, int]] = []
        found = sanitize(gpu_job(), SANITIZERS, environment={}, report=lambda *step: heard.append(step))
        return found, heard

    def test_all_are_run_and_reported(self, runs: dict[tuple[str, str], SanitizerRun]) -> None:
        found, heard = self.all_tools()
        assert heard == list(zip(SANITIZERS, range(4), strict=True))
        assert found == Sanitized(by_tool=dict.fromkeys(SANITIZERS, CLEAN))

    def test_every_finding_is_a_reason(self, runs: dict[tuple[str, str], SanitizerRun]) -> None:
        for tool in ("racecheck", "synccheck"):
            runs[tool, "gemm-512x512x512-bf16"] = SanitizerRun(finding=f"{tool} found it", count=3)
        found, _heard = self.all_tools()
        first, second = found.reasons
        assert first.message == "racecheck at gemm-512x512x512-bf16: racecheck found it (3 in all)"
        assert (second.code, second.evidence["tool"]) == (Code.SANITIZER, "synccheck")
        assert found.by_tool["memcheck"] == found.by_tool["initcheck"] == CLEAN

    def test_a_refusal_leads_to_the_cases_own_shape(self, runs: dict[tuple[str, str], SanitizerRun]) -> None:
        runs["memcheck", "gemm-512x512x512-bf16"] = SanitizerRun(refused="4096 only")
        runs["initcheck", "gemm-512x512x512-bf16"] = SanitizerRun(finding="not to be looked at again")
        runs["synccheck", "gemm-4096x4096x4096-bf16"] = SanitizerRun(finding="found at its own")
        found, _heard = self.all_tools()
        assert [reason.evidence["case"] for reason in found.reasons] == ["gemm-4096x4096x4096-bf16"]
        assert found.by_tool["initcheck"] == CLEAN
        assert any("4096 only" in note for note in found.notes)

    def test_what_has_no_result_is_a_note(self, runs: dict[tuple[str, str], SanitizerRun]) -> None:
        runs["racecheck", "gemm-512x512x512-bf16"] = SanitizerRun(unfinished="ended after 120 s")
        found, _heard = self.all_tools()
        assert found.reasons == ()
        assert found.by_tool["racecheck"] == "not finished: ended after 120 s"
        assert found.notes == ("racecheck not finished: ended after 120 s",)

    @pytest.mark.parametrize("surface", ["triton", "tilelang", "python"])
    def test_other_surfaces_are_noted(self, surface: str) -> None:
        found = sanitize(gpu_job(surface=surface), SANITIZERS, environment={}, report=lambda tool, number: None)
        assert found.by_tool == {}
        (note,) = found.notes
        assert surface in note


class TestJudgement:
    """On the CPU: where the stage stands in a judgement."""

    def test_on_a_cpu_it_is_a_note(
        self, judge: Callable[..., Verdict], cpp: Callable[..., KernelSource], change: Callable[..., None]
    ) -> None:
        change(sanitize=("memcheck",))
        verdict = judge(cpp())
        assert verdict.scored
        assert any("compute-sanitizer was not run" in note for note in verdict.notes)

    def test_a_finding_comes_before_the_clock(
        self,
        judge: Callable[..., Verdict],
        cpp: Callable[..., KernelSource],
        change: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        reason = Reason(code=Code.SANITIZER, message="racecheck at here: a race")
        found = Sanitized(by_tool={"racecheck": "a race"}, reasons=(reason,), notes=("noted",))
        monkeypatch.setattr(judgement, "sanitize", lambda *given, **named: found)
        assert judge(cpp()).scored, "it was not asked for"
        change(sanitize=("racecheck",))
        verdict = judge(cpp())
        assert (verdict.status, verdict.code) == (Status.RUNTIME_ERROR, Code.SANITIZER)
        assert verdict.sanitizer == {"racecheck": "a race"}
        assert "noted" in verdict.notes
        assert verdict.checks
        assert verdict.timing is None
        assert "KLINEAGE_REQUIRE" in next_step(verdict)


class TestSettings:
    def test_an_unknown_tool_is_refused_with_the_names(self) -> None:
        with pytest.raises(UnknownName) as caught:
            GateSettings(sanitize=("memcheck", "memchek"))
        assert all(name in str(caught.value) for name in SANITIZERS)

    def test_the_option_knows_the_same_tools(self) -> None:
        assert options.SANITIZERS == SANITIZERS
        assert options.sanitizers("memcheck,all") == "memcheck,all"

    @pytest.mark.parametrize(
        ("given", "tools"),
        [
            (("racecheck,memcheck", "memcheck"), ("memcheck", "racecheck")),
            (("synccheck,all",), SANITIZERS),
        ],
    )
    def test_the_option_becomes_the_setting(
        self, pytester: pytest.Pytester, given: tuple[str, ...], tools: tuple[str, ...]
    ) -> None:
        config = pytester.parseconfig(*(f"--klineage-sanitize={text}" for text in given))
        assert options.read_settings(config).gate == {"sanitize": tools}

    def test_an_unknown_tool_is_no_option(self, pytester: pytest.Pytester) -> None:
        result = pytester.runpytest("--klineage-sanitize=memchek")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*'memchek' is not one of: memcheck, racecheck, initcheck, synccheck, all*"])
