"""Pinning and comparing: what a slower kernel, another device or a missing baseline does to a run, and what is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_klineage.cli.main import main
from pytest_klineage.records import from_json
from pytest_klineage.records.baseline import Comparison, ComparisonOutcome
from pytest_klineage.results.baselines import read_baseline

GEMM = """
#include "klineage.h"
extern "C" int run(const klineage_call *call) {
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const float *ap = (const float *)a.data, *bp = (const float *)b.data;
    for (int64_t i = 0; i < c.shape[0]; ++i)
        for (int64_t j = 0; j < c.shape[1]; ++j) {
            double sum = 0;
            for (volatile int again = 0; again < AGAIN; again = again + 1) {
                sum = 0;
                for (int64_t k = 0; k < a.shape[1]; ++k)
                    sum += (double)ap[i * a.stride[0] + k * a.stride[1]] * bp[k * b.stride[0] + j * b.stride[1]];
            }
            ((float *)c.data)[i * c.stride[0] + j * c.stride[1]] = (float)sum;
        }
    return 0;
}
"""
"""A matrix product that does its work AGAIN times over."""

GATE = '''
"""A gate that pretends: a kernel's first line is "// <reason code> <speedup>...", one for each judgement of it, the
last for all that follow; device and library are environment."""

import os

import pytest

import pytest_klineage.gate as gate
from pytest_klineage.records import Code, Interval, Machine, Reason, Timing, Verdict


def said(source, number=0):
    _, code, *speedups = source.files[0].text.partition("\\n")[0].split()
    return Code(code), float(speedups[min(number, len(speedups) - 1)]) if speedups else None


class PretendedGate:
    def __init__(self, platform, settings=None, progress=None):
        self.platform, self.judged = platform, {}

    def judge(self, case, source, *, reference_source=None, platforms=(), precision=None):
        assert (precision is not None) == (reference_source is not None), "only against the base it is sharper"
        key = (source.digest, reference_source is None)
        number = self.judged[key] = self.judged.get(key, -1) + 1
        code, speedup = said(source, number)
        if reference_source is not None:
            code, rival = said(reference_source)
            speedup = speedup / rival if rival else None
        timing = None
        if speedup:
            samples = (0.25, 0.5, 0.75)
            timing = Timing(
                policy="paired", reference_ms=0.5 * speedup, candidate_ms=0.5,
                speedup=Interval(speedup, speedup * 0.99, speedup * 1.01),
                reference_samples_ms=tuple(sample * speedup for sample in samples),
                candidate_samples_ms=samples, warmup=1, flush_bytes=0, statistic="pretended",
            )
        return Verdict(
            case=case, status=code.status, label=source.label, timing=timing, source_digest=source.digest,
            reasons=(Reason(code=code, message="pretended"),),
            reference={"torch": os.environ.get("PRETENDED_TORCH", "2.13")},
            machine=Machine(platform=self.platform, device=os.environ.get("PRETENDED_CPU", "Pretended CPU")),
        )

    def close(self):
        pass


PATCH = pytest.MonkeyPatch()


def pytest_configure(config):
    PATCH.setattr(gate, "Gate", PretendedGate)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    PATCH.undo()
'''
SUITE = """
from pytest_klineage import kernel_case

@kernel_case((8, 8, 8), "fp32", op="gemm", at_least=0.1)
def test_one(kernel_gate):
    kernel_gate("one.cpp")

@kernel_case((4, 4, 4), "fp32", op="gemm", at_least=0.1)
def test_two(kernel_gate):
    kernel_gate("two.cpp")
