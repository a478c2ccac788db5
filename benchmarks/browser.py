"""A headless Chromium, steered over DevTools' pipe: nothing is installed for it but the browser.

Source: https://chromedevtools.github.io/devtools-protocol (with
`--remote-debugging-pipe`: file descriptors 3 and 4, messages end in a zero byte).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser on this machine: `ROLLKEEL_CHROMIUM`, or the first of `NAMES` on the path."""
    return os.environ.get("ROLLKEEL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Context manager: one page of `size`. `requests` has the address of everything that the page asked for."""

    def __init__(self, program: str, size: tuple[int, int] = (1440, 900), *, dark: bool = False) -> None:
        self._program = program
        self._size = size
        self._dark = dark
        self._number = 0
        self._buffer = b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        """Exceptions and errors on the page's console."""

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="rollkeel-browser-", ignore_cleanup_errors=True)
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # The shell puts the two ends where the browser looks for them.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        words = [self._program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, *words],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._process.pid
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        target = next(t["targetId"] for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        width, height = self._size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises `RuntimeError` with the browser's words."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(end - time.monotonic(), method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message')}")
                return answer["result"]

    def _next(self, left_s: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(left_s, 0))[0]:
                raise TimeoutError(f"{what}: no answer from the browser within {DEADLINE_S:g} s")
            data = os.read(self._in, 2**20)
            if not data:
                raise RuntimeError(f"{what}: the browser has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(text)
        about = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"].get("exception", {}).get("description", about)))
        elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        return event

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Value of an expression on the page; a promise is waited for. Raises `RuntimeError` for an exception there."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", {}).get("description")))
        return found["result"].get("value")

    def wait(self, script: str, deadline_s: float = DEADLINE_S) -> float:
        """Seconds until the expression is true. Raises `TimeoutError` with the expression."""
        begin = time.monotonic()
        while not self.run(f"Boolean({script})"):
            if time.monotonic() - begin > deadline_s:
                raise TimeoutError(f"not within {deadline_s:g} s: {script}")
            time.sleep(0.01)
        return time.monotonic() - begin

    def mouse(self, kind: str, x: float, y: float, *, clicks: int = 1) -> None:
        """`mouseMoved`, `mousePressed` or `mouseReleased` at a place of the page."""
        pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": clicks}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=int(kind != "mouseReleased"), **pressed)

    def picture(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
