"""Generated regions of the pages: `make tables` makes them from published records or the package.

A region stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES. Long tables stand on the
site alone: between `<!-- site: NAME -->` and `<!-- end -->` is a short form, and how to print the table, which
site_hooks.py puts there. `python docs/tables.py NAME` prints it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from gate_tables import GATE_TABLES
from package_tables import PACKAGE_TABLES
from rerun_intervals import between_runs_of, over_runs
from tabulate import tabulate

from pytest_klineage.gate.findings import floor_of
from pytest_klineage.lab.induction.admit_store import TRIAL_FILE, TrialRecord, trial_folders
from pytest_klineage.lab.library.cards import card_folders, read_card
from pytest_klineage.lab.library.experts import Expert, find_experts
from pytest_klineage.lab.library.lineages import read_json
from pytest_klineage.lab.library.rendering import speedup_text as interval_text
from pytest_klineage.lab.studies.chains import Keys, chains_below, root_speeds
from pytest_klineage.lab.studies.effect import Study, report
from pytest_klineage.operators import operator_of
from pytest_klineage.records import AdmissionRule, SkillCard, Surface, Timing, Trial, TrialOutcome, Verdict, from_json
from pytest_klineage.records.judging import JudgeReply, JudgeRequest
from pytest_klineage.records.platform import gpu_platforms
from pytest_klineage.report.aggregate import summarise
from pytest_klineage.report.tables import floor_text, floors_known, milliseconds, ratio, speedup_text
from pytest_klineage.results.packed import is_there, read_lines
from pytest_klineage.results.runs import Record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.glob("*/README.md")))
LEAST_OF_THE_AUTHORS = 0.99
"""Of the speed of an author's next kernel: what suites/lineage/test_derive.py asks of a model."""
REGION = re.compile(r"(<!-- (?P<kind>table|site): (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.S)
ORDER = ("gemm", "fmha", "topk", "gdn", "conv2d", "linear", "gated_linear", "grouped_mm", "scaled_mm")
"""Operators in the order of the README; a case is the operator's name, sizes and options."""
SWEPT = "experts-sm90"
"""The run of suites/experts that is published."""
EFFECT = ROOT / "suites" / "skill_effect"


POLICIES = ("do_bench", "cudagraph")
"""Beside the policy that decides, `paired`."""
DOMAINS = {
    "gemm": "bf16, fp16; N % 8 = 0",
    "fmha": "bf16, fp16; D 64, 128, 256",
    "topk": "fp32, bf16, fp16; K ≤ 2,048",
    "gdn": "bf16; D 64, 128",
    "conv2d": "bf16, fp16; C, F % 8 = 0; K ≤ 7",
}
"""What the experts of the GPU's main tier take, in a few words; expert.toml beside each has all of it."""


def main_tier(run: str) -> str:
    """The main tier of one run: device, date, a row per case, and the geometric mean with its coverage."""
    verdicts = sorted(published(run), key=lambda one: (ORDER.index(one.case.operator), one.case.id))
    policies = [name for name in POLICIES if any(other_timing(one, name) for one in verdicts)]
    floors, spread = floors_known(verdicts), between_runs_of(run)
    mixed = len({one.surface for one in verdicts}) > 1
    rows = [
        [
            *row_of(one), *([over_runs(one, spread)] if spread else []), *([floor_text(one)] if floors else []),
            *([one.surface] if mixed else []), *(speedup(other_timing(one, name)) for name in policies),
            *([DOMAINS[one.case.operator]] if policies else []),
        ]
        for one in verdicts
    ]  # fmt: skip
    more = [
        *(["over runs"] if spread else []),
        *(["floor"] if floors else []),
        *(["language"] if mixed else []),
        *policies,
        *(["the kernel takes"] if policies else []),
    ]
    headers = ("case", "reference", "reference ms", "kernel ms", "speedup", *more)
    days = sorted({one.judged_at[:10] for one in verdicts})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    table = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)
    summary = summarise(verdicts)
    mean = "no mean" if summary.geomean is None else f"geomean {ratio(summary.geomean)}x"
    machine = verdicts[0].machine
    device = machine.device if machine is not None else "an unknown device"
    return (
        f"{device}, {when}; policy `paired`, 95 % intervals; samples in `results/{run}`.\n\n"
        f"{table}\n\n{mean} over {summary.scored} of {summary.judged} cases.\n"
    )


