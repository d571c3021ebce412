"""Mutates one module after the other with mutmut, and writes which mutants no test has noticed. Nightly, not in CI.

python tests/mutation/mutants.py [NAME ...]     names of modules.toml; all of them without any

Works on a copy in build/mutants/NAME. A run that was cut goes on where it was; survivors are tried again, since tests
may have come. Reasons for survivors stand in
reasons.toml under the lines that differ; SURVIVORS.md is written from both.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
COPIED = ("pytest_klineage", "tests", "experts", "skills", "suites", "conftest.py", "README.md")
NEVER = shutil.ignore_patterns("__pycache__", "runs", "trajectories", ".klineage")
KILLED, SURVIVED, NOT_TRIED = "killed", "survived", "not tried"
UNNOTICED = (0, 5, 33)
"""Codes of mutmut for a mutant that the tests passed with, or that no test reaches."""
GOAL = 0.9
HEADING = "# Mutants that no test notices\n\nWritten by `make mutants`; the reasons are in `reasons.toml`.\n"
NO_REASON = "**no reason yet**"
CONFIGURATION = """
[tool.mutmut]
source_paths = ["pytest_klineage"]
only_mutate = ["{module}"]
also_copy = {copied}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:randomly"]
pytest_add_cli_args_test_selection = {tests}
"""
PROFILE = """
from hypothesis import HealthCheck, settings
# mutmut runs the tests several times in one process, with other instances of a test's class.
suppressed = [HealthCheck.too_slow, HealthCheck.differing_executors]
settings.register_profile("mutants", settings.get_profile("same"), suppress_health_check=suppressed)
settings.load_profile("mutants")
"""


def prepare(folder: Path, module: str, tests: list[str]) -> None:
    """A copy of the repository, with only this module to mutate."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=NEVER, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
    (folder / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text() + PROFILE)
    copied = [name for name in COPIED if name != "pytest_klineage"]
    text = CONFIGURATION.format(module=module, tests=json.dumps(tests), copied=json.dumps(copied))
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + text)


def forget_survivors(folder: Path, module: str) -> None:
    """Have mutants tried again that no test noticed in an earlier run."""
    path = folder / "mutants" / f"{module}.meta"
    if not path.is_file():
        return
    meta = json.loads(path.read_text())
    codes = meta["exit_code_by_key"]
    meta["exit_code_by_key"] = {name: None if code in UNNOTICED else code for name, code in codes.items()}
    path.write_text(json.dumps(meta))


def outcomes(folder: Path, module: str) -> dict[str, str]:
    """What became of every mutant: killed (a test failed, or never ended), survived, or not tried."""
    meta = json.loads((folder / "mutants" / f"{module}.meta").read_text())["exit_code_by_key"]
    words = {0: SURVIVED, None: NOT_TRIED}
    return {name: words.get(code, "no test" if code in UNNOTICED else KILLED) for name, code in meta.items()}


def difference(folder: Path, mutant: str) -> tuple[str, str]:
    """The lines that a mutant replaces, and what it puts in their place."""
    command = [sys.executable, "-m", "mutmut", "show", mutant]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()
    changed = [line for line in shown if line[:1] in "+-" and not line.startswith(("+++", "---"))]
    before, after = ([line[1:].strip() for line in changed if line[0] == sign] for sign in "-+")
    return " ".join(before), " ".join(after)


def section(name: str, module: str, found: dict[str, str], folder: Path, reasons: dict[str, str]) -> str:
    """One module's part of the page."""
    tried = [outcome for outcome in found.values() if outcome != NOT_TRIED]
    killed = tried.count(KILLED)
    share = 100 * killed / len(tried) if tried else 0.0
    lines = [f"## {name}", "", f"`{module}`: {killed} of {len(tried)} killed ({share:.1f} %)"]
    lines[-1] += f", {len(found) - len(tried)} not tried." if len(found) > len(tried) else "."
    left = [mutant for mutant, outcome in found.items() if outcome not in (KILLED, NOT_TRIED)]
    if left:
        lines += ["", "| function | was | became | why it survives |", "|---|---|---|---|"]
    for mutant in left:
        function = (
            mutant.rpartition(".")[2].partition("__mutmut")[0].removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        )
        before, after = (text.replace("|", "\\|") for text in difference(folder, mutant))
        lines.append(f"| {function} | `{before}` | `{after}` | {reasons.get(after, NO_REASON)} |")
    return "\n".join([*lines, ""])


def run(name: str, module: str, tests: list[str], reasons: dict[str, str]) -> bool:
    """Mutate one module, write its section, and say whether the goal is reached."""
    folder = ROOT / "build" / "mutants" / name
    prepare(folder, module, tests)
    forget_survivors(folder, module)
    subprocess.run([sys.executable, "-m", "mutmut", "run", "--max-children", "1"], cwd=folder, check=False)
    found = outcomes(folder, module)
    keep(name, section(name, module, found, folder, reasons))
    return list(found.values()).count(KILLED) >= GOAL * len(found)


def keep(name: str, text: str) -> None:
    """Put a module's section into the page, in the place of its last one."""
    page = HERE / "SURVIVORS.md"
    parts = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)[1:] if page.is_file() else []
    sections = {part.split()[1]: part for part in parts} | {name: text}
    page.write_text("\n".join([HEADING, *(part.rstrip() + "\n" for _, part in sorted(sections.items()))]))


def main(chosen: list[str]) -> int:
    """Mutate the chosen modules. Fails below the goal."""
    modules = tomllib.loads((HERE / "modules.toml").read_text())
    reasons = tomllib.loads((HERE / "reasons.toml").read_text())
    if unknown := set(chosen) - set(modules):
        sys.exit(f"mutants: {', '.join(sorted(unknown))}: valid are {', '.join(modules)}")
    short = [
        name for name in chosen or modules
        if not run(name, modules[name]["module"], modules[name]["tests"], reasons.get(name, {}))
    ]  # fmt: skip
    if short:
        sys.stderr.write(f"mutants: below {100 * GOAL:.0f} % killed: {', '.join(short)}\n")
    return bool(short)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
