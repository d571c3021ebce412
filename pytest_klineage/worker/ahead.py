"""What a template imports before it forks: a library's own imports take seconds, which no worker need spend again.

A preload is written as the template's kind and modules: "torch:torch._dynamo,triton.language".
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence

KINDS = ("none", "torch", "refused")
DEVICE_FILES = "/dev/nvidia"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
INDUCTOR_POOL = {"TORCH_WARM_POOL": "0"}
"""Keeps torch.compile from starting processes as soon as it is imported: forks must not share them."""


def parsed(preload: str) -> tuple[str, tuple[str, ...]]:
    """Kind and modules of a preload. Raises ValueError for a kind that there is not."""
    kind, _, modules = preload.partition(":")
    if kind not in KINDS:
        raise ValueError(f"a template is one of {', '.join(KINDS)}, got {kind!r}")
    return kind, tuple(filter(None, modules.split(",")))


def import_ahead(modules: Sequence[str], touched: Callable[[], bool]) -> tuple[str, ...]:
    """Import modules in order. Returns those that are safe when one of them has touched a GPU, else all.

    What cannot be imported is passed over: the worker that needs it says so. CUDA does not survive a fork, so a process
    in which a module has opened the device must not be forked from.
    """
    os.environ.update(INDUCTOR_POOL)
    with temporary_files_in(os.environ.get(INDUCTOR_CACHE, "")):
        for position, module in enumerate(modules):
            with contextlib.suppress(Exception):  # of a library's own import, whatever it is
                importlib.import_module(module)
            if touched():
                return tuple(modules[:position])
    return tuple(modules)


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """What is imported here finds this folder for temporary files, later code the worker's own again.

    torch.compile notes when it is imported where its precompiled headers lie, which takes five seconds to make.
    """
    if folder:
        os.makedirs(folder, exist_ok=True)
    tempfile.tempdir = folder or None
    try:
        yield
    finally:
        tempfile.tempdir = None


def touches_gpu() -> bool:
    """Whether this process holds a GPU's device file open."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(DEVICE_FILES):
                return True
    return False
