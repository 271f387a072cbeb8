"""A headless Chromium, spoken to over a pipe by the DevTools protocol: pages at a given size and color scheme."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60  # seconds for any answer


def find() -> str | None:
    """The browser of this machine; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page in a tab of its own: `problems` holds what its console complained of, `requests` all that it fetched."""

    def __init__(self, browser: Browser, session: str):
        self.browser, self.session = browser, session
        self.problems: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, not only what is in view."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def hear(self, event: dict[str, Any]) -> None:
        what, told = event["method"], event["params"]
        if what == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif what == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"]))
        elif what == "Log.entryAdded":
            self.problems.append(told["entry"]["text"])
        elif what == "Runtime.consoleAPICalled":
            self.problems.append(str(told["args"]))


class Browser:
    """Chromium with commands and events as JSON, each ended by a NUL, on its file descriptors 3 and 4."""

    def __init__(self, binary: str, profile: Path):
        to_read, self.commands = _high(os.pipe())
        self.answers, to_write = _high(os.pipe())
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        self.process = subprocess.Popen(
            [binary, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=lambda: (os.dup2(to_read, 3), os.dup2(to_write, 4)),  # type: ignore[func-returns-value]
        )
        os.close(to_read)
        os.close(to_write)
        self.numbers, self.rest = itertools.count(1), b""
        self.pages: dict[str, Page] = {}

    def close(self) -> None:
        os.close(self.commands)  # which ends it
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.answers)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are heard."""
        number = next(self.numbers)
        command = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, (method, message)
                return message["result"]

    def wait_for(self, event: str) -> None:
        while self._next().get("method") != event:
            pass

    def open(self, address: str, width: int, height: int, scheme: str) -> Page:
        """The loaded page in a viewport of that size, whose user prefers the color scheme `light` or `dark`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert "errorText" not in page.call("Page.navigate", url=address), address
        self.wait_for("Page.loadEventFired")
        return page

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.answers], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self.answers, 1 << 20)
            assert read, "the browser has ended"
            self.rest += read
        text, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if (page := self.pages.get(message.get("sessionId", ""))) and "method" in message:
            page.hear(message)
        return message


@contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """The machine's browser with an empty `profile`, ended with the block."""
    binary = find()
    assert binary is not None
    browser = Browser(binary, profile)
    try:
        yield browser
    finally:
        browser.close()


def _high(pipe: tuple[int, int]) -> tuple[int, int]:
    """The ends of a pipe under numbers that do not collide with 3 and 4."""
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe]
    for end in pipe:
        os.close(end)
    return moved[0], moved[1]