"""
FAIL = "--klineage-compare-fail=slower:3%"
TURNS = ("-p", "turns")
TURNING = '''
"""Runs a test that waits for a verdict again, as a run on a Ray cluster does."""

from _pytest.runner import runtestprotocol

from pytest_klineage.plugin.waiting import WAITING_ATTRIBUTE, renew


def pytest_runtest_protocol(item, nextitem):
    reports = runtestprotocol(item, log=False, nextitem=item.parent)
    if any(hasattr(report, WAITING_ATTRIBUTE) for report in reports):
        renew(item)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
'''


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two kernels, tested outside of GitHub."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "PRETENDED_TORCH", "PRETENDED_CPU"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(GATE)
    pytester.makepyfile(test_kernels=SUITE)
    write(pytester.path)
    return pytester.path


def write(folder: Path, one: str = "accepted.faster 2.0", two: str = "accepted.faster 3.0") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "one.cpp").write_text(f"// {one}\n")
    (folder / "two.cpp").write_text(f"// {two}\n")


def pinned(suite: Path) -> Path:
    return suite / "results" / "baselines" / "cpu" / "pretended-cpu" / "main.json"


def found_by(suite: Path) -> dict[str, Comparison]:
    """What the newest run found, by test."""
    path = max(suite.glob("results/runs/*/comparisons.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    found = [from_json(line, Comparison) for line in path.read_bytes().splitlines()]
    return {comparison.nodeid.partition("::")[2]: comparison for comparison in found}


def outcomes(suite: Path) -> dict[str, ComparisonOutcome]:
    return {name: comparison.outcome for name, comparison in found_by(suite).items()}


def test_a_run_is_pinned_and_the_next_one_is_as_before(
    suite: Path, pytester: pytest.Pytester, processes: tuple[str, ...]
) -> None:
    result = pytester.runpytest(*processes, "--klineage-save=main")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["pinned: results/baselines/cpu/pretended-cpu/main.json (2 kernels)"])
    assert [pin.nodeid for pin in read_baseline(pinned(suite)).pins] == [
        "test_kernels.py::test_one", "test_kernels.py::test_two",
    ]  # fmt: skip
    result = pytester.runpytest(*processes, "--klineage-compare=main", FAIL)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "klineage: compared with baseline 'main' (slower by more than 3 % fails)",
            "*= klineage: compared with baseline main =*",
            "2 same",
        ]
    )
    assert set(outcomes(suite).values()) == {ComparisonOutcome.SAME}


def test_a_slower_kernel_fails_its_own_test(suite: Path, pytester: pytest.Pytester, processes: tuple[str, ...]) -> None:
    pytester.runpytest("--klineage-save=main")
    write(suite, one="accepted.faster 1.8")
    result = pytester.runpytest(*processes, "--klineage-compare=main", FAIL, "--junitxml=report.xml")
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "kernel 'one' on gemm-8x8x8-fp32, compared with baseline 'main': slower",
            "  0.900x [[]0.900, 0.900] of the speed of the baseline 'main', all of it below 0.97 *; judged once more *",
            "  over the reference: 2.000x then, 1.800x now",
            "  next: *",
            "1 slower, 1 same",
            "FAILED test_kernels.py::test_one*",
        ]
    )
    assert outcomes(suite) == {"test_one": ComparisonOutcome.SLOWER, "test_two": ComparisonOutcome.SAME}
    assert "compared with baseline" in (suite / "report.xml").read_text()


@pytest.mark.parametrize("second", ["2.0", "2.2"])
def test_a_change_needs_the_second_judgement(
    suite: Path, pytester: pytest.Pytester, processes: tuple[str, ...], second: str
) -> None:
    pytester.runpytest("--klineage-save=main")
    write(suite, one=f"accepted.faster 1.8 {second}", two="accepted.faster 3.3 3.0")
    result = pytester.runpytest(*processes, "--klineage-compare=main", FAIL)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["2 unclear", "*one: unclear: 0.900x *, not confirmed; judged once more*", "*next: quieten *"]
    )
    assert set(outcomes(suite).values()) == {ComparisonOutcome.UNCLEAR}


IN_TWO_PHASES = """
import pytest
from pytest_klineage import kernel_case

@pytest.fixture
def judged_before(kernel_gate):
    kernel_gate("one.cpp")

