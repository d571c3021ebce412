"""The exploit corpus as a table: every attack with its reason, what it gets through, and every benign twin."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "exploits"
CLAIMS = {
    "test_attack_is_rejected": "rejected",
    "test_attack_gets_through_without_its_defence": "through, gate without the defence",
    "test_attack_gets_through_a_naive_harness": "through, naive harness",
    "test_benign_twin_is_left_alone": "twin left alone",
}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One test of the corpus."""

    claim: str
    kernel: str
    how: str
    """Which defences were off, or "all-on"."""
    passed: bool
    seconds: float


def run_corpus(report: Path) -> list[Result]:
    """Run tests/exploits, but for its GPU part, in a pytest of its own and read its JUnit report."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(CORPUS),
        f"--ignore={CORPUS / 'gpu'}",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    command.append(f"--junitxml={report}")
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    results = []
    for test in ElementTree.parse(report).iter("testcase"):
        name, _, parameters = test.get("name", "").partition("[")
        if name not in CLAIMS:
            continue
        kernel, _, how = parameters.rstrip("]").partition("-")
        if test.get("classname", "").endswith("test_open_exploits"):
            kernel = f"open/{kernel}"
        passed = not any(child.tag in ("failure", "error", "skipped") for child in test)
        seconds = float(test.get("time", 0))
        results.append(Result(claim=CLAIMS[name], kernel=kernel, how=how, passed=passed, seconds=seconds))
    return results


def header(kernel: str, field: str) -> str:
    """One field of a kernel's header comment; `open/NAME` is one on an operator of a user's file."""
    folder, _, name = kernel.rpartition("/")
    (path,) = [path for path in (CORPUS / folder).glob("*/*") if path.stem == name]
    found = re.search(rf"^(?://|#) ?{field}: (.+)$", path.read_text(), re.M)
    return found.group(1) if found else ""


def summary_of(results: list[Result]) -> list[str]:
    lines = ["| claim | holds | of |", "|---|---|---|"]
    for claim in CLAIMS.values():
        chosen = [result for result in results if result.claim == claim]
        lines.append(f"| {claim} | {sum(result.passed for result in chosen)} | {len(chosen)} |")
    return lines


def details_of(results: list[Result]) -> list[str]:
    lines = ["| kernel | entry | expected | as expected |", "|---|---|---|---|"]
    for kernel in sorted({result.kernel for result in results}):
        chosen = [result for result in results if result.kernel == kernel]
        held = f"{sum(result.passed for result in chosen)}/{len(chosen)}"
        expected = header(kernel, "expect").replace("|", "or")
        lines.append(f"| {kernel} | {header(kernel, 'id')} | {expected} | {held} |")
    return lines


def test_corpus(publish: Callable[[str, str, list[Result]], None], tmp_path: Path) -> None:
    """All attacks rejected for the right reason, all twins left alone, and every attack gets through somewhere."""
    results = run_corpus(tmp_path / "corpus.xml")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    heading = [f"# The exploit corpus, CPU part\n\n{date}, `tests/exploits`, one run.\n"]
    publish("corpus", "\n".join([*heading, *summary_of(results), "", *details_of(results)]), results)
    assert results
    assert all(result.passed for result in results), [result for result in results if not result.passed]
