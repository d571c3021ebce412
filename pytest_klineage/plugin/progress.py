"""Live progress of long judgements on the terminal, past pytest's capture. The gate decides what the stages are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest
    from _pytest.capture import CaptureManager

    from pytest_klineage.gate import Progress

FIRST_LINE_AFTER_S = 5.0
"""Where lines cannot be redrawn, a judgement shorter than this says nothing."""
LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.4
"""Seldom enough that drawing takes no noticeable share of a core from the kernel that is being timed."""
EAGER_EVERY_S = 2.0
"""Between lines with --klineage-progress=on."""
CLEAR_LINE = "\r\x1b[2K"


class ProgressLine:
    """Shows how far a judgement is: one line that is redrawn on a terminal, a line now and then elsewhere.

    Called by the gate with every step. `begin` names the judgement, `end` wipes what was drawn.
    """

    def __init__(self, reporter: pytest.TerminalReporter, capture: CaptureManager | None, *, eager: bool) -> None:
        self._reporter = reporter
        self._capture = capture
        self._live = reporter.isatty
        self._wait_s = REDRAW_EVERY_S if self._live else 0.0 if eager else FIRST_LINE_AFTER_S
        self._every_s = REDRAW_EVERY_S if self._live else EAGER_EVERY_S if eager else LINE_EVERY_S
        self._label = ""
        self._next_at = 0.0
        self._drawn = False

    def begin(self, label: str) -> None:
        """A judgement starts; `label` says of what, such as "gemm-64x64x64-fp32 expert"."""
        self._label = label
        self._next_at = time.monotonic() + self._wait_s

    def __call__(self, step: Progress) -> None:
        """One step of the judgement under way."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + self._every_s
        self._write(self._text(step))

    def end(self) -> None:
        """The judgement is over."""
        if self._drawn:
            self._drawn = False
            self._emit(CLEAR_LINE, fresh_line=False)

    def _text(self, step: Progress) -> str:
        if not step.total:
            return f"klineage {self._label}: {step.message or step.stage}"
        said = f", {step.message}" if step.message else ""
        return f"klineage {self._label}: {step.stage} {step.done}/{step.total}{said}"

    def _write(self, text: str) -> None:
        if not self._live:
            self._emit(text + "\n", fresh_line=True)
            return
        width = max(20, self._reporter._tw.fullwidth - 1)
        self._emit(CLEAR_LINE + text[:width], fresh_line=not self._drawn)
        self._drawn = True

    def _emit(self, text: str, *, fresh_line: bool) -> None:
        if self._capture is None:
            self._put(text, fresh_line)
            return
        with self._capture.global_and_fixture_disabled():
            self._put(text, fresh_line)

    def _put(self, text: str, fresh_line: bool) -> None:
        if fresh_line:
            self._reporter.ensure_newline()  # pytest's own unfinished line stays; it writes the prefix again afterwards
        self._reporter.write(text, flush=True)


def make_progress(config: pytest.Config, wish: str) -> ProgressLine | None:
    """Progress on this process's terminal. None with `off`, without a terminal reporter, and in xdist workers."""
    reporter: pytest.TerminalReporter | None = config.pluginmanager.getplugin("terminalreporter")
    if wish == "off" or reporter is None or hasattr(config, "workerinput"):
        return None
    capture: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    return ProgressLine(reporter, capture, eager=wish == "on")
