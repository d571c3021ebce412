"""What a contained process really cannot do, tried in a process of its own, with the benign counterpart of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONTAIN = """
import json, os, sys
from pytest_klineage.worker.sandbox import containment
workdir, readable, script = sys.argv[1:]
report = containment.limit_resources(LIMITS)
readable_paths = ["/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix, readable]
report += containment.restrict_files(readable_paths, [workdir])
os.chdir(workdir)
report += containment.filter_calls(allow_processes=False)
answers = {}
def attempt(name, function):
    try:
        answers[name] = ["done", str(function())]
    except BaseException as error:
        answers[name] = [type(error).__name__, str(error)]
exec(script)
print(json.dumps({"report": report, "answers": answers}))
"""

ATTEMPTS = """
import ctypes, signal, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
def raw(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def in_thread():
    seen = []
    thread = threading.Thread(target=seen.append, args=("ran",))
    thread.start()
    thread.join()
    return seen[0]
attempt("compute", lambda: sum(range(1000)))
attempt("thread", in_thread)
attempt("memory", lambda: len(bytearray(1 << 20)))
attempt("write inside", lambda: open("scratch", "w").write("x"))
attempt("read inside", lambda: open("scratch").read())
attempt("read allowed", lambda: open(os.path.join(readable, "kernel.txt")).read())
attempt("null", lambda: open("/dev/null", "w").write("x"))
attempt("random", lambda: len(os.urandom(4)))
attempt("own limits", lambda: __import__("resource").getrlimit(0))
attempt("signal itself", lambda: os.kill(os.getpid(), 0))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", 9), 1))
attempt("unix socket", lambda: socket.socket(socket.AF_UNIX))
attempt("fork", os.fork)
attempt("execute", lambda: os.execv("/bin/true", ["true"]))
attempt("spawn", lambda: __import__("subprocess").run(["/bin/true"]))
attempt("signal parent", lambda: os.kill(os.getppid(), 0))
attempt("signal all", lambda: os.kill(-1, 0))
attempt("session", os.setsid)
attempt("rights of a file", lambda: os.chmod(os.path.join(readable, "kernel.txt"), 0o644))
attempt("owner of a file", lambda: os.chown(os.path.join(readable, "kernel.txt"), -1, -1))
attempt("times of a file", lambda: os.utime(os.path.join(readable, "kernel.txt"), (1, 1)))
attempt("attribute of a file", lambda: os.setxattr("scratch", "user.mark", b"1"))
attempt("ptrace", lambda: raw(101 if os.uname().machine == "x86_64" else 117, 0, 0, 0, 0))
attempt("write outside", lambda: open("/tmp/klineage-outside", "w").write("x"))
attempt("write readable", lambda: open(os.path.join(readable, "kernel.txt"), "w").write("x"))
attempt("read outside", lambda: open("/etc/passwd").read())
attempt("list outside", lambda: os.listdir("/"))
attempt("rename out", lambda: os.rename("scratch", os.path.join(readable, "scratch")))
attempt("delete outside", lambda: os.remove(os.path.join(readable, "kernel.txt")))
attempt("link out", lambda: os.link(os.path.join(readable, "kernel.txt"), "link"))
attempt("through a symlink", lambda: (os.symlink("/etc/passwd", "way"), open("way").read()))
attempt("read parent", lambda: open(f"/proc/{os.getppid()}/environ").read())
"""
FORBIDDEN = {
    "seccomp": [
        "connect", "unix socket", "fork", "execute", "spawn", "signal parent", "signal all", "session", "ptrace",
        "rights of a file", "owner of a file", "times of a file", "attribute of a file",
    ],
    "landlock": [
        "write outside", "write readable", "read outside", "list outside", "rename out", "delete outside", "link out",
        "through a symlink", "read parent",
    ],
}  # fmt: skip
BENIGN = [
    "compute", "thread", "memory", "write inside", "read inside", "read allowed", "null", "random", "own limits",
    "signal itself",
]  # fmt: skip


def contained(directory: Path, script: str, limits: str = "") -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Run a script in a contained process. Returns the active mechanisms and what every attempt gave."""
    workdir, readable = directory / "work", directory / "readable"
    workdir.mkdir()
    readable.mkdir()
    (readable / "kernel.txt").write_text("kernel")
    command = [sys.executable, "-c", CONTAIN.replace("LIMITS", limits), str(workdir), str(readable), script]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    return result["report"], {name: tuple(value) for name, value in result["answers"].items()}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, tuple[str, str]]]:
    return contained(tmp_path_factory.mktemp("contained"), ATTEMPTS)