@kernel_case((8, 8, 8), "fp32", op="gemm", at_least=0.1)
def test_one(judged_before, kernel_gate):
    kernel_gate("one.cpp")
"""


def test_a_kernel_judged_in_two_phases_has_two_comparisons(
    suite: Path, pytester: pytest.Pytester, processes: tuple[str, ...]
) -> None:
    """As fast in the fixture, slower in the test itself, which the first judgement's comparison must not hide."""
    pytester.makepyfile(test_kernels=IN_TWO_PHASES)
    pytester.runpytest("--klineage-save=main")
    write(suite, one="accepted.faster 2.0 1.0")
    result = pytester.runpytest(*processes, "--klineage-compare=main", FAIL)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["1 slower, 1 same"])


RUN_AGAIN = """
import pytest
from pytest_klineage import kernel_case
from pytest_klineage.errors import WaitsForVerdict

ATTEMPTS = []

@kernel_case((8, 8, 8), "fp32", op="gemm", at_least=0.1)
def test_one(kernel_gate):
    kernel_gate("one.cpp")
    ATTEMPTS.append(1)
    if len(ATTEMPTS) == 1:
        {ending}
"""
ENDINGS = [("assert False", ("--reruns=1",)), ('raise WaitsForVerdict("ray", "later", "one")', TURNS)]


@pytest.mark.parametrize(("ending", "options"), ENDINGS, ids=["rerun", "turn"])
def test_a_slower_kernel_fails_in_a_later_attempt(
    suite: Path, pytester: pytest.Pytester, ending: str, options: tuple[str, ...]
) -> None:
    """The second judgements that pinning and comparing ask for are those of the last attempt alone."""
    (suite / "turns.py").write_text(TURNING)
    pytester.syspathinsert()
    pytester.makepyfile(test_kernels=RUN_AGAIN.replace("{ending}", ending))
    pytester.runpytest(*options, "--klineage-save=main").assert_outcomes(passed=1)
    assert [(pin.number, pin.again is not None) for pin in read_baseline(pinned(suite)).pins] == [(0, True)]
    write(suite, one="accepted.faster 1.0")
    result = pytester.runpytest(*options, "--klineage-compare=main", FAIL)
    result.assert_outcomes(failed=1)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.SLOWER}


def test_a_kernel_that_breaks_when_judged_once_more_is_broken(suite: Path, pytester: pytest.Pytester) -> None:
    pytester.runpytest("--klineage-save=main")
    write(suite, one="accepted.faster 1.8 0")
    pytester.runpytest("--klineage-compare=main", FAIL).assert_outcomes(passed=1, failed=1)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.BROKEN, "test_two": ComparisonOutcome.SAME}


def test_a_change_must_hold_against_both_pinned_judgements(
    suite: Path, pytester: pytest.Pytester, processes: tuple[str, ...]
) -> None:
    write(suite, one="accepted.faster 2.0 1.8", two="accepted.faster 3.0 2.9")
    pytester.runpytest(*processes, "--klineage-save=main").assert_outcomes(passed=2)
    found = [(pin.timing.speedup.estimate, pin.again.speedup.estimate) for pin in read_baseline(pinned(suite)).pins
             if pin.again]  # fmt: skip
    assert found == [(2.0, 1.8), (3.0, 2.9)]
    write(suite, one="accepted.faster 1.8", two="accepted.faster 2.5")
    result = pytester.runpytest(*processes, "--klineage-compare=main", FAIL)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*one: unclear: 0.900x *, and 1.000x *of the second", "*judgement that was pinned: not the same"]
    )
    assert outcomes(suite) == {"test_one": ComparisonOutcome.UNCLEAR, "test_two": ComparisonOutcome.SLOWER}


def test_advice_fails_nothing(suite: Path, pytester: pytest.Pytester, processes: tuple[str, ...]) -> None:
    pytester.runpytest("--klineage-save=main")
    write(suite, one="accepted.faster 1.0", two="accepted.faster 4.0")
    result = pytester.runpytest(*processes, "--klineage-compare=main")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["1 slower, 1 faster", "*the baseline is outdated*"])