def last_line(table: str) -> str:
    """The geometric mean below a table of speedups."""
    return f"{table.strip().splitlines()[-1]}\n"


def published(run: str) -> list[Verdict]:
    """Every verdict of a published run."""
    return [with_floor(verdict) for _node, verdict in judged_in(f"{run}/records.jsonl")]


def with_floor(verdict: Verdict) -> Verdict:
    """The verdict; with the floor of its GPU where its record is older than floors in records."""
    machine, case = verdict.machine, verdict.case
    kind = gpu_platforms().get(machine.platform) if machine is not None else None
    if verdict.floor is not None or machine is None or kind is None:
        return verdict
    needs, row = operator_of(case), kind.product(machine.device)
    peaks, product = kind.peaks(machine.device, case.dtype), row.name if row else ""
    return msgspec.structs.replace(verdict, floor=floor_of(needs.flops(case), needs.min_bytes(case), peaks, product))


def row_of(verdict: Verdict) -> Iterable[str]:
    """Case, reference, both times and the paired speedup."""
    timing = verdict.timing if verdict.scored else None
    reference = verdict.reference.get("label") or verdict.case.reference
    times = (milliseconds(timing.reference_ms), milliseconds(timing.candidate_ms)) if timing else ("-", "-")
    return (f"`{verdict.case.id}`", reference, *times, speedup_text(verdict) if timing else verdict.code.value)


def other_timing(verdict: Verdict, policy: str) -> Timing | None:
    """The timing of the same kernel under another policy."""
    return next((one for one in verdict.other_timings if one.policy == policy), None)


def speedup(timing: Timing | None) -> str:
    """A speedup without its interval."""
    return "-" if timing is None else f"{ratio(timing.speedup.estimate)}x"


ASIDE = re.compile(
    r"naive: |NaN is outside its|The stages|Refused with a message|(Any|Every)thing else is refused|Runs on AVX|"
    r"The bits of the result|Scratch memory|TileLang uses|TMA is used|COMPILE declares|Each shape is|What else is asked"
)
"""How sentences of a contract begin that are about refusals, other variants than the expert, or how it computes."""


def domains() -> str:
    """What each expert accepts, in the words of its expert.toml."""
    return "".join(f"{domain_of(expert)}\n" for expert in find_experts(ROOT / "experts"))


def domain_of(expert: Expert) -> str:
    """One expert's item."""
    built = [name for name in expert.platforms_of(expert.variants["expert"]) if name != expert.platform]
    name = f"{expert.operator}, {', '.join([expert.platform, *built])}, {expert.surface.value}"
    return f"- **{name}**: {accepted(str(expert.contract['text']))}"


def accepted(contract: str) -> str:
    """The sentences of a contract about what the expert variant accepts, escaped for Markdown."""
    text = re.sub(r" \(stages?[^)]*\)", "", " ".join(contract.split())).removeprefix("expert: ")
    sentences = re.split(r"(?<=\.) (?=[A-Za-z])", text)
    kept = " ".join(sentence for sentence in sentences if not ASIDE.match(sentence))
    return kept.replace("<", "&lt;").replace("[", "\\[")


def sweeps() -> str:
    """Sweeps of the CUDA experts, then every case that was judged, in any language."""
    return f"{swept_means()}\n{main_tier(SWEPT)}" if is_there(RESULTS / SWEPT / "records.jsonl") else swept_means()


def swept_means() -> str:
    """Sweeps of the CUDA experts: mean and slowest case beside what is asked for."""
    asked = tomllib.loads((ROOT / "suites" / "experts" / "sweeps.toml").read_text())
    if not is_there(RESULTS / SWEPT / "records.jsonl"):
        count = sum(len(sweep["cases"]) for sweep in asked.values())
        return f"Not measured yet: {count} cases are defined; `pytest suites/experts --platform sm90` judges them.\n"
    swept = [one for one in published(SWEPT) if one.surface == Surface.CUDA]
    rows = [
        sweep_row(name, sweep, [one for one in swept if one.case.operator == name]) for name, sweep in asked.items()
    ]
    headers = ("sweep", "right", "geomean", "asked", "slowest case", "asked")
    return f"{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}\n"


