"""Outlines: what was found about somebody else's kernels, without a line of them, and checked when it is read."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_klineage.errors import BadRecord
from pytest_klineage.lab.library.lineages import LINEAGE_FILE, BrokenLineage, load_lineage, save_lineage
from pytest_klineage.lab.library.outlines import VERDICTS, is_outline, read_outline, write_outline
from pytest_klineage.records import (
    Code,
    Edit,
    EditKind,
    KernelSource,
    Lineage,
    Reason,
    Rederivation,
    Rejection,
    TimedSpan,
    Timing,
    Verdict,
    content_digest,
    to_json,
)
from pytest_klineage.records.edits import EditError, apply_edit, diff_edit
from pytest_klineage.records.lineage import inverse
from pytest_klineage.results.packed import append_line, packed, read_lines
from pytest_klineage.results.spans import SPANS_FILE, keep_span, read_spans
from pytest_klineage.results.storage import outlined_json

MakeLineage = Callable[[], tuple[Lineage, tuple[KernelSource, ...]]]
THEIRS = ("int tile[4]", "vector(1)", "their_function")


def quoting(verdict: Verdict, code: Code | None = None) -> Verdict:
    """The verdict as a compiler, a profile and a sanitizer leave it: full of the kernel's words."""
    reason = Reason(code=code or verdict.code, message="in their_function", evidence={"at": "vector(1)", "line": 3})
    return msgspec.structs.replace(
        verdict, status=reason.code.status, reasons=(reason,), log="int tile[4]", notes=("their_function",),
        sanitizer={"memcheck": "their_function"},
    )  # fmt: skip


@pytest.fixture
def whole(tmp_path: Path, make_lineage: MakeLineage) -> Path:
    """The folder of a lineage whose verdicts, refusals and re-derivation quote the kernels."""
    lineage, sources = make_lineage()
    steps = []
    folder = tmp_path / "whole"
    folder.mkdir()
    for step, before, after in zip(lineage.transitions, sources, sources[1:], strict=False):
        seen, brought = (quoting(verdict_on(lineage, source)) for source in (before, after))
        wrong = quoting(seen, Code.MISMATCH)
        refused = Rejection(
            forward=True, category=step.category, locus="run", intent="adds it", edit=step.forward, verdict=wrong,
            reason="wrong in their_function",
        )  # fmt: skip
        effect = inverse(timing_of(seen).speedup)
        steps.append(msgspec.structs.replace(step, effect=effect, forward_verdict=brought, rejected=(refused,)))
        for verdict in (seen, wrong, brought):
            append_line(folder / VERDICTS, verdict)
    saved = save_lineage(folder, msgspec.structs.replace(lineage, transitions=tuple(steps)), sources).lineage
    span = TimedSpan(
        steps=tuple(step.digest for step in saved.transitions), verdict=quoting(verdict_on(lineage, sources[0]))
    )
    keep_span(folder, span)
    return folder


def verdict_on(lineage: Lineage, source: KernelSource) -> Verdict:
    return next(state.verdict for state in lineage.states if state.source_digest == source.digest and state.verdict)


def timing_of(verdict: Verdict) -> Timing:
    assert verdict.timing is not None
    return verdict.timing


@pytest.fixture
def outline(whole: Path, tmp_path: Path) -> Path:
    """The folder of its outline."""
    write_outline(load_lineage(whole), tmp_path / "outline")
    return tmp_path / "outline"


def texts(folder: Path) -> dict[str, str]:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {name: (gzip.decompress(data) if name.endswith(".gz") else data).decode() for name, data in found.items()}


def test_no_word_of_a_kernel_is_left(whole: Path, outline: Path) -> None:
    written = texts(outline)
    assert sorted(written) == [LINEAGE_FILE, f"{SPANS_FILE}.gz", f"{VERDICTS}.gz"]
    assert all(word in "".join(texts(whole).values()) for word in THEIRS)
    assert not [(name, word) for name, text in written.items() for word in THEIRS if word in text]


def test_findings_and_digests_stay(whole: Path, outline: Path) -> None:
    lineage, found = load_lineage(whole).lineage, read_outline(outline)
    assert is_outline(found)
    assert not is_outline(lineage)
    assert found.digest == lineage.digest
    for step, full in zip(found.transitions, lineage.transitions, strict=True):
        kept = ("category", "locus", "intent", "before", "after", "effect", "digest")
        assert [getattr(step, name) for name in kept] == [getattr(full, name) for name in kept]
        assert step.forward == Edit(kind=EditKind.DIGEST, diff=content_digest(full.forward))
        assert [(one.code, one.reason) for one in step.rejected] == [(Code.MISMATCH, Code.MISMATCH.value)]
        assert step.rejected[0].verdict is not None
        assert step.rejected[0].verdict.reasons[0].evidence == {"line": 3}


