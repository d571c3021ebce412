"""Asking NVIDIA's management library (NVML), by nvidia-ml-py or nvidia-smi."""

from __future__ import annotations

import contextlib
import csv
import importlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

SMI_TIMEOUT_S = 30.0
"""Without persistence mode the first question loads the driver, which takes seconds on a machine of eight GPUs."""
ABSENT = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[Insufficient Permissions]", "")
"""What nvidia-smi prints where it has no answer."""


class Nvml:
    """NVML, initialised; close it. A question without an answer is answered by None."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._refusals: tuple[type[Exception], ...] = (module.NVMLError, _mismatch(module))

    def close(self) -> None:
        """Let go of the library; it counts its users itself."""
        with contextlib.suppress(*self._refusals):
            self._module.nvmlShutdown()

    def ask(self, function: str, *arguments: Any, **options: Any) -> Any:
        """The answer of one of NVML's functions, or None: not supported, not permitted, or not in this version."""
        called = getattr(self._module, function, None)
        if called is None:
            return None
        try:
            return called(*arguments, **options)
        except self._refusals:
            return None

    def text(self, function: str, *arguments: Any) -> str:
        """The same for a string, which older versions of nvidia-ml-py return as bytes; empty without an answer."""
        answer = self.ask(function, *arguments)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer or "")

    def constant(self, name: str, default: int) -> int:
        """One of NVML's numbers; `default` where this version of nvidia-ml-py does not have it."""
        return int(getattr(self._module, name, default))

    def handle(self, uuid: str) -> Any:
        """NVML's handle of a GPU, or None."""
        return self.ask("nvmlDeviceGetHandleByUUID", uuid)


def open_nvml() -> Nvml | None:
    """NVML, or None where nvidia-ml-py or the driver is missing."""
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        module.nvmlInit()
    except (module.NVMLError, _mismatch(module)):
        return None
    return Nvml(module)


def smi_rows(fields: Sequence[str], uuid: str = "") -> list[dict[str, str]]:
    """What nvidia-smi says about every GPU, or about one: a row per GPU, without fields that have no answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += [f"--id={uuid}"] if uuid else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return list(_rows(done.stdout, fields)) if done.returncode == 0 else []


def _rows(text: str, fields: Sequence[str]) -> Iterator[dict[str, str]]:
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(cells) == len(fields):
            found = zip(fields, (cell.strip() for cell in cells), strict=True)
            yield {field: cell for field, cell in found if cell not in ABSENT}


def _mismatch(module: Any) -> type[Exception]:
    """What nvidia-ml-py raises when it is newer than the driver: no NVMLError, and absent in older versions."""
    error: type[Exception] = getattr(module, "NVMLLibraryMismatchError", module.NVMLError)
    return error