def sweep_row(name: str, asked: dict[str, Any], verdicts: list[Verdict]) -> Iterable[str]:
    """One sweep's mean and slowest case."""
    summary = summarise(verdicts)
    timed = [one.timing.speedup.estimate for one in verdicts if one.scored and one.timing is not None]
    mean, slowest = (f"{ratio(number)}x" if number else "-" for number in (summary.geomean, min(timed, default=None)))
    return (
        name,
        f"{summary.scored} of {len(asked['cases'])}",
        mean,
        f"{asked['geomean']}x",
        slowest,
        f"{asked['least']}x",
    )


ABLATIONS = Keys(arm="method", target="case", repeat="trial")
"""What the ablations' trajectories call arm, target and repeat."""


def cards_on_cpu() -> str:
    """Whether cards helped on a CPU."""
    folders = ("roundtrip_recovery-cpu", "generated_only-cpu")
    chains = [chain for name in folders for chain in chains_below(RESULTS / "trajectories" / name, ABLATIONS)]
    return report(Study(contrasts=(("klineage", "generated-only"),)), chains)


def held_out() -> str:
    """The held-out rows of FlagGems, as suites/flaggems published them."""
    path = RESULTS / "flaggems-sm90" / "sm90.md"
    return path.read_text() if path.exists() else "Not measured yet: 22 rows in 4 arms are defined.\n"


def held_out_means() -> str:
    """The last table of the held-out rows: geometric means by family, coverage, and how many reach 0.99x."""
    return f"{held_out().strip().rpartition(chr(10) * 2)[2]}\n"


def contrasts_of(made: str) -> str:
    """A report on the effect of cards up to its first table, that of the contrasts."""
    return made.partition("\n\nFirst shots that succeed")[0] + "\n"


def cards_on_sm90() -> str:
    """Whether cards helped on sm90: the chains of the frozen design."""
    asked, of_target = (tomllib.loads((EFFECT / f"{name}.toml").read_text()) for name in ("experiment", "thresholds"))
    with unpacked("effect") as run:
        chains = [chain for chain in chains_below(run / "effect") if chain.design == asked["frozen"]["design"]]
        roots = root_speeds(run.with_name(f"{run.name}.verdicts.jsonl"))
    study = Study(
        contrasts=tuple(map(tuple, asked["contrasts"])), success=asked["success"], seed=asked["seed"],
        of_target=of_target,
    )  # fmt: skip
    return report(study, chains, roots)


def repairs_on_sm90() -> str:
    """Whether cards helped to mend broken kernels; one that the gate accepted as it was is no task."""
    asked = tomllib.loads((EFFECT / "experiment.toml").read_text())
    with unpacked("repair") as run:
        chains = [chain for chain in chains_below(run / "repair") if chain.root is not None]
    whole = sorted({chain.target for chain in chains if chain.root is not None and chain.root.ok})
    study = Study(
        contrasts=(tuple(asked["contrasts"][0]),), success=asked["repair"]["at_least"], seed=asked["seed"]
    )  # fmt: skip
    left_out = f"Accepted although broken, and left out: {', '.join(whole) or 'none'}."
    return f"{left_out}\n\n{report(study, [chain for chain in chains if chain.target not in whole])}"


@contextlib.contextmanager
def unpacked(name: str) -> Iterator[Path]:
    """Folder with the trajectories of an archive of the experiment on the effect of cards."""
    archive = RESULTS / "skill_effect-sm90" / f"{name}.tar.xz"
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as made:
        made.extractall(folder, filter="data")
        yield Path(folder) / "trajectories" / "skill_effect-sm90"


def tried_cards() -> list[tuple[SkillCard, list[TrialRecord]]]:
    """Every card with its trials."""
    return [(read_card(folder), trial_records(folder)) for folder in card_folders(ROOT / "skills")]


