"""Linux containment of an untrusted worker: namespaces, Landlock, seccomp, limits. Each says whether it is active.

Everything here is best effort by design: a kernel that lacks a mechanism leaves it out, and the verdict lists what was
active. The numbers are those of the Linux UAPI headers (landlock.h, seccomp.h, prctl.h, sched.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 22, 36
SECCOMP_MODE_FILTER = 2
CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWUSER = 0x40000000, 0x08000000, 0x20000000, 0x10000000
CLONE_NEWNS = 0x00020000
NAMESPACES = {"network": CLONE_NEWNET, "ipc": CLONE_NEWIPC, "pid": CLONE_NEWPID, "mount": CLONE_NEWNS}
CPU_NAMESPACES = ("network", "ipc", "pid")
GPU_NAMESPACES = ("network", "ipc")
"""CUDA does not start in a process namespace whose /proc is another's (CUDA_ERROR_OPERATING_SYSTEM, driver 580)."""
GPU_NAMESPACES_WITH_PROC = ("network", "ipc", "pid", "mount")
"""Where a private /proc can be mounted."""
MS_REC, MS_PRIVATE = 0x4000, 0x40000

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute, read file, read directory
LANDLOCK_DEVICES = (1 << 6) | (1 << 9) | (1 << 11)  # make character devices, sockets, block devices
LANDLOCK_FILE_ONLY = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)  # rights that a rule on a file may carry
LANDLOCK_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}

FILE_SIZE_LIMIT = 256 << 20
"""The largest file a candidate may write, in bytes."""
OPEN_FILES_LIMIT = 256
DATA_LIMIT = 8 << 30
"""Private memory a candidate may map beyond what the template had, in bytes; of any kind twice as much."""
CAPABILITY_VERSION = 0x20080522


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def forbid_inspection() -> None:
    """Keep other processes of the same user from reading this one's memory and environment."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def become_subreaper() -> None:
    """Adopt descendants whose parent died, so that none escapes."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_namespaces(names: Iterable[str] = CPU_NAMESPACES) -> list[str]:
    """Leave the machine's network, IPC objects and process ids behind; children made afterwards live inside.

    Returns the names of the namespaces that are now private.
    """
    names = tuple(names)
    everything = sum(NAMESPACES[name] for name in names)
    if os.geteuid() == 0 and LIBC.unshare(everything) == 0:
        return [f"namespace:{name}" for name in names]
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(CLONE_NEWUSER | everything) != 0:
        return []
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        # Without a map this process has no user of its own; it may still do what the candidate needs.
        pass
    return ["namespace:user", *(f"namespace:{name}" for name in names)]


def mount_own_proc() -> bool:
    """Give this process namespace, of which this must be the first process, a /proc of its own."""
    private = LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    return bool(private and LIBC.mount(b"proc", b"/proc", b"proc", 0, None) == 0)


@functools.lru_cache
def gpu_namespaces() -> tuple[str, ...]:
    """What a worker on a GPU can be given, found out by a trial in processes of its own."""
    trial = os.fork()
    if trial == 0:
        try:
            entered = enter_namespaces(GPU_NAMESPACES_WITH_PROC)
            first = os.fork() if entered else -1
            if first == 0:
                os._exit(0 if mount_own_proc() else 1)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) if first > 0 else 1)
        finally:
            os._exit(1)
    works = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1]) == 0
    return GPU_NAMESPACES_WITH_PROC if works else GPU_NAMESPACES


def limit_resources(*, address_space: bool = True) -> list[str]:
    """Bound what the process can write, open and allocate and, with `address_space`, what it can map."""
    total, private = _mapped_bytes()
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_SIZE_LIMIT),
        (resource.RLIMIT_NOFILE, OPEN_FILES_LIMIT),
        # Neither shared mappings nor address space that is only reserved count as data.
        (resource.RLIMIT_DATA, private + DATA_LIMIT),
    ]
    if address_space:
        limits.append((resource.RLIMIT_AS, total + 2 * DATA_LIMIT))
    for kind, value in limits:
        _soft, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    return ["rlimits"]