def test_samples_lie_in_the_compressed_file(whole: Path, outline: Path) -> None:
    samples = [timing_of(one).candidate_samples_ms for one in read_lines(outline / VERDICTS, Verdict)]
    assert samples == [timing_of(one).candidate_samples_ms for one in read_lines(whole / VERDICTS, Verdict)]
    assert all(samples)
    verdicts = [step.forward_verdict for step in read_outline(outline).transitions]
    assert [timing_of(one).candidate_samples_ms for one in verdicts if one is not None] == [(), ()]
    assert read_spans(outline) == read_spans(whole)


def test_the_same_lineage_gives_the_same_bytes(whole: Path, outline: Path, tmp_path: Path) -> None:
    write_outline(load_lineage(whole), tmp_path / "again")
    first, again = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (outline, tmp_path / "again")
    )
    assert first == again


def test_a_broken_lineage_has_no_outline(whole: Path, tmp_path: Path) -> None:
    stored = load_lineage(whole)
    changed = msgspec.structs.replace(stored, sources=stored.sources[:1] * len(stored.sources))
    with pytest.raises(BrokenLineage):
        write_outline(changed, tmp_path / "outline")
    assert not (tmp_path / "outline").exists()


def with_first(lineage: Lineage, **fields: Any) -> Lineage:
    first, *others = lineage.transitions
    return msgspec.structs.replace(lineage, transitions=(msgspec.structs.replace(first, **fields), *others))


DIFF = diff_edit({"kernel.cpp": "a\n"}, {"kernel.cpp": "b\n"})
DAMAGE: dict[str, tuple[Callable[[Lineage], Lineage], str]] = {
    "text of an edit": (lambda found: with_first(found, forward=DIFF), "more of the kernels"),
    "text of a refusal": (
        lambda found: with_first(
            found, rejected=(msgspec.structs.replace(found.transitions[0].rejected[0], reason="in their_function"),)
        ),
        "more of the kernels",
    ),
    "an effect that was not measured": (
        lambda found: with_first(found, effect=msgspec.structs.replace(found.transitions[0].effect, high=9.0)),
        "step 1: no verdict has its effect",
    ),
    "a kernel that was not judged": (
        lambda found: with_first(
            found, rederived=Rederivation(edit=found.transitions[0].forward, source_digest="0" * 64)
        ),
        "step 1: no verdict says that the re-derived kernel is right",
    ),
    "a step from elsewhere": (lambda found: with_first(found, before="0" * 64), "from state to state"),
    "an edit in place of a digest": (
        lambda found: with_first(found, forward=Edit(kind=EditKind.DIGEST, diff="-a\n+b\n")),
        "is no digest",
    ),
    "a digest that is too short": (lambda found: with_first(found, digest="0" * 63), "'0{63}' is no digest"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_found_on_reading(damage: str, outline: Path) -> None:
    change, message = DAMAGE[damage]
    (outline / LINEAGE_FILE).write_bytes(outlined_json(change(read_outline(outline)), 3))
    with pytest.raises(BrokenLineage, match=message):
        read_outline(outline)


def test_verdicts_that_quote_are_found_on_reading(outline: Path) -> None:
    line = read_lines(outline / VERDICTS, Verdict)[0]
    packed(outline / VERDICTS).write_bytes(gzip.compress(to_json(quoting(line)) + b"\n"))
    with pytest.raises(BrokenLineage, match=r"verdicts\.jsonl has more of the kernels"):
        read_outline(outline)


def test_unknown_fields_are_refused(outline: Path) -> None:
    path = outline / LINEAGE_FILE
    path.write_text(path.read_text().replace('"operator"', '"note":"","operator"', 1))
    with pytest.raises(BadRecord, match=r"lineage\.json"):
        read_outline(outline)


def test_an_edit_by_its_digest_does_not_apply() -> None:
    with pytest.raises(EditError, match="only the edit's digest"):
        apply_edit(Edit(kind=EditKind.DIGEST, diff="0" * 64), {"kernel.cpp": "a\n"})