Result = tuple[list[str], dict[str, tuple[str, str]]]


@pytest.mark.parametrize("attempt", BENIGN)
def test_what_a_correct_kernel_does_still_works(attempt: str, outcome: Result) -> None:
    assert outcome[1][attempt][0] == "done", outcome[1][attempt]


@pytest.mark.parametrize(
    ("mechanism", "attempt"), [(mechanism, name) for mechanism, names in FORBIDDEN.items() for name in names]
)
def test_what_is_forbidden_fails(mechanism: str, attempt: str, outcome: Result) -> None:
    report, answers = outcome
    if not any(item.startswith(mechanism) for item in report):
        pytest.skip(f"this machine has no {mechanism}")
    assert answers[attempt][0] in ("PermissionError", "OSError"), answers[attempt]


def test_every_attempt_is_judged_by_one_of_the_tests(outcome: Result) -> None:
    assert set(outcome[1]) == {*BENIGN, *FORBIDDEN["seccomp"], *FORBIDDEN["landlock"]}


def test_nothing_was_written_outside(outcome: Result) -> None:
    if any(item.startswith("landlock") for item in outcome[0]):
        assert not Path("/tmp/klineage-outside").exists()


def test_files_and_descriptors_are_limited(tmp_path: Path) -> None:
    script = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "attempt('core', lambda: resource.getrlimit(resource.RLIMIT_CORE))\n"
        "attempt('large file', lambda: os.truncate(os.open('big', os.O_CREAT | os.O_RDWR), 1 << 40))\n"
        "attempt('many files', lambda: [os.open('/dev/null', os.O_RDONLY) for _ in range(1000)])\n"
        "attempt('raise limit', lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30)))\n"
    )
    report, answers = contained(tmp_path, script)
    assert "rlimits" in report
    assert answers["core"] == ("done", "(0, 0)")
    assert answers["large file"][0] == "OSError"
    assert answers["many files"][0] == "OSError"
    if os.geteuid() != 0:
        assert answers["raise limit"][0] == "ValueError"


def test_memory_is_limited(tmp_path: Path) -> None:
    script = (
        "import mmap\n"
        "attempt('some', lambda: len(mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))\n"
        "attempt('all', lambda: len(mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))\n"
    )
    _report, answers = contained(tmp_path, script)
    assert answers["some"][0] == "done"
    assert answers["all"][0] == "OSError"


def test_on_a_gpu_address_space_may_be_reserved_but_not_filled(tmp_path: Path) -> None:
    """Beside a driver that reserves a terabyte, private memory has its limit all the same."""
    script = (
        "import ctypes, mmap, resource\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "MAP_NORESERVE = 0x4000\n"
        "def taken(protection, size):\n"
        "    arguments = protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0\n"
        "    return libc.mmap(None, ctypes.c_size_t(size), *arguments) != ctypes.c_void_p(-1).value\n"
        "attempt('reserved', lambda: taken(0, 1 << 40))\n"
        "attempt('some', lambda: taken(mmap.PROT_READ | mmap.PROT_WRITE, 1 << 30))\n"
        "attempt('all', lambda: taken(mmap.PROT_READ | mmap.PROT_WRITE, 1 << 35))\n"
    )
    _report, answers = contained(tmp_path, script, limits="address_space=False")
    assert [answers[name][1] for name in ("reserved", "some", "all")] == ["True", "True", "False"]