def _mapped_bytes() -> tuple[int, int]:
    """Address space of this process, and the private part of it."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[0]) * resource.getpagesize(), int(fields[5]) * resource.getpagesize()


def drop_capabilities() -> list[str]:
    """Give up what root may do, such as making device files; without effect on everybody else."""
    header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
    return ["capabilities"] if LIBC.capset(header, bytes(24)) == 0 else []


def limit_cores(count: int) -> bool:
    """Stay on `count` of the cores that this process may use. Returns whether that is fewer than before."""
    cores = sorted(os.sched_getaffinity(0))
    if count >= len(cores):
        return False
    os.sched_setaffinity(0, cores[-count:])
    return True


class _RulesetAttribute(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_abi() -> int:
    """Version of Landlock that the kernel offers; 0 when it offers none."""
    return max(0, int(LIBC.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)))


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> list[str]:
    """Allow reading below `readable` and everything below `writable`; nothing else, and no TCP."""
    abi = landlock_abi()
    if abi < 1:
        return []
    rights = LANDLOCK_RIGHTS_BY_ABI.get(abi, LANDLOCK_RIGHTS_BY_ABI[5])
    attribute = _RulesetAttribute(fs=rights, net=3 if abi >= 4 else 0, scoped=3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = LIBC.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(attribute), size, 0)
    if ruleset < 0:
        return []
    try:
        for path in readable:
            _allow(ruleset, path, LANDLOCK_READ & rights)
        for path in writable:
            _allow(ruleset, path, rights & ~LANDLOCK_DEVICES)
        for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
            _allow(ruleset, path, 0b110 & rights)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if LIBC.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
            return []
    finally:
        os.close(ruleset)
    return [f"landlock:abi{abi}"]


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & LANDLOCK_FILE_ONLY
        rule = _PathRule(allowed=allowed, parent_fd=fd)
        LIBC.syscall(LANDLOCK_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0)
    finally:
        os.close(fd)


# --- seccomp ----------------------------------------------------------------------------------------------------------

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYSCALLS = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434, "pidfd_getfd": 438,
        "pidfd_send_signal": 424, "kcmp": 312, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323, "mount": 165,
        "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248,
        "request_key": 249, "init_module": 175, "finit_module": 313, "kexec_load": 246, "reboot": 169,
        "io_uring_setup": 425, "shmget": 29, "msgget": 68, "semget": 64, "socket": 41, "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297, "open_by_handle_at": 304, "move_mount": 429, "fsopen": 430, "settimeofday": 164,
        "clock_settime": 227, "adjtimex": 159, "setsid": 112, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
        "clone": 56, "clone3": 435, "kill": 62, "tkill": 200, "tgkill": 234, "prlimit64": 302, "mmap": 9,
        "sched_setaffinity": 203, "timer_create": 222, "mq_open": 240, "mq_notify": 244, "io_submit": 209,
        "fcntl": 72, "ioctl": 16, "madvise": 28, "process_madvise": 440, "chmod": 90, "fchmod": 91, "fchmodat": 268,
        "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "utime": 132, "utimes": 235,
        "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463,
        "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "removexattrat": 466, "file_setattr": 469,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_open": 434, "pidfd_getfd": 438,
        "pidfd_send_signal": 424, "kcmp": 272, "perf_event_open": 241, "bpf": 280, "userfaultfd": 282, "mount": 40,
        "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "keyctl": 219, "add_key": 217,
        "request_key": 218, "init_module": 105, "finit_module": 273, "kexec_load": 104, "reboot": 142,
        "io_uring_setup": 425, "shmget": 194, "msgget": 186, "semget": 190, "socket": 198, "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240, "open_by_handle_at": 265, "move_mount": 429, "fsopen": 430, "settimeofday": 170,
        "clock_settime": 112, "adjtimex": 171, "setsid": 157, "execve": 221, "execveat": 281, "clone": 220,
        "clone3": 435, "kill": 129, "tkill": 130, "tgkill": 131, "prlimit64": 261, "mmap": 222,
        "sched_setaffinity": 122, "timer_create": 107, "mq_open": 180, "mq_notify": 184, "io_submit": 2,
        "fcntl": 25, "ioctl": 29, "madvise": 233, "process_madvise": 440, "fchmod": 52, "fchmodat": 53,
        "fchmodat2": 452, "fchown": 55, "fchownat": 54, "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7,
        "setxattrat": 463, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "removexattrat": 466,
        "file_setattr": 469,
    },
}  # fmt: skip
PROCESS_CALLS = ("fork", "vfork", "execve", "execveat", "setsid")
METADATA_CALLS = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes", "futimesat",
    "utimensat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr",
    "removexattrat", "file_setattr",
)  # fmt: skip
"""What Landlock leaves alone: rights, owners, times and attributes of any file of the same user, which its next process
could read again. Linkers set the rights of what they have written."""
COMPILERS_CALLS = PROCESS_CALLS + METADATA_CALLS
"""What is allowed where compilers run in the worker."""
CONDITIONAL_CALLS = (
    "clone", "clone3", "kill", "tkill", "tgkill", "prlimit64", "mmap", "sched_setaffinity", "fcntl", "ioctl",
    "madvise",
)  # fmt: skip
SIGNALLING = {"fcntl": (8, 10, 15, 1024, 1026), "ioctl": (0x5452, 0x8901, 0x8902)}
"""By system call, the commands that have the system send signals later on, which would wake a stopped process:
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY; FIOASYNC, FIOSETOWN, SIOCSPGRP."""
FILE_FLAGS = (0x40086602, 0x40046602, 0x40087602, 0x40086604, 0x401C5820)
"""More of a file's metadata, by ioctl: FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_SETVERSION, EXT4_IOC_SETVERSION,
FS_IOC_FSSETXATTR."""
F_SETFL, O_ASYNC = 4, 0x2000
MADV_COLLAPSE = 25
"""Moves pages that are there to huge ones: a caller's tensors too, once for all later calls."""
PROT_EXEC, MAP_ANONYMOUS = 0x4, 0x20
CLONE_THREAD = 0x00010000
EPERM, ENOSYS = 1, 38
RET_ALLOW, RET_ERRNO, RET_KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, GREATER_EQUAL, BIT_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ARGUMENT_0 = 16  # offset of the low word of the first argument in struct seccomp_data; 8 bytes from each to the next

