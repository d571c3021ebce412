"""The system call filter, read instruction by instruction as the kernel reads it, for every call number."""

from __future__ import annotations

import platform
import re
import struct
import subprocess
from pathlib import Path

import pytest

from pytest_klineage.surfaces.cpp import find_compiler
from pytest_klineage.worker.sandbox import containment
from pytest_klineage.worker.sandbox.containment import (
    AUDIT_ARCH,
    CLONE_THREAD,
    COMPILERS_CALLS,
    CONDITIONAL_CALLS,
    ENOSYS,
    EPERM,
    FILE_FLAGS,
    RET_ALLOW,
    RET_ERRNO,
    RET_KILL,
    SYSCALLS,
    seccomp_program,
)

Program = list[tuple[int, int, int, int]]
OWN_PID = 4321
MACHINES = sorted(SYSCALLS)
HARMLESS = {
    "x86_64": {"read": 0, "write": 1, "mmap": 9, "munmap": 11, "brk": 12, "futex": 202, "exit_group": 231},
    "aarch64": {"read": 63, "write": 64, "mmap": 222, "munmap": 215, "brk": 214, "futex": 98, "exit_group": 94},
}
REFUSED, ABSENT = RET_ERRNO | EPERM, RET_ERRNO | ENOSYS
BPF_ALU_JUMPS = {0x15: int.__eq__, 0x35: int.__ge__, 0x45: lambda value, mask: bool(value & mask)}


