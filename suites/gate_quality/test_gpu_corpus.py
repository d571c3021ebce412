"""The GPU part of the exploit corpus as a table, part by part: rejected, left alone, through.

pytest suites/gate_quality/test_gpu_corpus.py --platform sm90 -k rejected         one part; the others' rows are kept
pytest suites/gate_quality/test_gpu_corpus.py --reuse results/gpu-tests/junit.xml  from a report; measures nothing
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from on_gpu import ROOT, gpu_platform, kept_rows, results_file

from pytest_klineage import KlineageSession

CORPUS = ROOT / "tests" / "exploits" / "gpu"
PARTS = {
    "rejected": {
        "test_attack_is_rejected": "rejected",
        "test_attack_is_rejected_by_another_layer": "rejected by another layer",
    },
    "left_alone": {
        "test_benign_twin_is_left_alone": "twin left alone",
        "test_fault_ends_its_own_kernel_only": "fault ends its own kernel only",
    },
    "through": {
        "test_attack_gets_through_a_naive_harness": "through, naive harness",
        "test_attack_gets_through_without_its_defence": "through, gate without the defence",
    },
}
CLAIMS = {test: claim for tests in PARTS.values() for test, claim in tests.items()}
LIMIT_S = 100.0
"""Of one part; what has been judged by then is what is published."""
ALL_ON = "all-on"
"""How a kernel was judged with no defence switched off; for a twin and a fault it goes without saying."""
PASSED_ON = ("artifacts", "cache_dir")
"""Options of ours that the corpus needs as well."""
CODE = "code"
"""Property of a test in a report: the deciding code of a verdict."""
NOT_RECORDED = "not recorded"
LINE = re.compile(r"::(\w+)\[(.+)\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One test of the corpus."""

    claim: str
    kernel: str
    how: str
    """Which defences were off, or "all-on"."""
    outcome: str
    """passed, failed, error, skipped, xfail or xpass."""
    seconds: float
    codes: tuple[str, ...] = ()
    """Deciding codes in the order of judgement: the kernel's own; after a fault, that of an honest kernel as well. None
    where the naive harness ran, or where the report has none."""

    @property
    def holds(self) -> bool:
        """Whether the claim does."""
        return self.outcome == "passed"


def result_of(test: str, parameters: str, outcome: str, seconds: float, codes: Iterable[str] = ()) -> Result:
    """A result from a test's name and parameters."""
    kernel, _, how = parameters.partition("-")
    return Result(claim=CLAIMS[test], kernel=kernel, how=how, outcome=outcome, seconds=seconds, codes=tuple(codes))


def run_part(config: pytest.Config, platform: str, part: str) -> tuple[list[Result], str]:
    """Judge one part in a pytest of its own. Returns the results and the last words.

    Its lines are read as they come; codes are in its report, which is only there when it came to its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        results, words = lines_of_part(config, platform, part, report)
        recorded = results_of_report(report) if report.exists() else []
    codes = {(result.claim, result.kernel, result.how): result.codes for result in recorded}
    return [
        msgspec.structs.replace(result, codes=codes.get((result.claim, result.kernel, result.how), ()))
        for result in results
    ], words


def lines_of_part(config: pytest.Config, platform: str, part: str, report: Path) -> tuple[list[Result], str]:
    """Run that pytest, which writes a report at its end. Returns what its lines say, without codes."""
    command = [sys.executable, "-m", "pytest", *(f"{CORPUS / 'test_gpu_exploits.py'}::{test}" for test in PARTS[part])]
    command += ["-v", "--no-header", "-p", "no:cacheprovider", f"--klineage-platform={platform}", "--color=no"]
    command.append(f"--junitxml={report}")
    for name in PASSED_ON:
        if value := config.getoption(f"klineage_{name}"):
            command.append(f"--klineage-{name.replace('_', '-')}={Path(value).absolute()}")
    results, words, before = [], [], time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        watchdog = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGTERM))
        watchdog.start()
        try:
            for line in process.stdout or ():
                words.append(line.rstrip())
                if (found := LINE.search(line)) and found[1] in CLAIMS:
                    now = time.monotonic()
                    results.append(result_of(found[1], found[2], found[3].lower(), now - before))
                    before = now
        finally:
            watchdog.cancel()
    return results, "\n".join(words[-60:])


def results_of_report(report: Path) -> list[Result]:
    """Results from a JUnit report of the corpus. Reports of before have no codes."""
    results = []
    for test in ElementTree.parse(report).iter("testcase"):
        name, _, parameters = test.get("name", "").partition("[")
        if name not in CLAIMS:
            continue
        tags = {child.tag for child in test} & {"failure", "error", "skipped"}
        outcome = {"failure": "failed"}.get(min(tags), min(tags)) if tags else "passed"
        codes = [item.get("value", "") for item in test.iter("property") if item.get("name") == CODE]
        results.append(result_of(name, parameters.rstrip("]"), outcome, float(test.get("time", 0)), codes))
    return results


def header(kernel: str, field: str) -> str:
    """One field of a kernel's header comment; empty for a kernel that is no longer there."""
    for path in CORPUS.glob("*/*"):
        if path.stem == kernel and (found := re.search(rf"^(?://|#) ?{field}: (.+)$", path.read_text(), re.M)):
            return found.group(1)
    return ""