@pytest.mark.parametrize(("allowed", "failed"), [("slower:9%", 1), ("slower:12%", 0)])
def test_the_margin_is_the_users(suite: Path, pytester: pytest.Pytester, allowed: str, failed: int) -> None:
    pytester.runpytest("--klineage-save=main")
    write(suite, one="accepted.faster 1.8")
    result = pytester.runpytest("--klineage-compare=main", f"--klineage-compare-fail={allowed}")
    result.assert_outcomes(passed=2 - failed, failed=failed)


@pytest.mark.parametrize(
    ("name", "value", "outcome", "line"),
    [
        (
            "PRETENDED_CPU",
            "Other CPU",
            ComparisonOutcome.OTHER_DEVICE,
            "*pinned on Pretended CPU (cpu); this is Other CPU (cpu)*",
        ),
        ("PRETENDED_TORCH", "2.14", ComparisonOutcome.OTHER_REFERENCE, "*torch 2.13 then, 2.14 now*"),
    ],
)
def test_what_does_not_compare_is_refused(
    suite: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str, value: str,
    outcome: ComparisonOutcome, line: str,
) -> None:  # fmt: skip
    pytester.runpytest("--klineage-save=main")
    monkeypatch.setenv(name, value)
    pytester.runpytest("--klineage-compare=main").assert_outcomes(passed=2)
    result = pytester.runpytest("--klineage-compare=main", FAIL)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([line, "*--klineage-save=main*"])
    assert set(outcomes(suite).values()) == {outcome}


def test_a_missing_baseline_stops_a_gate_and_not_an_advisory_run(suite: Path, pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--klineage-compare=main", FAIL)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*there is no baseline 'main' in *results/baselines*pytest --klineage-save=main*"])
    result = pytester.runpytest("--klineage-compare=main")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["2 no baseline", "*pytest --klineage-save=main*"])


def test_a_new_kernel_passes_and_a_broken_one_fails(suite: Path, pytester: pytest.Pytester) -> None:
    pytester.runpytest("--klineage-save=main", "-k", "test_one")
    write(suite, one="wrong_value.mismatch")
    result = pytester.runpytest("--klineage-compare=main", FAIL, "--klineage-mode=record")
    result.assert_outcomes(passed=1, failed=1)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.BROKEN, "test_two": ComparisonOutcome.NEW}


def test_only_what_may_be_pinned_is(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite, one="wrong_value.mismatch")
    result = pytester.runpytest("--klineage-save=main")
    result.stdout.fnmatch_lines(["pinned: *(1 kernel)", "not pinned: gemm-8x8x8-fp32 one is wrong_value.mismatch"])
    write(suite, one="wrong_value.mismatch", two="accepted.faster 1.0")
    result = pytester.runpytest("--klineage-save=main", "--klineage-compare=main", FAIL)
    result.stdout.fnmatch_lines(["not pinned: gemm-4x4x4-fp32 two fails its comparison"])
    result.stdout.fnmatch_lines(["klineage: nothing was pinned as 'main'*"])
    assert read_baseline(pinned(suite)).pins[0].timing.speedup.estimate == 3.0


def test_a_run_that_could_not_pin_is_no_success(suite: Path, pytester: pytest.Pytester) -> None:
    (suite / "results").mkdir()
    (suite / "results" / "baselines").write_text("a file")
    result = pytester.runpytest("--klineage-save=main")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["klineage: the baseline *main.json cannot be written*"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([FAIL], "needs --klineage-compare=NAME or --klineage-base=DIR"),
        (["--klineage-compare=main", "--klineage-compare-fail=3%"], "is not of the form slower:3%"),
        (["--klineage-save=../up"], "a baseline is called by"),
        (["--klineage-compare=a/b"], "a baseline is called by"),
        (["--klineage-save=main", "--klineage-stage=compile"], "takes none"),
        (["--klineage-base=nowhere"], "is not a folder"),
        (["--klineage-base=."], "is the tree under test"),
    ],
)
def test_what_makes_no_sense_stops_before_collection(
    suite: Path, pytester: pytest.Pytester, arguments: list[str], said: str
) -> None:
    result = pytester.runpytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in result.stderr.str()