def run(program: Program, number: int, *arguments: int, architecture: int) -> int:
    """What a classic BPF machine returns for one call: `struct seccomp_data` in, action out."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *(value & (2**64 - 1) for value in padded))
    accumulator, position = 0, 0
    while True:
        code, jump_true, jump_false, value = program[position]
        position += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            assert value % 4 == 0
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:  # BPF_RET | BPF_K
            return value
        else:
            position += jump_true if BPF_ALU_JUMPS[code](accumulator, value) else jump_false


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[False, True], ids=["no-processes", "processes"])
def allow_processes(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def program_for(machine: str, *, allow_processes: bool = False) -> Program:
    return seccomp_program(SYSCALLS[machine], AUDIT_ARCH[machine], OWN_PID, allow_processes=allow_processes)


def answer(machine: str, name: str, *arguments: int, allow_processes: bool = False) -> int:
    program = program_for(machine, allow_processes=allow_processes)
    number = (SYSCALLS[machine] | HARMLESS[machine])[name]
    return run(program, number, *arguments, architecture=AUDIT_ARCH[machine])


def test_every_path_through_the_program_ends_in_a_return(machine: str, allow_processes: bool) -> None:
    program = program_for(machine, allow_processes=allow_processes)
    open_positions, seen = [0], set()
    while open_positions:
        position = open_positions.pop()
        assert position < len(program)
        if position in seen:
            continue
        seen.add(position)
        code, jump_true, jump_false, _value = program[position]
        if code in BPF_ALU_JUMPS:
            open_positions += [position + 1 + jump_true, position + 1 + jump_false]
        elif code == 0x20:
            open_positions.append(position + 1)
        else:
            assert code == 0x06
    assert seen == set(range(len(program))), "dead instructions"


def test_every_instruction_fits_its_encoding(machine: str, allow_processes: bool) -> None:
    program = program_for(machine, allow_processes=allow_processes)
    assert len(program) <= 4096
    for instruction in program:
        assert len(struct.pack("<HBBI", *instruction)) == 8


def test_every_return_is_one_of_the_four_actions(machine: str, allow_processes: bool) -> None:
    program = program_for(machine, allow_processes=allow_processes)
    actions = {value for code, _true, _false, value in program if code == 0x06}
    assert actions <= {RET_ALLOW, RET_KILL, REFUSED, ABSENT}


def test_every_call_number_gets_the_answer_of_the_list(machine: str, allow_processes: bool) -> None:
    program = program_for(machine, allow_processes=allow_processes)
    denied = {
        number
        for name, number in SYSCALLS[machine].items()
        if name not in CONDITIONAL_CALLS and not (allow_processes and name in COMPILERS_CALLS)
    }
    conditional = {SYSCALLS[machine][name] for name in CONDITIONAL_CALLS}
    for number in set(range(600)) - conditional:
        expected = REFUSED if number in denied else RET_ALLOW
        assert run(program, number, architecture=AUDIT_ARCH[machine]) == expected, number


def test_what_any_kernel_needs_is_allowed(machine: str, allow_processes: bool) -> None:
    for name in HARMLESS[machine]:
        assert answer(machine, name, 1, 2, 3, allow_processes=allow_processes) == RET_ALLOW


@pytest.mark.parametrize(
    "name", ["ptrace", "process_vm_readv", "socket", "unshare", "mount", "perf_event_open", "io_uring_setup", "bpf"]
)
def test_reaching_out_is_refused(name: str, machine: str, allow_processes: bool) -> None:
    assert answer(machine, name, allow_processes=allow_processes) == REFUSED


def test_threads_are_allowed_and_processes_are_not(machine: str) -> None:
    glibc_thread = 0x3D0F00  # what pthread_create asks for
    assert glibc_thread & CLONE_THREAD
    assert answer(machine, "clone", glibc_thread) == RET_ALLOW
    for flags in (0, 17, 0x01200011, glibc_thread & ~CLONE_THREAD, 0x4011):
        assert answer(machine, "clone", flags) == REFUSED


def test_clone3_is_said_to_be_absent_so_that_libc_uses_clone(machine: str) -> None:
    assert answer(machine, "clone3", 0x7FFF0000) == ABSENT


@pytest.mark.parametrize("name", COMPILERS_CALLS)
def test_what_compilers_call_is_allowed_on_request_only(name: str, machine: str) -> None:
    if name not in SYSCALLS[machine]:
        pytest.skip(f"{machine} has no {name}")
    assert answer(machine, name) == REFUSED
    assert answer(machine, name, allow_processes=True) == RET_ALLOW


def test_clone_is_free_where_processes_are_allowed(machine: str) -> None:
    for name in ("clone", "clone3"):
        assert answer(machine, name, 17, allow_processes=True) == RET_ALLOW


@pytest.mark.parametrize("name", ["kill", "tkill", "tgkill"])
def test_a_process_may_signal_only_itself(name: str, machine: str) -> None:
    assert answer(machine, name, OWN_PID, 6) == RET_ALLOW
    for other in (0, 1, -1, -OWN_PID, OWN_PID + 1, OWN_PID - 1, 2**31 - 1):
        assert answer(machine, name, other, 9) == REFUSED


def test_limits_of_other_processes_are_out_of_reach(machine: str, allow_processes: bool) -> None:
    assert answer(machine, "prlimit64", 0, 7, allow_processes=allow_processes) == RET_ALLOW
    assert answer(machine, "prlimit64", 1, 7, allow_processes=allow_processes) == REFUSED


def test_pages_that_are_there_stay_as_they_are(machine: str) -> None:
    huge, collapse, cold = 14, 25, 20
    for advice in (huge, cold, 4):
        assert answer(machine, "madvise", 4096, 4096, advice) == RET_ALLOW
    assert answer(machine, "madvise", 4096, collapse, collapse) == REFUSED
    assert answer(machine, "madvise", collapse, collapse, huge) == RET_ALLOW
    assert answer(machine, "process_madvise", 3, 0, 1, cold) == REFUSED


def test_attributes_of_files_are_not_for_ioctl_either(machine: str, allow_processes: bool) -> None:
    for command in FILE_FLAGS:
        assert answer(machine, "ioctl", 3, command, allow_processes=allow_processes) == REFUSED
    assert answer(machine, "ioctl", FILE_FLAGS[0], 0x5401, allow_processes=allow_processes) == RET_ALLOW


def test_another_architecture_is_killed(machine: str) -> None:
    i386 = 0x40000003
    for number in (0, 11, 120):
        assert run(program_for(machine), number, architecture=i386) == RET_KILL


def test_the_x32_numbers_do_not_go_round_the_list() -> None:
    program = program_for("x86_64")
    for number in (0x40000000, 0x40000000 | 57, 0x40000000 | 520, 0xFFFFFFFF):
        assert run(program, number, architecture=AUDIT_ARCH["x86_64"]) == REFUSED


def test_constants_match_the_system_headers(tmp_path: Path) -> None:
    machine = platform.machine()
    if machine not in SYSCALLS:
        pytest.skip(f"no list for {machine}")
    names = SYSCALLS[machine] | HARMLESS[machine]
    constants = {
        "AUDIT_ARCH_X86_64" if machine == "x86_64" else "AUDIT_ARCH_AARCH64": AUDIT_ARCH[machine],
        "SECCOMP_RET_ALLOW": RET_ALLOW,
        "SECCOMP_RET_ERRNO": RET_ERRNO,
        "CLONE_THREAD": CLONE_THREAD,
        "CLONE_NEWNET": containment.CLONE_NEWNET,
        "CLONE_NEWIPC": containment.CLONE_NEWIPC,
        "CLONE_NEWPID": containment.CLONE_NEWPID,
        "CLONE_NEWUSER": containment.CLONE_NEWUSER,
        "PR_SET_NO_NEW_PRIVS": containment.PR_SET_NO_NEW_PRIVS,
        "PR_SET_SECCOMP": containment.PR_SET_SECCOMP,
        "PR_SET_DUMPABLE": containment.PR_SET_DUMPABLE,
        "PR_SET_PDEATHSIG": containment.PR_SET_PDEATHSIG,
        "PR_SET_CHILD_SUBREAPER": containment.PR_SET_CHILD_SUBREAPER,
        "SECCOMP_MODE_FILTER": containment.SECCOMP_MODE_FILTER,
        "EPERM": EPERM,
        "ENOSYS": ENOSYS,
    }
    printed = "\n".join(f'printf("{name} %lld\\n", (long long){name});' for name in constants)
    numbers = "\n".join(f'#ifdef __NR_{name}\nprintf("nr:{name} %d\\n", __NR_{name});\n#endif' for name in names)
    includes = (
        "errno.h",
        "stdio.h",
        "asm/unistd.h",
        "linux/audit.h",
        "linux/seccomp.h",
        "linux/sched.h",
        "linux/prctl.h",
    )
    text = "".join(f"#include <{name}>\n" for name in includes) + f"int main() {{\n{printed}\n{numbers}\n}}\n"
    (tmp_path / "numbers.cpp").write_text(text)
    program = tmp_path / "numbers"
    subprocess.run([find_compiler(), str(tmp_path / "numbers.cpp"), "-o", str(program)], check=True)
    seen = dict(re.findall(r"(\S+) (\S+)\n", subprocess.run([program], capture_output=True, text=True).stdout))
    assert {name: int(seen[name]) for name in constants} == constants
    known = {name: int(seen[f"nr:{name}"]) for name in names if f"nr:{name}" in seen}
    assert known == {name: names[name] for name in known}
    assert len(known) > 30


@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        ("fcntl", (3, 1), True), ("fcntl", (3, 4, 0x800), True), ("fcntl", (3, 1030), True),
        ("ioctl", (0, 0x5401), True),
        ("fcntl", (3, 10, 18), False), ("fcntl", (3, 8, OWN_PID), False), ("fcntl", (3, 15), False),
        ("fcntl", (3, 1024), False), ("fcntl", (3, 1026), False), ("fcntl", (3, 4, 0x2800), False),
        ("ioctl", (0, 0x5452), False), ("ioctl", (0, 0x8901), False), ("ioctl", (0, 0x8902), False),
        ("timer_create", (1,), False), ("mq_notify", (3,), False),
    ],
)  # fmt: skip
def test_delayed_signals_cannot_be_requested(
    name: str, arguments: tuple[int, ...], allowed: bool, machine: str, allow_processes: bool
) -> None:
    expected = RET_ALLOW if allowed else REFUSED
    assert answer(machine, name, *arguments, allow_processes=allow_processes) == expected
