"""A headless Chromium that tests drive over a pipe, without any driver in between."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# The browser reads its commands from descriptor 3 and answers on 4.
_LAUNCHER = (
    "import os, sys\n"
    "os.dup2(int(sys.argv[1]), 3)\n"
    "os.dup2(int(sys.argv[2]), 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)
_FIRST_FREE_DESCRIPTOR = 10


def find_browser() -> str | None:
    """Return the path of an installed browser, if there is one."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page.

    Attributes:
        errors: exceptions and complaints of the page so far.
    """

    def __init__(self, path: str) -> None:
        self.errors: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command_out, self._commands = os.pipe()
        self._answers, answer_in = os.pipe()
        inherited = [
            fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE_DESCRIPTOR)
            for fd in (command_out, answer_in)
        ]
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *map(str, inherited), path, *flags],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (command_out, answer_in, *inherited):
            os.close(fd)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        [target] = [
            one
            for one in self._call("Target.getTargets")["targetInfos"]
            if one["type"] == "page"
        ]
        attached = self._call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to a page; `wait_for` knows when it has come."""
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self._call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str, timeout_s: float = 60) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.1)

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window, in CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer_dark(self, is_dark: bool) -> None:
        """Change what the reader prefers."""
        scheme = {
            "name": "prefers-color-scheme",
            "value": "dark" if is_dark else "light",
        }
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def move_to(self, selector: str) -> None:
        """Put the pointer on the first element of a selector."""
        x, y = self.evaluate(
            f"(() => {{ const element = document.querySelector({selector!r});"
            "element.scrollIntoView({block: 'center'});"
            "const box = element.getClientRects()[0];"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "scale": 1}
        clip |= {"width": size["width"], "height": size["height"]}
        image = self._call(
            "Page.captureScreenshot", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(image["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._take_event(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser has gone"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _take_event(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", ""))
        elif event.get("method") == "Log.entryAdded":
            entry = params["entry"]
            if entry["level"] == "error":
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")