def trial_counts() -> str:
    """How many cards each rule lets in, by platform."""
    made = tried_cards()
    counts = [
        counts_by_rule(platform, [(card, records) for card, records in made if card.origins[0].platform == platform])
        for platform in sorted({card.origins[0].platform for card, _ in made})
    ]
    return f"{tabulate(counts, ('platform', 'cards', 'several operators', *RULES.values()), tablefmt='pipe')}\n"


def trials() -> str:
    """How many cards each rule lets in, and every trial."""
    rows = [trial_row(card, record) for card, records in tried_cards() for record in records]
    headers = ("card", "target", "which is", "rule", "expected", "asked", "reached", "outcome")
    return f"{trial_counts()}\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}\n"


RULES = {
    AdmissionRule.STRICT: "strict",
    AdmissionRule.PREDECESSOR: "own predecessor (the paper's)",
    AdmissionRule.LANGUAGE: "another language",
    AdmissionRule.SQUARE_ROOT: "square root (until November 2026)",
}
"""Rules of admission, as headers name them."""


def trial_records(folder: Path) -> list[TrialRecord]:
    """The records of a card's trials, in their order."""
    return [read_json(trial / TRIAL_FILE, TrialRecord) for trial in trial_folders(folder)]


def counts_by_rule(platform: str, made: list[tuple[SkillCard, list[TrialRecord]]]) -> list[str]:
    """Cards of a platform, those that rest on several operators, and by rule how many that were tried succeeded."""
    of_cards = [records for _, records in made]
    several = sum(len(operators_behind(card, records)) > 1 for card, records in made)
    by_rule = [[[one.trial for one in records if one.trial.rule is rule] for records in of_cards] for rule in RULES]
    won = [sum(any(map(succeeded, own)) for own in each) for each in by_rule]
    tried = [sum(map(bool, each)) for each in by_rule]
    shares = [f"{count} of {total}" if total else "-" for count, total in zip(won, tried, strict=True)]
    return [platform, str(len(of_cards)), str(several), *shares]


def operators_behind(card: SkillCard, records: list[TrialRecord]) -> set[str]:
    """Operators whose steps a card was lifted from, and those on whose kernels it succeeded."""
    won = {record.case.operator for record in records if succeeded(record.trial)}
    return won | {origin.operator for origin in card.origins}


def succeeded(trial: Trial) -> bool:
    """Whether the effect was there."""
    return trial.outcome is TrialOutcome.SUCCESS


def trial_row(card: SkillCard, record: TrialRecord) -> list[str]:
    """One trial; a trial of old expected the card's own effect."""
    trial, own = record.trial, card.effect.speedup
    expected = trial.expected or (own.estimate if own is not None else None)
    reached = interval_text(trial.speedup) if trial.speedup is not None else "-"
    code = f" (`{trial.code.value}`)" if trial.code is not None else ""
    figures = (f"{ratio(expected)}x" if expected else "-", f"{ratio(record.case.at_least)}x", reached)
    return [
        f"`{card.name}`",
        f"`{record.case.id}`",
        place(card, record),
        trial.rule.value,
        *figures,
        f"{trial.outcome.value}{code}",
    ]


def place(card: SkillCard, record: TrialRecord) -> str:
    """What is held out about the place of a trial."""
    if record.trial.context.surface not in {origin.surface for origin in card.origins}:
        return f"another language, {record.trial.context.surface}"
    if record.case.operator not in {origin.operator for origin in card.origins}:
        return "another operator"
    return "another shape" if record.trial.held_out else "its own"


def judged_in(name: str) -> list[tuple[str, Verdict]]:
    """Node ids and verdicts of a file of records below results/."""
    return [(one.nodeid, one.verdict) for one in read_lines(ROOT / "results" / name, Record)]


def newcomer() -> str:
    """What a reader who had never seen the repository answered to four questions, and in what time."""
    lines = (ROOT / "results" / "newcomer" / "answers.jsonl").read_text().splitlines()
    rows = [
        (one["question"], one["answer"], one["seconds"], one["lookups"], "yes" if one["right"] else "no")
        for one in map(msgspec.json.decode, lines)
    ]
    return f"{tabulate(rows, ('question', 'answer', 's', 'lookups', 'right'), tablefmt='pipe')}\n"


