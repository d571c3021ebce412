"""The command `report`: one run as before, everything else as a page, in Markdown or as figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from report_sample import verdict_of, write_run

from pytest_klineage.cli.main import main


def test_one_run_alone_is_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "one", [verdict_of("gemm", 2.0)])
    assert main(["report", str(folder)]) == 0
    assert "geomean 2.00x over 1 of 1 scored" in capsys.readouterr().out
    assert main(["report", str(folder), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("## klineage: sample, cpu, 1 verdicts")
    assert main(["report", str(folder), "--markdown", "--output", str(tmp_path / "a.md")]) == 0
    assert main(["report", str(folder), "--markdown", str(tmp_path / "b.md")]) == 0
    assert (tmp_path / "a.md").read_text() == (tmp_path / "b.md").read_text()


def test_one_damaged_run_alone_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "one", [verdict_of("gemm", 2.0)])
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"nodeid"')
    assert main(["report", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "geomean 2.00x over 1 of 1 scored" in text
    assert "warning: " in text
    assert "was cut short" in text


def test_everything_on_the_terminal_has_the_headlines(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(everything)]) == 0
    text = capsys.readouterr().out
    assert "klineage: 3.48x (2/2 scored, 2/2 at or above 1x; cpp on Test CPU @ 3 GHz)" in text
    assert "validated steps: 3 (in 1 lineage)" in text


def test_page_markdown_and_figures_in_one_go(everything: Path, tmp_path: Path) -> None:
    page, text, figures = tmp_path / "r.html", tmp_path / "docs" / "r.md", tmp_path / "figures"
    text.parent.mkdir()
    some = [str(everything / "main"), str(everything / "experts")]
    command = ["report", *some, "--html", str(page), "--markdown", str(text), "--figures", str(figures), "--paper"]
    assert main(command) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert "](../figures/lineage-gemm-cpu-cpp.svg)" in text.read_text()
    assert "The paper's Table 5" in text.read_text()
    assert {path.suffix for path in figures.iterdir()} == {".svg", ".png"}


def test_problems_are_warnings_beside_the_page(
    everything: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    assert main(["report", str(everything / "skills"), "--html", str(page)]) == 0
    assert "warning: lineage gemm/cpu-cpp: is not among what was read" in capsys.readouterr().err
    assert "What could not be read" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "nowhere is not there"), (["HERE", "--html", "no/such/folder/x.html"], "cannot be written")],
)
def test_misuse_is_one_line(
    arguments: list[str], message: str, everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [str(everything) if argument == "HERE" else argument for argument in arguments]
    assert main(["report", *named]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_report_needs_no_torch(everything: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pytest_klineage.cli.main import main\n"
        f"assert main(['report', {str(everything)!r}, '--html', {str(tmp_path / 'r.html')!r}]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
