"""How long a process has waited for a processor, by the kernel's own account. Knows Linux and nothing of kernels."""

from __future__ import annotations

from pathlib import Path


def waited_ns(pid: int) -> int:
    """Nanoseconds that the first thread of a process has been ready to run while no processor was free for it.

    From proc(5), /proc/PID/schedstat, second number, which the system writes and the process cannot. 0 where the system
    keeps no such account, or the process is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) if len(fields) > 1 else 0
