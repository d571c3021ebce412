"""What calls leave changed for their caller, whose process and thread they share: of the processor, and of PyTorch."""

from __future__ import annotations

import sys
from typing import Any

from pytest_klineage.records.messages import FLOAT_CONTROL, FRAMEWORK_SETTINGS
from pytest_klineage.worker.host.float_control import FloatControl

THREADS = FRAMEWORK_SETTINGS.index("number of PyTorch's threads")


class FrameworkSettings:
    """What PyTorch is set to where this is made, and what is different later; where it is not loaded, nothing ever is.

    Its functions are looked up before any candidate is there.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules.get("torch")
        self._readers = () if torch is None else (
            (torch.get_default_dtype,), (torch.is_grad_enabled, torch.is_inference_mode_enabled),
            (torch.get_num_threads,),
        )  # fmt: skip
        self._before = self._now()

    def changed(self) -> int:
        """What has changed: bit i for the i-th of FRAMEWORK_SETTINGS."""
        pairs = zip(self._now(), self._before, strict=True)
        return sum(1 << i for i, (now, before) in enumerate(pairs) if now != before)

    def keep_threads(self) -> None:
        """Take the number of threads for what it was from the start: a kernel may choose it when it is loaded."""
        if self._readers:
            self._before[THREADS] = self._now()[THREADS]

    def _now(self) -> list[Any]:
        return [tuple(read() for read in some) for some in self._readers]


class CallersSettings:
    """Both, as one answer."""

    def __init__(self) -> None:
        self.processor, self.framework = FloatControl(), FrameworkSettings()

    def changed(self) -> int:
        """What has changed: bit i for the i-th of CALLERS_SETTINGS."""
        return self.processor.changed() | self.framework.changed() << len(FLOAT_CONTROL)
