"""What a template imports before it forks: in order, tolerantly, and never past a module that has opened a GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pytest_klineage.worker import ahead
from pytest_klineage.worker.__main__ import main

STARTER = """
import sys
from pytest_klineage.worker import ahead
from pytest_klineage.worker.__main__ import main
ahead.touches_gpu = lambda: "colorsys" in sys.modules
main(["template", sys.argv[1], "--preload", "none:json,colorsys,wave"])
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [("none", ("none", ())), ("torch:", ("torch", ())), ("torch:a.b,c", ("torch", ("a.b", "c")))],
)
def test_a_preload_has_a_kind_and_modules(text: str, expected: tuple[str, tuple[str, ...]]) -> None:
    assert ahead.parsed(text) == expected


def test_a_kind_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="refused"):
        ahead.parsed("tensor:a")
    with pytest.raises(SystemExit):
        main(["template", "0", "--preload", "tensor"])
    assert "tensor" in capsys.readouterr().err


def test_modules_are_imported_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("first_ahead", "third_ahead"):
        (tmp_path / f"{name}.py").write_text("import tempfile\nfolder = tempfile.gettempdir()\n")
    (tmp_path / "second_ahead.py").write_text("raise RuntimeError('no device')\n")
    monkeypatch.setenv(ahead.INDUCTOR_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_WARM_POOL", "1")
    names = ("first_ahead", "second_ahead", "absent_ahead", "third_ahead")
    assert ahead.import_ahead(names, lambda: False) == names
    assert sys.modules["first_ahead"].folder == sys.modules["third_ahead"].folder == str(tmp_path / "cache")
    assert tempfile.gettempdir() != str(tmp_path / "cache")
    assert os.environ["TORCH_WARM_POOL"] == "0"


def test_what_opens_a_gpu_is_left_out_with_all_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WARM_POOL", "1")
    seen = iter([False, True])
    assert ahead.import_ahead(("json", "colorsys", "wave"), lambda: next(seen)) == ("json",)


def test_an_open_device_file_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not ahead.touches_gpu()
    monkeypatch.setattr(ahead, "DEVICE_FILES", str(tmp_path / "nvidia"))
    with (tmp_path / "nvidia0").open("w"):
        assert ahead.touches_gpu()
    assert not ahead.touches_gpu()


def test_a_template_begins_again_without_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, str(theirs.fileno())], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
        )
        theirs.close()
        command, deadline = Path(f"/proc/{process.pid}/cmdline"), time.monotonic() + 60
        while b"--preload\0none:json\0" not in command.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert b"--preload\0none:json\0" in command.read_bytes()
        ours.close()
        assert process.wait(60) == 0