def test_a_damaged_baseline_stops_before_collection(suite: Path, pytester: pytest.Pytester) -> None:
    pytester.runpytest("--klineage-save=main")
    pinned(suite).write_text(pinned(suite).read_text()[:200])
    result = pytester.runpytest("--klineage-compare=main")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*main.json: not a valid Baseline*--klineage-save=main*"])


# --- against a base ---------------------------------------------------------------------------------------------------


def test_changed_kernels_are_judged_against_the_base(
    suite: Path, pytester: pytest.Pytester, processes: tuple[str, ...]
) -> None:
    write(suite / "base", one="accepted.faster 2.5")
    result = pytester.runpytest(*processes, "--klineage-base=base", FAIL, "test_kernels.py")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "klineage: compared with the base (slower by more than 3 % fails)",
            "kernel 'one' on gemm-8x8x8-fp32, compared with the base: slower",
            "  0.800x [[]0.800, 0.800] of the speed of the base, all of it below 0.97 to 1.03 (99.5 % interval, 2 *",
        ]
    )
    assert outcomes(suite) == {"test_one": ComparisonOutcome.SLOWER, "test_two": ComparisonOutcome.UNCHANGED}
    result.stdout.fnmatch_lines(["geomean * over 2 of 2 scored"])


def judgements(suite: Path) -> dict[str, int]:
    """How often the newest run judged each kernel against its base."""
    return {name: len(one.more) + (one.verdict is not None) for name, one in found_by(suite).items()}


def test_a_change_against_the_base_needs_two_judgements(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite / "base")
    write(suite, one="accepted.faster 1.0 2.0", two="accepted.faster 1.0 1.1")
    result = pytester.runpytest("--klineage-base=base", FAIL, "test_kernels.py")
    result.assert_outcomes(passed=1, failed=1)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.UNCLEAR, "test_two": ComparisonOutcome.SLOWER}
    assert judgements(suite) == {"test_one": 3, "test_two": 2}
    result.stdout.fnmatch_lines(["*one: unclear: * reaching over 0.97 *", "*3 judgements: 0.500x, 1.000x, 1.000x*"])


def test_an_equal_kernel_is_judged_once_against_the_base(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite / "base", one="accepted.faster 2.01", two="inconclusive.busy_machine 3.0")
    write(suite, two="accepted.faster 3.1")
    pytester.runpytest("--klineage-base=base", FAIL, "test_kernels.py").assert_outcomes(passed=2)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.SAME, "test_two": ComparisonOutcome.UNCLEAR}
    assert judgements(suite) == {"test_one": 1, "test_two": 3}


def test_a_faster_kernel_a_new_one_and_a_base_that_is_broken(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite / "base", one="accepted.faster 1.0", two="build_error.compile")
    pytester.runpytest("--klineage-base=base", FAIL, "test_kernels.py").assert_outcomes(passed=2)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.FASTER, "test_two": ComparisonOutcome.BASE_FAILED}
    (suite / "base" / "one.cpp").unlink()
    pytester.runpytest("--klineage-base=base", FAIL, "test_kernels.py").assert_outcomes(passed=2)
    assert outcomes(suite)["test_one"] is ComparisonOutcome.NEW


def test_a_test_that_names_another_kernel_is_said(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite / "base", one="accepted.faster 4.0", two="accepted.faster 1.0")
    (suite / "base" / "test_kernels.py").write_text(SUITE.replace('"two.cpp"', '"none.cpp"'))
    pytester.makepyfile(test_kernels=SUITE.replace('"one.cpp"', '"two.cpp"'))
    result = pytester.runpytest("--klineage-base=base", FAIL, "test_kernels.py")
    result.assert_outcomes(passed=1, failed=1)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.SLOWER, "test_two": ComparisonOutcome.FASTER}
    said = found_by(suite)
    assert said["test_one"].message.endswith("; compared with one.cpp, which the base's test names")
    assert said["test_two"].message.endswith("; the test has changed: in the base it does not name this file")


