"""Baselines on disk: what is pinned comes back, what was edited or half written does not pass for it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_klineage.errors import BadRecord, StoreError, UsageError
from pytest_klineage.records import Code, Interval, KernelCase, Machine, Reason, Timing, Verdict
from pytest_klineage.results.baselines import (
    baseline_path,
    find_baselines,
    numbered,
    pins_of,
    read_baseline,
    save_pins,
)


def verdict(
    code: Code = Code.ACCEPTED_FASTER, *, device: str = "Test CPU", label: str = "mine", **fields: object
) -> Verdict:
    timing = Timing(
        policy="paired", reference_ms=1.5, candidate_ms=1.0, speedup=Interval(1.5, 1.4, 1.6), warmup=3, flush_bytes=0,
        reference_samples_ms=(1.4, 1.5, 1.6), candidate_samples_ms=(0.9, 1.0, 1.1), statistic="", starts=(0, 2),
    )  # fmt: skip
    given: dict[str, object] = {
        "case": KernelCase(operator="gemm", shape={"M": 2, "N": 2, "K": 2}, dtype="fp32", reference="torch"),
        "machine": Machine(platform="cpu", device=device), "timing": timing if code.status.value in (
            "accepted", "slower", "inconclusive") else None,
        "judged_at": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    reason = Reason(code=code, message="so")
    return Verdict(status=code.status, reasons=(reason,), label=label, **{**given, **fields})  # type: ignore[arg-type]


def saved(root: Path, *verdicts: Verdict, name: str = "main") -> list[Path]:
    pins, _ = pins_of((f"test_{item.label}", item) for item in verdicts)
    return [path for path, _ in save_pins(root, name, pins)]


def test_what_was_pinned_comes_back(tmp_path: Path) -> None:
    first = verdict(reference={"torch": "2.13"}, source_digest="ab")
    (path,) = saved(tmp_path, first)
    assert path == tmp_path / "baselines" / "cpu" / "test-cpu" / "main.json"
    baseline = read_baseline(path)
    assert (baseline.name, baseline.platform, baseline.device) == ("main", "cpu", "Test CPU")
    (pin,) = baseline.pins
    assert (pin.timing, pin.case, pin.machine) == (first.timing, first.case, first.machine)
    assert (pin.reference, pin.source_digest, pin.pinned_at) == ({"torch": "2.13"}, "ab", first.judged_at)
    assert find_baselines(tmp_path, "main") == [baseline]
    assert find_baselines(tmp_path, "other") == []


def test_both_judgements_are_pinned_and_neither_may_be_edited(tmp_path: Path) -> None:
    first, second = verdict(), verdict(judged_at="a moment later")
    key = ("test", first.case.id, "mine", 0)
    pins, left = pins_of([("test", first)], {key: second})
    assert ([pin.again for pin in pins], left) == ([second.timing], [])
    ((path, _),) = save_pins(tmp_path, "main", pins)
    text = path.read_text()
    assert read_baseline(path).pins == tuple(pins)
    end = text.rindex("1.6")
    path.write_text(f"{text[:end]}9.9{text[end + 3 :]}")
    with pytest.raises(BadRecord, match="are not those that were pinned"):
        read_baseline(path)


def test_what_was_busy_or_wrong_the_second_time_is_not_pinned() -> None:
    for code in (Code.INCONCLUSIVE_BUSY, Code.MISMATCH):
        first, second = verdict(), verdict(code)
        pins, left = pins_of([("test", first)], {("test", first.case.id, "mine", 0): second})
        assert (pins, left) == ([], [f"{first.case.id} mine is {code.value}"])


def test_every_device_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = saved(tmp_path, verdict(), verdict(device="AMD EPYC (TM) 9/x"))
    assert [path.parent.name for path in paths] == ["test-cpu", "amd-epyc-tm-9-x"]
    assert {baseline.device for baseline in find_baselines(tmp_path, "main")} == {"Test CPU", "AMD EPYC (TM) 9/x"}


def test_a_part_is_repinned_and_the_rest_stays(tmp_path: Path) -> None:
    saved(tmp_path, verdict(), verdict(label="other"))
    (path,) = saved(tmp_path, verdict(judged_at="later"))
    assert {pin.label: pin.pinned_at for pin in read_baseline(path).pins} == {
        "mine": "later", "other": "2026-01-02T03:04:05Z",
    }  # fmt: skip


def test_what_was_not_timed_on_a_quiet_machine_is_not_pinned() -> None:
    codes = (Code.MISMATCH, Code.SKIPPED_PLATFORM, Code.INCONCLUSIVE_BUSY, Code.SLOWER_THAN_REQUIRED)
    pins, left = pins_of(("test", verdict(code)) for code in codes)
    assert [pin.status.value for pin in pins] == ["slower"]
    assert left == [
        "gemm-2x2x2-fp32 mine is wrong_value.mismatch",
        "gemm-2x2x2-fp32 mine is skipped.platform",
        "gemm-2x2x2-fp32 mine is inconclusive.busy_machine",
    ]


def test_several_verdicts_of_one_test_are_distinguished() -> None:
    pairs = [("a", verdict()), ("a", verdict()), ("b", verdict()), ("a", verdict(label="other"))]
    assert numbered(pairs) == [0, 1, 0, 0]
    assert len({pin.key for pin in pins_of(pairs)[0]}) == 4


def test_edited_samples_are_refused(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, verdict())
    edited = path.read_text().replace("0.9,", "0.8,")
    assert edited != path.read_text()
    path.write_text(edited)
    with pytest.raises(BadRecord, match=r"the samples of gemm-2x2x2-fp32 mine .* --klineage-save=main"):
        read_baseline(path)


@pytest.mark.parametrize("text", ["", '{"name": "main", "pl', "[]", '{"name": "main"}'])
def test_a_half_written_file_is_refused(tmp_path: Path, text: str) -> None:
    (path,) = saved(tmp_path, verdict())
    path.write_text(text)
    with pytest.raises(BadRecord, match=r"main\.json: not a valid Baseline.*--klineage-save=main"):
        find_baselines(tmp_path, "main")


def test_another_schema_version_is_named(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, verdict())
    plain = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**plain, "schema_version": 99}))
    with pytest.raises(BadRecord, match="schema version 99"):
        read_baseline(path)


def test_a_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--klineage-save=main makes it"):
        read_baseline(tmp_path / "main.json")


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "baselines").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        saved(tmp_path, verdict())


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "-x", "a b", "x" * 101])
def test_a_name_that_could_not_be_a_files_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="a baseline is called by"):
        baseline_path(tmp_path, "cpu", "Test CPU", name)
