"""Build wheel and sdist, check what is in them, and run the quickstart from the wheel in an environment of its own.

Run by `make release-check`; prints one line a step and exits with 1 at the first that fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "release"
LARGEST_WHEEL = 2 << 20
"""Bytes. Code and texts only."""
SHIPPED = (
    "pytest_klineage/plugin/__init__.py", "pytest_klineage/surfaces/include/klineage.h", "pytest_klineage/py.typed",
    "pytest_klineage/report/page/report.html.j2",
)  # fmt: skip
"""Files without which an installed package does not work."""
NOT_SHIPPED = ("suites/", "tests/", "results/", "experts/", "skills/", "docs/")
IN_SDIST = ("README.md", "LICENSE", "pyproject.toml", "constraints.txt", "tests/test_architecture.py")
QUICKSTART = "test_examples_run and quickstart"


def main() -> None:
    """All steps in order."""
    shutil.rmtree(BUILD, ignore_errors=True)
    wheel, sdist = build()
    say(f"metadata of {wheel.name} and {sdist.name}")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    check_wheel(wheel)
    check_sdist(sdist)
    programs = install(wheel)
    say("quickstart from the wheel")
    origin = "import pytest_klineage as p; assert p.__file__.startswith(__import__('sys').prefix), p.__file__"
    run(str(programs / "python"), "-c", origin, cwd=BUILD)
    run(str(programs / "pytest-klineage"), "doctor", cwd=BUILD)
    run(str(programs / "pytest"), "-q", "tests/docs/test_docs.py", "-k", QUICKSTART)
    say("release: all checks passed")


def say(step: str) -> None:
    """Name a step before it begins."""
    print(f"release: {step}", flush=True)


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command; its failure ends the check."""
    if subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONSAFEPATH": "1"}).returncode:
        sys.exit(f"release: failed: {' '.join(command)}")


def build() -> tuple[Path, Path]:
    """Wheel and sdist, built as a release would be."""
    say("build")
    run(sys.executable, "-m", "build", "--outdir", str(BUILD), str(ROOT))
    (wheel,), (sdist,) = BUILD.glob("*.whl"), BUILD.glob("*.tar.gz")
    return wheel, sdist


def check_wheel(wheel: Path) -> None:
    """What a user installs: the package alone, with the files that are no Python."""
    names = zipfile.ZipFile(wheel).namelist()
    expect(not [name for name in names if name.startswith(NOT_SHIPPED)], f"{wheel.name} holds more than the package")
    expect(set(SHIPPED) <= set(names), f"{wheel.name} lacks {sorted(set(SHIPPED) - set(names))}")
    expect(wheel.stat().st_size <= LARGEST_WHEEL, f"{wheel.name} has {wheel.stat().st_size} bytes")
    tracked = subprocess.run(["git", "ls-files", "pytest_klineage"], cwd=ROOT, capture_output=True, text=True)
    lacking = set(tracked.stdout.split()) - set(names)
    expect(not lacking, f"{wheel.name} lacks files of the package: {sorted(lacking)}")


def check_sdist(sdist: Path) -> None:
    """What a distributor builds from: tests and licence included."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expect(set(IN_SDIST) <= names, f"{sdist.name} lacks {sorted(set(IN_SDIST) - names)}")


def install(wheel: Path) -> Path:
    """An environment with the wheel, its extra `cpu` and nothing of this checkout; gives its programs' folder."""
    say("install into an empty environment")
    folder = BUILD / "venv"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[cpu]", cwd=BUILD)  # fmt: skip
    return folder / "bin"


def expect(holds: bool, otherwise: str) -> None:
    """End the check where something does not hold."""
    if not holds:
        sys.exit(f"release: failed: {otherwise}")


if __name__ == "__main__":
    main()