def test_an_old_file_in_a_changed_test_is_not_unchanged(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite / "base")
    (suite / "base" / "test_kernels.py").write_text(SUITE.replace('"two.cpp"', '"none.cpp"'))
    pytester.runpytest("--klineage-base=base", FAIL, "test_kernels.py").assert_outcomes(passed=2)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.UNCHANGED, "test_two": ComparisonOutcome.NO_SOURCE}


def test_a_link_in_the_place_of_a_kernel_is_said(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite / "base", one="accepted.faster 4.0")
    (suite / "one.cpp").unlink()
    (suite / "one.cpp").symlink_to("two.cpp")
    pytester.runpytest("--klineage-base=base", "-k", "test_one", "test_kernels.py")
    assert outcomes(suite) == {"test_one": ComparisonOutcome.SLOWER}
    assert found_by(suite)["test_one"].message.endswith("; one.cpp is a link, which it is not in the base")


def test_a_kernel_that_is_wrong_is_not_judged_twice(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite / "base")
    write(suite, one="wrong_value.mismatch")
    pytester.runpytest("--klineage-base=base", FAIL, "test_kernels.py").assert_outcomes(passed=1, failed=1)
    assert outcomes(suite) == {"test_one": ComparisonOutcome.SKIPPED, "test_two": ComparisonOutcome.UNCHANGED}


def test_base_and_baseline_in_one_run(suite: Path, pytester: pytest.Pytester) -> None:
    pytester.runpytest("--klineage-save=main", "test_kernels.py")
    write(suite / "base")
    write(suite, one="accepted.faster 1.0")
    result = pytester.runpytest("--klineage-base=base", "--klineage-compare=main", FAIL, "test_kernels.py")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*compared with baseline 'main': slower", "*compared with the base: slower"])


def test_the_hook_is_for_everybody(suite: Path, pytester: pytest.Pytester) -> None:
    hook = "def pytest_klineage_judged(item, case, verdict):\n    print('JUDGED', item.name, case.id, verdict.status)\n"
    (suite / "conftest.py").write_text(f"{GATE}\n\n{hook}")
    result = pytester.runpytest("-s", "-k", "test_one")
    result.stdout.fnmatch_lines(["*JUDGED test_one gemm-8x8x8-fp32 accepted*"])


