"""What the commands share: exit codes, what is written where, and the run that a name means."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from pytest_klineage.errors import UsageError
from pytest_klineage.report.text import WIDTH, plain_table

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_group(commands: Commands, name: str, help_text: str, exit_codes: str) -> Commands:
    """A command that has commands of its own."""
    group = commands.add_parser(
        name, help=help_text, epilog=exit_codes, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return group.add_subparsers(metavar="ACTION", required=True)


def say(line: str = "") -> None:
    """Write one line at once: who reads a pipe sees it while the command goes on."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def say_all(lines: Iterable[str]) -> None:
    """Write lines."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


def say_table(headers: tuple[str, ...], rows: list[list[str]]) -> None:
    """Write a table, cut at WIDTH columns."""
    say_all(line[:WIDTH].rstrip() for line in plain_table(headers, rows))


def write_to(path: Path | None, text: str) -> None:
    """Write text to a file, or to the standard output without one. Raises UsageError."""
    if path is None:
        sys.stdout.write(text)
        return
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def write_files(folder: Path, texts: Iterable[tuple[str, str]]) -> list[Path]:
    """Write texts under their names into a folder, which is made. Raises UsageError."""
    path = folder
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts:
            path = folder / name
            path.write_bytes(text.encode())
            written.append(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    return written


def run_path(name: str) -> Path:
    """The path that a RUN on the command line means; "latest" is the newest in results/. Raises UsageError."""
    from pytest_klineage.results.runs import list_runs

    path = Path(name)
    if name != "latest" or path.exists():
        return path
    runs = list_runs(Path("results"))
    if not runs:
        raise UsageError("there is no run in results/runs; give the run's directory")
    return runs[-1]
