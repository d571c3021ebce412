"""FlagGems' tuner at its best: three times for each row, in a process and a cache of its own; the fastest is kept.

python suites/flaggems/tune.py --for 5 [--platform sm90] [--rows 1,9] [--cache-dir DIR]

With several GPUs: a process each, with CUDA_VISIBLE_DEVICES and rows of its own.

Its tuner's choice is noisy (5 ms of warm-up, 10 ms of calls) and its keys leave out batch, heads, mask and groups. The
folder DIR/reference-flaggems then holds, by case, the database, Triton's cache and tuned.json with all three attempts;
it is what travels to another machine with the same GPU. The same command goes on with the rows that are missing.
Most of an attempt is compiling. So all rows are first compiled beside each other, by attempts that do not count;
those that do begin with that, without what was timed. --for 0 only compiles.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rows import ROWS, Row

from pytest_klineage import GateSettings
from pytest_klineage.records.facts import MEASURED

ATTEMPTS = 3
LIMIT_S = 180
"""For one attempt, with its wait for the others: the slowest that was seen took 24 s."""
RECORD = "tuned.json"
OWN = f"{MEASURED}flaggems."
"""How facts begin that are medians of FlagGems' own entries."""

TIMED = "*.autotune.json"
"""Files of Triton's cache with what its tuner has timed; the others are compiled kernels."""

Attempt = Callable[[Row, str, Path], dict[str, str]]


def main(arguments: list[str]) -> int:
    """Tune what is missing, or with --one serve one attempt. Returns the exit status: 1 where a row failed."""
    options = parser().parse_args(arguments)
    if options.one:
        say(json.dumps(tune_here(row_of(options.one), options.platform, beside=options.beside)))
        return 0
    wanted = [row_of(int(number)) for number in options.rows.split(",")] if options.rows else list(ROWS)
    folder, until = Path(options.cache_dir) / "reference-flaggems", time.monotonic() + 60 * options.minutes
    missing = [row for row in wanted if not (place_of(row, options.platform, folder) / RECORD).exists()]
    failed = 0
    compile_all(missing, options.platform, folder, compiling)
    for done, row in enumerate(missing):
        if time.monotonic() > until:
            say(f"time is up; {len(missing) - done} rows are left, the same command goes on")
            break
        said, good = tune(row, options.platform, folder, in_process)
        failed += not good
        say(f"{done + 1}/{len(missing)} {row.name(options.platform)}: {said}")
    return int(failed > 0)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--for", dest="minutes", type=float, default=1e6, metavar="MIN", help="begin no row after that")
    made.add_argument("--platform", default="sm90")
    made.add_argument("--rows", default="", metavar="N,N", help="numbers of rows; default: all")
    made.add_argument("--cache-dir", default=str(GateSettings().cache_dir), metavar="DIR", help="the gate's cache")
    made.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    return made


def row_of(number: int) -> Row:
    """The row of that number. Raises SystemExit for another."""
    found = next((row for row in ROWS if row.number == number), None)
    if found is None:
        raise SystemExit(f"there is no row {number}; rows are 1 to {len(ROWS)}")
    return found


def place_of(row: Row, platform: str, folder: Path) -> Path:
    """Where the reference looks for what was tuned for a row."""
    return folder / row.case(platform, "flaggems").id


def compiled_of(row: Row, folder: Path) -> Path:
    """Where the attempt lies that only compiles."""
    return folder / f".compiled-{row.number}"


def compile_all(rows: Sequence[Row], platform: str, folder: Path, attempt: Attempt) -> None:
    """Have an attempt compile every row, beside each other; what they time counts for nothing."""
    new = [row for row in rows if not compiled_of(row, folder).exists()]

    def compile_one(row: Row) -> None:
        part = folder / f".part-{row.number}" / row.case(platform, "flaggems").id
        shutil.rmtree(part.parent, ignore_errors=True)
        part.mkdir(parents=True)
        error = attempt(row, platform, part).get("error")
        for timed in [] if error else part.rglob(TIMED):
            timed.unlink()
        if (part / "triton").exists() and not error:
            os.replace(part / "triton", compiled_of(row, folder))
        shutil.rmtree(part.parent, ignore_errors=True)
        say(f"compiled {row.name(platform)}{f': {error}' if error else ''}")

    with ThreadPoolExecutor(max(1, min(len(new), os.cpu_count() or 1))) as pool:
        list(pool.map(compile_one, new))


def tune(row: Row, platform: str, folder: Path, attempt: Attempt) -> tuple[str, bool]:
    """Make ATTEMPTS attempts for a row and keep the fastest. Returns what is to be said, and whether one succeeded."""
    position = place_of(row, platform, folder)
    places = [folder / f".attempt-{row.number}-{number}" / position.name for number in range(ATTEMPTS)]
    for own in places:
        shutil.rmtree(own.parent, ignore_errors=True)
        own.mkdir(parents=True)
        if compiled_of(row, folder).exists():
            shutil.copytree(compiled_of(row, folder), own / "triton")
    with ThreadPoolExecutor(ATTEMPTS) as pool:  # importing takes as long as tuning, and needs no GPU
        found = list(pool.map(lambda own: attempt(row, platform, own), places))
    tried = [(fastest(facts), own, facts) for own, facts in zip(places, found, strict=True)]
    best_ms, best, facts = min(tried, key=lambda item: item[0])
    record = {"attempts_ms": [ms for ms, *_ in tried if ms < float("inf")], "facts": facts}
    if best_ms < float("inf"):
        (best / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        shutil.rmtree(position, ignore_errors=True)
        os.replace(best, position)
        shutil.rmtree(compiled_of(row, folder), ignore_errors=True)
    for _ms, own, _facts in tried:
        shutil.rmtree(own.parent, ignore_errors=True)
    times = ", ".join(f"{ms * 1000:.1f}" for ms, *_ in tried)
    return f"{times} us, {facts.get('variant', facts.get('error', ''))}", best_ms < float("inf")


def fastest(facts: dict[str, str]) -> float:
    """Milliseconds of FlagGems' fastest entry; infinite where an attempt has failed."""
    return min((float(value) for name, value in facts.items() if name.startswith(OWN)), default=float("inf"))


def compiling(row: Row, platform: str, folder: Path) -> dict[str, str]:
    """An attempt that waits for no other, so that its times are worth nothing."""
    return in_process(row, platform, folder, beside=True)


def in_process(row: Row, platform: str, folder: Path, *, beside: bool = False) -> dict[str, str]:
    """One attempt in a new process whose caches lie in `folder`: the reference's facts, or an error's last line."""
    command = [sys.executable, __file__, "--one", str(row.number), "--platform", platform, *["--beside"] * beside]
    environment = os.environ | {
        "FLAGGEMS_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_CACHE_AUTOTUNING": "1",
    }  # fmt: skip
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {LIMIT_S} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def tune_here(row: Row, platform: str, *, beside: bool) -> dict[str, Any]:
    """Prepare the reference on tensors of the row, as the gate does, and say what it came to.

    One process a GPU, unless it may run beside others.
    """
    import flag_gems  # noqa: F401  # before the lock: its folder is in the environment

    from pytest_klineage.references import reference
    from pytest_klineage.worker.reference_kernel import prepared_on_gpu

    case = row.case(platform, "flaggems")
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with (Path(os.environ["FLAGGEMS_CACHE_DIR"]).parents[1] / f".one-at-a-time-{device}").open("w") as lock:
        if not beside:
            fcntl.flock(lock, fcntl.LOCK_EX)
        prepared_on_gpu(case, platform)
    return reference("flaggems").describe(case)


def say(line: str) -> None:
    """Progress, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