def test_the_real_gate_compares_with_a_baseline_and_with_a_base(
    kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of it depends on how busy this machine is; that both figures are taken does not."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    suite = """
    from pytest_klineage import kernel_case

    @kernel_case((48, 48, 48), "fp32", op="gemm", at_least=0.0001)
    def test_mine(kernel_gate):
        kernel_gate("good.cpp")
    """
    pytester.makepyfile(test_kernels=suite)
    (kernels / "base").mkdir()
    for path in (kernels / "base" / "good.cpp", kernels / "good.cpp"):
        path.write_text(GEMM.replace("AGAIN", "1"))
    pytester.runpytest(*quick, "--klineage-save=main", "test_kernels.py").assert_outcomes(passed=1)
    (kernels / "good.cpp").write_text(GEMM.replace("AGAIN", "10"))
    result = pytester.runpytest(*quick, "--klineage-base=base", "--klineage-compare=main", "test_kernels.py")
    result.assert_outcomes(passed=1)
    path = next(kernels.glob("results/runs/*/comparisons.jsonl"))
    against_main, against_base = (from_json(line, Comparison) for line in path.read_bytes().splitlines())
    assert (against_main.against, against_base.against) == ("main", "base")
    assert against_base.verdict is not None
    assert against_base.verdict.reference["label"] == "good (base)"
    assert against_base.outcome in (ComparisonOutcome.SLOWER, ComparisonOutcome.UNCLEAR)
    for comparison in (against_main, against_base):
        assert comparison.ratio is not None
        assert comparison.new is not None
        assert comparison.ratio.low <= comparison.ratio.estimate <= comparison.ratio.high


# --- for people -------------------------------------------------------------------------------------------------------


def test_a_summary_is_written(suite: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.runpytest("--klineage-save=main")
    write(suite, one="accepted.faster 1.8")
    pytester.runpytest("--klineage-compare=main", FAIL, "--klineage-summary=all.md")
    text = (suite / "all.md").read_text()
    assert text.startswith("## Kernels compared with baseline main\n\n**1 slower, 1 same**. Margin 3 %.")
    assert "| gemm-8x8x8-fp32 | one " in text
    assert "geomean" in text
    step = suite / "step.md"
    step.write_text("what was there\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    pytester.runpytest("--klineage-compare=main")
    assert step.read_text().startswith("what was there\n## Kernels compared")
    pytester.runpytest()
    assert step.read_text().count("## Kernels compared") == 1


def test_annotations_for_github(suite: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.runpytest("--klineage-save=main", "test_kernels.py")
    write(suite / "base", one="accepted.faster 2.5")
    write(suite, one="accepted.faster 1.8", two="wrong_value.mismatch")
    arguments = ("--klineage-compare=main", "--klineage-base=base", FAIL, "test_kernels.py")
    assert "::error" not in pytester.runpytest(*arguments).stdout.str()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(suite.parent))
    result = pytester.runpytest(*arguments)
    result.stdout.fnmatch_lines_random(
        [
            f"::error file={suite.name}/test_kernels.py,line=3,title=slower%3A gemm-8x8x8-fp32 one::0.900x *",
            f"::error file={suite.name}/one.cpp,line=1,title=slower%3A gemm-8x8x8-fp32 one::0.720x *",
            f"::error file={suite.name}/test_kernels.py,line=7,title=wrong_value.mismatch%3A *::*pretended",
            f"::error file={suite.name}/test_kernels.py,line=7,title=broken%3A gemm-4x4x4-fp32 two::*",
        ]
    )


# --- the command ------------------------------------------------------------------------------------------------------


def test_runs_are_compared_without_judging(
    suite: Path, pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.runpytest("--klineage-save=main", "--klineage-run=first")
    write(suite, one="accepted.faster 1.8")
    pytester.runpytest("--klineage-run=second")
    first, second = (str(next(suite.glob(f"results/runs/*-{name}"))) for name in ("first", "second"))
    capsys.readouterr()
    assert main(["compare", str(pinned(suite)), second]) == 0
    assert "1 slower, 1 same" in capsys.readouterr().out
    assert main(["compare", first, "latest", "--fail", "slower:3%"]) == 1
    assert "of the speed of the" in capsys.readouterr().out
    assert main(["compare", first, second, "--fail=slower:12%", "--markdown", "--output=out.md"]) == 0
    assert "**2 same**" in (suite / "out.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "no.json", "no"], "no.json is not there; --klineage-save=no makes it"),
        (["compare", "nowhere", "latest"], "nowhere is not there"),
        (["compare", "a", "b", "--fail=3%"], "is not of the form slower:3%"),
    ],
)
def test_a_command_line_that_is_not_valid(
    suite: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_comparisons_are_json_that_others_can_read(suite: Path, pytester: pytest.Pytester) -> None:
    write(suite / "base", one="accepted.faster 2.5")
    pytester.runpytest("--klineage-base=base", "test_kernels.py")
    lines = next(suite.glob("results/runs/*/comparisons.jsonl")).read_text().splitlines()
    first = next(item for item in map(json.loads, lines) if item["outcome"] == "slower")
    assert first["verdict"]["timing"]["candidate_samples_ms"] == [0.25, 0.5, 0.75]
    assert first["file"] == "one.cpp"
