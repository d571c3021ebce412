"""A headless Chromium that a test looks at a page with: its protocol over two pipes, nothing to install beside it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "+": 187, "0": 48}


def chromium_path() -> str | None:
    """The browser's program, if one is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab, and what its console and its network have said."""

    def __init__(self, reading: BinaryIO, writing: BinaryIO) -> None:
        self._reading, self._writing = reading, writing
        self._number, self._rest, self._session = 0, b"", ""
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Security"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._writing.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Load a file, and wait until it is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.console.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.run("new Promise((done) => { const look = () => document.readyState === 'complete' ? done() : "
                 "setTimeout(look, 20); look(); })")  # fmt: skip

    def run(self, expression: str) -> Any:
        """The value of an expression, waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            named = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._reading.read(1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._hear(message.get("method", ""), message.get("params", {}))
        return message

    def _hear(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.console.append(str([item.get("value") for item in said["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(said["exceptionDetails"].get("exception", said)))
        elif method == "Log.entryAdded":
            self.console.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])


@contextlib.contextmanager
def browser(program: str, profile: Path) -> Iterator[Page]:
    """Start Chromium with a profile of its own, and end it."""
    (their_reading, our_writing), (our_reading, their_writing) = os.pipe(), os.pipe()
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
               "--hide-scrollbars", f"--user-data-dir={profile}"]  # fmt: skip

    def pipes_as_three_and_four() -> None:
        reading, writing = os.dup(their_reading), os.dup(their_writing)
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, start_new_session=True,
        preexec_fn=pipes_as_three_and_four,
    )  # fmt: skip
    os.close(their_reading)
    os.close(their_writing)
    try:
        with os.fdopen(our_reading, "rb", 0) as reading, os.fdopen(our_writing, "wb", 0) as writing:
            yield Page(reading, writing)
    finally:
        process.terminate()
        process.wait(30)
