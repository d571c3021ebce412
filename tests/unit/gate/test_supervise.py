"""The judge's processes, for real: what they may know, how they start, answer and end, and what they leave behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_klineage.channel import Channel
from pytest_klineage.errors import DeadlineExceeded, MissingDependency, WorkerDied
from pytest_klineage.gate.host.cpu import family_ticks
from pytest_klineage.gate.host.hosts import host_for
from pytest_klineage.gate.supervise import (
    LOG_FLOOD_BYTES,
    LOG_KEPT_BYTES,
    LogDrain,
    Processes,
    Worker,
    WorkerProcess,
    worker_environment,
)
from pytest_klineage.records.messages import FromWorker, Job, KernelLoaded, LoadFailed, StopWorker
from pytest_klineage.records.template_messages import WorkerExit

Start = Callable[..., tuple[Worker, Channel]]
CHURN = """
import resource

def blocks():
    return [bytearray(3 << 20) for _ in range(3)]

for _ in range(3):
    blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    blocks()
raise RuntimeError(f"{resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before} page faults")
"""
"""27 MB of memory in nine blocks, after as much of it has been freed: 6900 pages of 4 KiB."""


@pytest.fixture(scope="module")
def template() -> Iterator[WorkerProcess]:
    """A template without torch."""
    process = WorkerProcess("template", threads=1)
    yield process
    process.close()


@pytest.fixture
def start(template: WorkerProcess, tmp_path: Path) -> Iterator[Start]:
    """Start a worker that imports a kernel in Python; returns it with the oracle's end of its channel."""
    workers: list[Worker] = []

    def start(text: str, **fields: bool) -> tuple[Worker, Channel]:
        (tmp_path / "kernel.py").write_text(text)
        worker = Worker(template, Job(surface="python", artifact=str(tmp_path), entry="run", **fields))
        workers.append(worker)
        return worker, Channel(worker.oracle_end)

    yield start
    for worker in workers:
        worker.end()


def answer(channel: Channel) -> FromWorker:
    message: FromWorker = channel.receive(FromWorker, timeout_s=30)
    return message