def derived_steps() -> str:
    """Kernels that a model made of the simpler kernel and a sentence, beside the author's next one; failed ones too."""
    rows, right, fast = [], 0, 0
    for request, verdict in sorted(judged_replies(), key=lambda one: (one[0].case.operator, next_step(one[0]))):
        speed = verdict.timing.speedup if verdict.timing else None
        right += verdict.scored
        fast += speed is not None and speed.estimate >= LEAST_OF_THE_AUTHORS
        reached = interval_text(speed) if speed else "-"
        rows.append(
            (request.case.operator, next_step(request), f"`{request.source.digest[:12]}`", verdict.code.value, reached)
        )  # fmt: skip
    headers = ("operator", "author's next kernel", "kernel", "verdict", "speed over it, 95 %")
    said = f"**Of {len(rows)} judged kernels {right} are right; {fast} have {LEAST_OF_THE_AUTHORS:g}x or more.**"
    return f"{said}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}\n"


def judged_replies() -> Iterator[tuple[JudgeRequest, Verdict]]:
    """What was asked of the judge about kernels of a model, and what it said."""
    with tarfile.open(RESULTS / "derive-sm90" / "waiting.tar.xz") as archive:
        files = {path.name: archive.extractfile(path) for path in archive if path.isfile()}
        for name, file in files.items():
            asked = files.get(name.replace("/reply/", "/request/"))
            if "/reply/" not in name or file is None or asked is None:
                continue
            request, reply = from_json(asked.read(), JudgeRequest), from_json(file.read(), JudgeReply)
            if request.source.label.startswith("with "):
                yield request, reply.verdict


def next_step(request: JudgeRequest) -> str:
    """The name of the kernel that a step leads to."""
    return request.reference_source.label if request.reference_source else ""


TABLES: dict[str, Callable[[], str]] = {
    "main-tier-sm90": lambda: main_tier("main_tier-sm90"),
    "main-tier-cpu": lambda: main_tier("main_tier-cpu"),
    "expert-domains": domains,
    "expert-sweeps": sweeps,
    "cards-on-cpu": cards_on_cpu,
    "cards-on-sm90": cards_on_sm90,
    "repairs-on-sm90": repairs_on_sm90,
    "held-out-sm90": held_out,
    "trials": trials,
    "newcomer": newcomer,
    "derived-steps": derived_steps,
    **GATE_TABLES,
    **PACKAGE_TABLES,
}
SHORT: dict[str, Callable[[], str]] = {
    "expert-sweeps": swept_means,
    "cards-on-sm90": lambda: contrasts_of(cards_on_sm90()),
    "held-out-sm90": held_out_means,
    "trials": trial_counts,
    "main-tier-cpu": lambda: last_line(main_tier("main_tier-cpu")),
}
"""What pages in the repository have of tables that are whole on the site; of others they have nothing."""


def regenerated(text: str) -> str:
    """A page's text with every region made again. Raises KeyError for a region that has no table."""
    return REGION.sub(lambda found: f"{found[1]}{region_text(found)}{found[4]}", text)


def region_text(found: re.Match[str]) -> str:
    """What a page in the repository has between the marks."""
    name, whole = found["name"], TABLES[found["name"]]
    if found["kind"] == "table":
        return whole()
    short = f"{SHORT[name]()}\nIn full on" if name in SHORT else "On"
    return f"{short} the site; `python docs/tables.py {name}` prints it.\n"


def with_site_tables(text: str) -> str:
    """A page's text as the site has it: tables in the place of what stands for them."""
    return REGION.sub(lambda found: found[0] if found["kind"] == "table" else TABLES[found["name"]](), text)


def main() -> None:
    """Print the tables that are named, else rewrite the regions of all pages."""
    for name in sys.argv[1:]:
        sys.stdout.write(TABLES[name]())
    for page in () if sys.argv[1:] else PAGES:
        before = page.read_text()
        if (after := regenerated(before)) != before:
            page.write_text(after)
            sys.stdout.write(f"make: {page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