def test_after_freezing_no_new_file_becomes_code(tmp_path: Path) -> None:
    script = (
        "import ctypes, mmap, threading\n"
        "libm = ctypes.CDLL('libm.so.6')\n"
        "libm.cos.restype = ctypes.c_double\n"
        "def map(rights, fd):\n"
        "    kind = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if fd < 0 else 0)\n"
        "    mmap.mmap(fd, 4096, flags=kind, prot=rights).close()\n"
        "report += containment.freeze_code()\n"
        "open('kernel.so', 'wb').write(bytes(4096))\n"
        "fd = os.open('kernel.so', os.O_RDWR)\n"
        "attempt('file as code', lambda: map(mmap.PROT_READ | mmap.PROT_EXEC, fd))\n"
        "attempt('file as data', lambda: map(mmap.PROT_READ, fd))\n"
        "attempt('memory', lambda: map(mmap.PROT_READ | mmap.PROT_WRITE, -1))\n"
        "attempt('loaded', lambda: libm.cos(ctypes.c_double(0.0)))\n"
        "thread = threading.Thread(target=attempt, args=('thread', int))\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    report, answers = contained(tmp_path, script)
    if "frozen-code" not in report:
        pytest.skip("this machine has no seccomp")
    assert answers.pop("file as code")[0] == "PermissionError"
    assert {name: answer[0] for name, answer in answers.items()} == dict.fromkeys(
        ("file as data", "memory", "loaded", "thread"), "done"
    )


def test_root_keeps_no_capability(tmp_path: Path) -> None:
    script = (
        "report += containment.drop_capabilities()\n"
        "attempt('device', lambda: os.mknod('device', 0o600 | 0o020000, os.makedev(1, 3)))\n"
        "attempt('file', lambda: open('scratch', 'w').write('x'))\n"
    )
    report, answers = contained(tmp_path, script)
    assert "capabilities" in report
    assert answers["device"][0] == "PermissionError"
    assert answers["file"][0] == "done"


def test_a_process_that_was_given_fewer_cores_cannot_take_more(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    script = (
        "every = os.sched_getaffinity(0)\n"
        "attempt('fewer', lambda: containment.limit_cores(1))\n"
        "attempt('count', lambda: len(os.sched_getaffinity(0)))\n"
        "attempt('again', lambda: containment.limit_cores(1))\n"
        "containment.filter_calls(allow_processes=False, allow_cores=False)\n"
        "attempt('all', lambda: os.sched_setaffinity(0, every))\n"
        "attempt('compute', lambda: sum(range(10)))\n"
    )
    report, answers = contained(tmp_path, script)
    assert [answers[name][1] for name in ("fewer", "count", "again")] == ["True", "1", "False"]
    if "seccomp" in report:
        assert answers["all"][0] == "PermissionError"
    assert answers["compute"][0] == "done"


def test_private_namespaces_hide_processes_and_network(tmp_path: Path) -> None:
    script = (
        "import json, os\n"
        "from pytest_klineage.worker.sandbox import containment\n"
        "active = containment.enter_namespaces()\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    interfaces = open('/proc/net/dev').read().count(':')\n"
        "    os.write(write, json.dumps([os.getpid(), os.getppid(), interfaces]).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(json.dumps([active, json.loads(os.read(read, 100))]))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    active, (pid, parent, interfaces) = json.loads(out)
    if "namespace:pid" not in active:
        pytest.skip("this machine allows no namespaces")
    assert (pid, parent) == (1, 0)
    assert interfaces <= 8
    assert {"namespace:network", "namespace:ipc"} <= set(active)


def test_a_process_dies_with_its_parent() -> None:
    child = (
        "import os, sys, time\n"
        "from pytest_klineage.worker.sandbox import containment\n"
        "containment.die_with_parent()\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)\n"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        # The pipe closes when the last process that holds it has ended.
        assert process.stdout.read() == ""
    assert pid > 0


def test_an_orphan_is_adopted_by_the_subreaper() -> None:
    script = (
        "import os\n"
        "from pytest_klineage.worker.sandbox import containment\n"
        "containment.become_subreaper()\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        "        os.read(read, 1)\n"
        "        os._exit(5)\n"
        "    os._exit(4)\n"
        "first = os.waitstatus_to_exitcode(os.wait()[1])\n"
        "os.write(write, b'x')\n"
        "print(first, os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out == "4 5\n"