def processes_named(word: str) -> list[int]:
    """Ids of the processes with this word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


class TestEnvironment:
    def test_only_a_few_variables_of_the_caller_are_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("API_KEY", "secret")
        monkeypatch.setenv("LD_PRELOAD", "")
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        environment = worker_environment(3)
        assert environment["PATH"] == "/usr/bin:/bin"
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
        assert not {"API_KEY", "LD_PRELOAD", "HOME"} & set(environment)

    def test_relative_import_paths_become_absolute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", "/opt/x"]))
        assert worker_environment(1)["PYTHONPATH"] == os.pathsep.join([os.getcwd(), "/opt/x"])

    def test_a_secret_of_the_judge_is_not_visible_to_the_worker(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("API_KEY", "open-sesame")
        (tmp_path / "kernel.py").write_text(
            "import os\n"
            "paths = '/proc/self/environ', f'/proc/{os.getppid()}/environ'\n"
            "raise RuntimeError(dict(os.environ), [open(path).read() for path in paths])\n"
        )
        processes = Processes(1)
        try:
            job = Job(surface="python", artifact=str(tmp_path), entry="run", sandbox=False)
            worker = Worker(processes.template("none"), job)
            failed = answer(Channel(worker.oracle_end))
            worker.end()
        finally:
            processes.close()
        assert isinstance(failed, LoadFailed)
        assert failed.message.count("OMP_NUM_THREADS") == 3
        assert "open-sesame" not in failed.message

    def test_the_worker_gets_neutral_variables_and_private_dirs(self, start: Start) -> None:
        worker, channel = start("import os\nraise RuntimeError(sorted(os.environ.items()))\n")
        failed = answer(channel)
        assert isinstance(failed, LoadFailed)
        names = ("HOME", "LC_ALL", "OMP_NUM_THREADS", "PATH", "TMPDIR", "XDG_CACHE_HOME")
        assert all(f"'{name}'" in failed.message for name in names)
        assert f"('HOME', '{worker.workdir}')" in failed.message
        assert "PYTHONPATH" not in failed.message

    def test_the_worker_inherits_no_descriptor_but_its_own(self, start: Start) -> None:
        _worker, channel = start("import os\nraise RuntimeError(os.listdir('/proc/self/fd'))\n", sandbox=False)
        failed = answer(channel)
        assert isinstance(failed, LoadFailed)
        # Input, output, error, the channel, and the directory that is being listed.
        assert "['0', '1', '2', '3', '4']" in failed.message

    def test_a_sandboxed_worker_cannot_read_the_judges_process(self, start: Start) -> None:
        _worker, channel = start(f"open('/proc/{os.getpid()}/environ').read()\ndef run(): pass\n")
        message = answer(channel)
        if isinstance(message, LoadFailed):
            assert "PermissionError" in message.message or "FileNotFoundError" in message.message
        else:
            pytest.skip("this machine offers no containment that hides processes")


class TestLogDrain:
    def write(self, drain: LogDrain, *pieces: bytes) -> str:
        fd = os.dup(drain.write_fd)
        drain.start()
        for piece in pieces:
            os.write(fd, piece)
        os.close(fd)
        return drain.text()

    def test_a_short_log_is_kept_whole(self) -> None:
        assert self.write(LogDrain(), b"tile ", b"3\n") == "tile 3\n"

    def test_a_long_log_is_drained_and_its_beginning_kept(self) -> None:
        drain = LogDrain()
        text = self.write(drain, b"first", *[b"x" * 65536] * 20, b"last")
        assert text.startswith("first")
        assert len(text) == len(drain.kept) == LOG_KEPT_BYTES
        assert drain.total == 20 * 65536 + 9
        assert not drain.flooded

    def test_a_flood_is_seen(self) -> None:
        drain = LogDrain()
        self.write(drain, *[b"x" * 65536] * (LOG_FLOOD_BYTES // 65536 + 1))
        assert drain.flooded
        assert len(drain.kept) == LOG_KEPT_BYTES

    def test_bytes_that_are_no_text_are_replaced(self) -> None:
        assert self.write(LogDrain(), b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"

    def test_nothing_printed_is_an_empty_text(self) -> None:
        assert self.write(LogDrain()) == ""


class TestWorker:
    def test_a_loaded_worker_stops_with_status_0(self, start: Start) -> None:
        worker, channel = start("def run(): pass\n")
        assert isinstance(answer(channel), KernelLoaded)
        channel.send(StopWorker())
        ended = worker.end(grace_s=30)
        assert (ended.exit_code, ended.signal) == (0, None)

    def test_a_worker_ends_by_itself_when_the_oracle_is_gone(self, start: Start) -> None:
        worker, channel = start("def run(): pass\n")
        answer(channel)
        channel.close()
        assert worker.end(grace_s=30).exit_code == 0

    def test_a_worker_that_lives_on_is_killed(self, start: Start) -> None:
        worker, _channel = start("import time\ntime.sleep(600)\n")
        ended = worker.end()
        assert (ended.exit_code, ended.signal) == (None, None)

    @pytest.mark.parametrize(
        ("how", "exit_code", "number"),
        [
            ("import os\nos._exit(7)", 7, None),
            ("import ctypes\nctypes.string_at(0)", None, signal.SIGSEGV),
        ],
    )
    def test_how_it_ended_is_reported(self, how: str, exit_code: int | None, number: int | None, start: Start) -> None:
        worker, _channel = start(how)
        ended = worker.end(grace_s=30)
        assert (ended.exit_code, ended.signal) == (exit_code, number)

    def test_ending_twice_gives_the_same_answer(self, start: Start) -> None:
        worker, _channel = start("import os\nos._exit(7)")
        assert worker.end(grace_s=30) is worker.end()

    def test_its_private_directory_goes_with_it(self, start: Start) -> None:
        worker, channel = start("open('scratch', 'w').write('x')\ndef run(): pass\n")
        assert isinstance(answer(channel), KernelLoaded)
        assert (Path(worker.workdir) / "scratch").exists()
        worker.end()
        assert not Path(worker.workdir).exists()

    def test_what_it_prints_goes_to_its_log(self, start: Start) -> None:
        worker, channel = start(
            "import os, sys\nprint('out', flush=True)\nos.write(2, b'err')\n"
            "assert sys.stdin.read() == ''\ndef run(): pass\n"
        )
        assert isinstance(answer(channel), KernelLoaded)
        worker.end()
        assert worker.log.text() == "out\nerr"

    @pytest.mark.parametrize("sandbox", [True, False])
    def test_orphans_that_changed_their_session_end_with_it(self, sandbox: bool, start: Start) -> None:
        name = f"60{os.getpid()}.0{int(sandbox)}"
        worker, channel = start(
            "import os\n"
            "if os.fork() == 0:\n"
            "    os.setpgid(0, 0)\n"
            "    if os.fork() == 0:\n"
            f"        os.execv('/bin/sleep', ['sleep', {name!r}])\n"
            "    os._exit(0)\n"
            "os.wait()\n"
            "def run(): pass\n",
            sandbox=sandbox,
            allow_processes=True,
        )
        assert isinstance(answer(channel), KernelLoaded)
        until(lambda: processes_named(name) != [])
        worker.end()
        until(lambda: processes_named(name) == [])

    def test_two_workers_of_one_template_live_and_end_apart(self, start: Start) -> None:
        first, one = start("def run(): pass\n")
        second, two = start("def run(): pass\n")
        assert isinstance(answer(one), KernelLoaded)
        assert isinstance(answer(two), KernelLoaded)
        first.end()
        two.send(StopWorker())
        assert second.end(grace_s=30).exit_code == 0

    def test_a_template_survives_a_hundred_ends_of_nothing(self, template: WorkerProcess, start: Start) -> None:
        worker, _channel = start("def run(): pass\n")
        worker.end()
        worker.ended = None
        assert worker.end() == WorkerExit()
        assert template.process.poll() is None


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; fail when it has not after half a minute."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestProcesses:
    def test_a_killed_template_is_reported_as_dead(self) -> None:
        process = WorkerProcess("template", threads=1)
        try:
            process.process.kill()
            with pytest.raises(WorkerDied, match=r"template process ended .*It printed nothing") as caught:
                Worker(process, Job(surface="python"))
            assert caught.value.killed
        finally:
            process.close()

    def test_a_process_that_dies_is_quoted(self) -> None:
        process = WorkerProcess("template", threads=1, environment={"PYTHONHOME": "/nonexistent"})
        try:
            with pytest.raises(WorkerDied, match=r"(?s)It printed: .*encodings") as caught:
                Worker(process, Job(surface="python"))
            assert not caught.value.killed
        finally:
            process.close()

    def test_a_missing_torch_is_reported_with_its_remedy(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
        paths = os.pathsep.join([str(tmp_path), worker_environment(1).get("PYTHONPATH", "")])
        process = WorkerProcess("oracle", threads=1, environment={"PYTHONPATH": paths})
        try:
            with pytest.raises(MissingDependency, match=r"pip install 'pytest-klineage\[cpu\]'"):
                process.ask(StopWorker(), FromWorker, 60)
        finally:
            process.close()

    def test_a_silent_process_is_not_waited_for_forever(self, template: WorkerProcess) -> None:
        process = WorkerProcess("template", threads=1)
        try:
            process.process.send_signal(signal.SIGSTOP)
            with pytest.raises(DeadlineExceeded, match=r"did not answer within 0.05 s"):
                process.ask(StopWorker(), FromWorker, 0.05)
        finally:
            process.close()
        assert process.process.poll() is not None

    def test_templates_are_started_once_and_again_after_closing(self) -> None:
        processes = Processes(1)
        try:
            first = processes.template("none")
            assert processes.template("none") is first
            processes.close()
            assert first.process.poll() is not None
            assert processes.template("none") is not first
        finally:
            processes.close()

    @pytest.mark.parametrize("sandbox", [True, False])
    def test_the_cpu_time_of_an_ended_worker_is_that_of_the_family(self, start: Start, sandbox: bool) -> None:
        before = family_ticks(os.getpid())
        worker, channel = start(
            "import time\nwhile time.process_time() < 1.0:\n    pass\nrun = print\n", sandbox=sandbox
        )
        assert isinstance(answer(channel), KernelLoaded)
        worker.end()
        assert family_ticks(os.getpid()) - before >= 0.9 * os.sysconf("SC_CLK_TCK")

    @pytest.mark.parametrize(("environment", "faults"), [(host_for("cpu", "all").environment, False), ({}, True)])
    def test_memory_that_a_kernel_frees_stays_with_its_process(
        self, environment: dict[str, str], faults: bool, tmp_path: Path
    ) -> None:
        (tmp_path / "kernel.py").write_text(CHURN)
        processes = Processes(1, environment)
        try:
            worker = Worker(processes.template("none"), Job(surface="python", artifact=str(tmp_path), entry="run"))
            failed = answer(Channel(worker.oracle_end))
            worker.end()
        finally:
            processes.close()
        assert isinstance(failed, LoadFailed)
        found = re.search(r"(\d+) page faults", failed.message)
        assert found is not None
        assert (int(found[1]) > 1000) is faults

    def test_a_template_that_died_is_replaced(self) -> None:
        processes = Processes(1)
        try:
            processes.template("none").process.kill()
            with pytest.raises(WorkerDied):
                Worker(processes.template("none"), Job(surface="python"))
            worker = Worker(processes.template("none"), Job(surface="python"))
            worker.end()
        finally:
            processes.close()

    @pytest.mark.parametrize("how", ["close", "abort"])
    def test_closing_ends_the_workers_too(self, how: str, tmp_path: Path) -> None:
        name = f"61{os.getpid()}.0"
        (tmp_path / "kernel.py").write_text(f"import os\nos.execv('/bin/sleep', ['sleep', {name!r}])\n")
        processes = Processes(1)
        job = Job(surface="python", artifact=str(tmp_path), entry="run", sandbox=False)
        worker = Worker(processes.template("none"), job)
        until(lambda: processes_named(name) != [])
        getattr(processes, how)()
        worker.discard()
        until(lambda: processes_named(name) == [])
