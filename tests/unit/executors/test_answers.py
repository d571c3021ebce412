"""Seals, and files of answers: what is believed, what is kept, what a crash leaves. The verdicts are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_klineage.cli.main import main
from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.executors.answers import Answers, Doubt
from pytest_klineage.executors.sealing import SECRET_VARIABLE, opened, read_secret, seal_reply, sealed
from pytest_klineage.records import Code, Reason, Verdict, to_json
from pytest_klineage.records.judging import FaultCode, JudgeReply, JudgeRequest, MachineFault

Ask = Callable[..., JudgeRequest]
FileOf = Callable[[Path], Answers]
SECRET = b"s" * 32


@pytest.fixture
def file_of() -> Iterator[Callable[[Path], Answers]]:
    """Opens files of answers, and closes them."""
    opened_files: list[Answers] = []

    def build(path: Path) -> Answers:
        opened_files.append(Answers(path, SECRET))
        return opened_files[-1]

    yield build
    for answers in opened_files:
        answers.close()


def reply_to(request: JudgeRequest, **fields: object) -> JudgeReply:
    code = Code.MISMATCH
    verdict = Verdict(
        case=request.case, status=code.status, reasons=(Reason(code=code, message="wrong"),),
        source_digest=request.source.digest,
    )  # fmt: skip
    return msgspec.structs.replace(JudgeReply(request=request.digest, verdict=verdict), **fields)


def test_a_seal_is_of_one_secret_and_one_content() -> None:
    line = sealed(b'{"a":1}', SECRET)
    assert opened(line, SECRET) == b'{"a":1}'
    for other in (line.replace(b'"a":1', b'"a":2'), sealed(b'{"a":1}', b"t" * 32), b'{"a":1}', b"\x80\x04N."):
        with pytest.raises(BadRecord):
            opened(other, SECRET)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [(None, 0o600, "openssl rand"), (b"short", 0o600, "less than 32 bytes"), (SECRET, 0o644, "chmod 600")],
    ids=["absent", "short", "open to all"],
)
def test_a_secret_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, mode: int, said: str
) -> None:
    path = tmp_path / "secret"
    monkeypatch.setenv(SECRET_VARIABLE, str(path))
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(UsageError, match=said):
        read_secret()


def test_the_first_verdict_stays(tmp_path: Path, ask: Ask, file_of: FileOf) -> None:
    request = ask()
    answers = file_of(tmp_path / "run.jsonl")
    ticket = answers.ticket(request.digest)
    fault = MachineFault(code=FaultCode.DIED, message="lost")
    answers.add(seal_reply(JudgeReply(request=request.digest, fault=fault), SECRET))
    assert answers.get(request.digest).fault == fault  # type: ignore[union-attr]  # just added
    answers.add(seal_reply(reply_to(request, attempt=2), SECRET))
    answers.add(seal_reply(reply_to(request, attempt=3), SECRET))
    answers.close()
    again = file_of(tmp_path / "run.jsonl")
    assert again.ticket(request.digest) == ticket
    assert again.get(request.digest) == reply_to(request, attempt=2)
    assert len(again) == 1


def test_a_fault_is_asked_again_by_the_next_run(tmp_path: Path, ask: Ask, file_of: FileOf) -> None:
    answers = file_of(tmp_path / "run.jsonl")
    fault = MachineFault(code=FaultCode.DIED, message="lost")
    answers.add(seal_reply(JudgeReply(request=ask().digest, fault=fault), SECRET))
    answers.close()
    assert not file_of(tmp_path / "run.jsonl").has(ask().digest)


def test_what_a_crash_cut_short_is_left_out(tmp_path: Path, ask: Ask, file_of: FileOf) -> None:
    path = tmp_path / "run.jsonl"
    whole, cut = (seal_reply(reply_to(ask(text)), SECRET) for text in ("", "// cut"))
    path.write_bytes(whole + b"\n" + cut[:100])
    answers = file_of(path)
    assert len(answers) == 1
    answers.add(cut)
    answers.close()
    again = file_of(path)
    assert len(again) == 2
    assert again.refused == 1


def test_merging_collects_what_all_judges_wrote(
    tmp_path: Path, ask: Ask, file_of: FileOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two judges, one of them twice asked, a lost asker's tickets, a doubt, and a line with another seal."""
    first, second = ask(), ask("// second")
    for name, requests in (("one", [first]), ("two", [first, second])):
        answers = file_of(tmp_path / f"{name}.jsonl")
        for request in requests:
            answers.add(seal_reply(reply_to(request, judge=name), SECRET))
        answers.close()
    asker = file_of(tmp_path / "asker.jsonl")
    doubt = Doubt(request=first.digest, ticket=asker.ticket(first.digest), judge="one", why="canary")
    asker.add_doubt(sealed(to_json(doubt), SECRET))
    asker.close()
    with (tmp_path / "two.jsonl").open("ab") as file:
        file.write(seal_reply(reply_to(ask("// forged")), b"t" * 32) + b"\n")
    monkeypatch.setenv(SECRET_VARIABLE, str(tmp_path / "secret"))
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two", "asker")]
    assert main(["results", "merge", *files, "--output", str(tmp_path / "all.jsonl")]) == 0
    assert "2 verdicts, 1 of them in doubt; 1 lines refused" in capsys.readouterr().out
    merged = file_of(tmp_path / "all.jsonl")
    assert merged.get(first.digest) == reply_to(first, judge="one")
    assert merged.doubts == {first.digest: doubt}
    assert merged.tickets == {first.digest: doubt.ticket}


def test_merging_names_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, str(tmp_path / "secret"))
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    assert main(["results", "merge", str(tmp_path / "no.jsonl"), "--output", str(tmp_path / "all.jsonl")]) == 1