Instruction: TypeAlias = tuple[int, int, int, int]
"""Code, jump if true, jump if false, value."""

REFUSE, ALLOW = (RETURN, 0, 0, RET_ERRNO | EPERM), (RETURN, 0, 0, RET_ALLOW)


def filter_calls(*, allow_processes: bool, allow_cores: bool = True) -> list[str]:
    """Refuse system calls that reach other processes, the network or the machine; on request also new processes, and
    changes of files' metadata.

    Without `allow_cores` the process cannot choose its cores either.
    """
    machine = platform.machine()
    if machine not in SYSCALLS:
        return []
    numbers = SYSCALLS[machine]
    program = seccomp_program(numbers, AUDIT_ARCH[machine], os.getpid(), allow_processes=allow_processes)
    if not allow_cores:
        program[-1:] = [(EQUAL, 0, 1, numbers["sched_setaffinity"]), REFUSE, ALLOW]
    return ["seccomp"] if install(program) else []


def freeze_code() -> list[str]:
    """From now on no file can be mapped as code: what a native kernel may call is loaded by now."""
    machine = platform.machine()
    if machine not in SYSCALLS:
        return []
    # Unwinding at the end of a thread loads this one when it is first needed.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")
    program = [
        (LOAD, 0, 0, 0),
        (EQUAL, 1, 0, SYSCALLS[machine]["mmap"]),
        ALLOW,
        (LOAD, 0, 0, ARGUMENT_0 + 2 * 8),
        (BIT_SET, 1, 0, PROT_EXEC),
        ALLOW,
        (LOAD, 0, 0, ARGUMENT_0 + 3 * 8),
        (BIT_SET, 1, 0, MAP_ANONYMOUS),
        REFUSE,
        ALLOW,
    ]
    return ["frozen-code"] if install(program) else []


def install(program: list[Instruction]) -> bool:
    """Put a filter in front of this process's system calls, for good."""
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0) == 0)


def seccomp_program(
    numbers: dict[str, int], architecture: int, own_pid: int, *, allow_processes: bool
) -> list[Instruction]:
    """A classic BPF program that ends with the permission for everything that was not refused before."""
    refuse, absent, allow = REFUSE, (RETURN, 0, 0, RET_ERRNO | ENOSYS), ALLOW
    program = [
        (LOAD, 0, 0, 4),  # architecture
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, RET_KILL),
        (LOAD, 0, 0, 0),  # system call number
        (GREATER_EQUAL, 0, 1, 0x40000000),  # the x32 numbers would go round the list
        refuse,
    ]
    for name, number in numbers.items():
        if name in CONDITIONAL_CALLS or (allow_processes and name in COMPILERS_CALLS):
            continue
        program += [(EQUAL, 0, 1, number), refuse]
    for name in ("kill", "tkill", "tgkill"):
        # A process may signal itself, as abort() does, and no other.
        if not (allow_processes and name == "kill"):
            program += _only(numbers[name], EQUAL, own_pid)
    program += _only(numbers["prlimit64"], EQUAL, 0)
    for name, commands in SIGNALLING.items():
        program += _never(numbers[name], commands)
    program += _never(numbers["ioctl"], FILE_FLAGS)
    program += _never(numbers["madvise"], (MADV_COLLAPSE,), argument=2)
    program += _never_asynchronous(numbers["fcntl"])
    if not allow_processes:
        # Threads are wanted, processes are not; clone3 hides its flags behind a pointer, so libc has to use clone.
        program += [(EQUAL, 0, 1, numbers["clone3"]), absent, *_only(numbers["clone"], BIT_SET, CLONE_THREAD)]
    program.append(allow)
    return program


def _only(number: int, test: int, value: int) -> list[Instruction]:
    """Allow one system call only when its first argument passes a test against `value`."""
    return [(EQUAL, 0, 4, number), (LOAD, 0, 0, ARGUMENT_0), (test, 1, 0, value), REFUSE, ALLOW]


def _never(number: int, commands: tuple[int, ...], argument: int = 1) -> list[Instruction]:
    """Refuse one system call with these commands in an argument, its second one; go on with the number otherwise."""
    body: list[Instruction] = [(LOAD, 0, 0, ARGUMENT_0 + 8 * argument)]
    for command in commands:
        body += [(EQUAL, 0, 1, command), REFUSE]
    return [(EQUAL, 0, len(body) + 1, number), *body, (LOAD, 0, 0, 0)]


def _never_asynchronous(number: int) -> list[Instruction]:
    """Refuse fcntl(F_SETFL) with O_ASYNC."""
    body = [(LOAD, 0, 0, ARGUMENT_0 + 8), (EQUAL, 0, 3, F_SETFL), (LOAD, 0, 0, ARGUMENT_0 + 16),
            (BIT_SET, 0, 1, O_ASYNC), REFUSE]  # fmt: skip
    return [(EQUAL, 0, len(body) + 1, number), *body, (LOAD, 0, 0, 0)]