def decided_by(results: Iterable[Result]) -> str:
    """What decided over a kernel with all defences on, as far as it is recorded."""
    shown = [row for row in results if row.how in ("", ALL_ON)]
    return " or ".join(dict.fromkeys(row.codes[0] if row.codes else NOT_RECORDED for row in shown))


def report_of(results: Iterable[Result], platform: str) -> str:
    """The page: a row for each claim, then one for each kernel."""
    rows = list(results)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = [f"# The exploit corpus on {platform}\n", f"{date}, `tests/exploits/gpu`.\n"]
    lines += ["| claim | holds | of | skipped |", "|---|---|---|---|"]
    for claim in CLAIMS.values():
        chosen = [row for row in rows if row.claim == claim]
        skipped = sum(row.outcome == "skipped" for row in chosen)
        lines.append(f"| {claim} | {sum(row.holds for row in chosen)} | {len(chosen) - skipped} | {skipped} |")
    lines += ["", "What decided is that with all defences on; the rows in JSON have the codes of every trial.", ""]
    lines += ["| kernel | entry | expected | decided | as expected | not |", "|---|---|---|---|---|---|"]
    for kernel in sorted({row.kernel for row in rows}):
        chosen = [row for row in rows if row.kernel == kernel and row.outcome != "skipped"]
        held = f"{sum(row.holds for row in chosen)}/{len(chosen)}"
        amiss = ", ".join(f"{row.claim} ({row.how or ALL_ON})" for row in chosen if not row.holds)
        expected = header(kernel, "expect").replace("|", "or")
        lines.append(f"| {kernel} | {header(kernel, 'id')} | {expected} | {decided_by(chosen)} | {held} | {amiss} |")
    return "\n".join(lines)


@pytest.mark.parametrize("part", PARTS)
def test_gpu_corpus(
    part: str,
    request: pytest.FixtureRequest,
    klineage_session: KlineageSession,
    publish: Callable[[str, str, list[Result]], None],
) -> None:
    """Attacks are rejected for the right reason and get through elsewhere; twins and later kernels are left alone."""
    reuse, words = request.config.getoption("--reuse"), ""
    claims = set(PARTS[part].values())
    if reuse:
        platform = "sm90"
        fresh = [result for result in results_of_report(Path(reuse)) if result.claim in claims]
    else:
        platform = gpu_platform(klineage_session)
        fresh, words = run_part(request.config, platform, part)
    name = f"corpus-{platform}"
    others = kept_rows(results_file(request.config, name), Result, without=lambda result: result.claim in claims)
    publish(name, report_of([*others, *fresh], platform), [*others, *fresh])
    assert fresh, words
    assert {result.claim for result in fresh} == claims, words
    assert any(result.outcome != "skipped" for result in fresh), words
    amiss = [result for result in fresh if not (result.holds or result.outcome == "skipped")]
    assert not amiss, f"{amiss}\n{words}"
