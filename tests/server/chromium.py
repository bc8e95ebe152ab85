"""Headless Chromium driven over its debugging pipe: no driver, no browser download, only the browser itself."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Containers give /dev/shm little.
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
TIMEOUT_S = 20.0


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """One browser. Messages are JSON ended by a zero byte: to it on its descriptor 3, from it on its 4."""

    def __init__(self, program: str, profile: str) -> None:
        read_commands, commands = os.pipe()
        answers, write_answers = os.pipe()
        # Numbers above 4, so that laying one on 3 or 4 does not hide the other.
        inner = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (read_commands, write_answers)]
        actions: list[Any] = [(os.POSIX_SPAWN_DUP2, inner[0], 3), (os.POSIX_SPAWN_DUP2, inner[1], 4)]
        actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(program, command, os.environ, file_actions=actions, setpgroup=0)
        for fd in (read_commands, write_answers, *inner):
            os.close(fd)
        self._commands, self._answers = commands, answers
        self._changed = threading.Condition()
        self._results: dict[int, dict[str, Any]] = {}
        self._ended = False
        self._last_id = 0
        self.pages: dict[str, Page] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def open(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False) -> Page:
        """A new tab of that size, with storage of its own, once `url` has loaded."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        page.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    def close_pages(self) -> None:
        for page in self.pages.values():
            self.call("Target.disposeBrowserContext", browserContextId=page.context)
        self.pages = {}

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command. Raises RuntimeError when the browser refuses it, is gone or does not answer."""
        self._last_id += 1
        number = self._last_id
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        with self._changed:
            self._changed.wait_for(lambda: number in self._results or self._ended, TIMEOUT_S)
            answer = self._results.pop(number, None)
        if answer is None or "error" in answer:
            raise RuntimeError(f"{method}: {answer['error'] if answer else 'no answer from the browser'}")
        result: dict[str, Any] = answer["result"]
        return result

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._answers, 1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                with self._changed:
                    if "id" in message:
                        self._results[message["id"]] = message
                    elif message.get("sessionId") in self.pages:
                        self.pages[message["sessionId"]].events.append(message)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        os.close(self._commands)
        deadline = time.monotonic() + 5
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(self._pid, signal.SIGKILL)
            time.sleep(0.02)


class Page:
    """One tab. Conditions and values are JavaScript expressions."""

    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self._browser, self._session, self.context = browser, session, context
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def value(self, expression: str) -> Any:
        """Raises AssertionError with what the script threw."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What is seen of the first such element; empty when it is hidden or there is none."""
        return str(self.value(_seen(selector)))

    def wait(self, condition: str, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}\n{self.text('body')}"
            time.sleep(0.03)

    def wait_text(self, selector: str, words: str, timeout_s: float = 10.0) -> None:
        self.wait(f"{_seen(selector)}.includes({json.dumps(words)})", timeout_s)

    def type(self, selector: str, text: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)
            text = {}

    def click(self, selector: str) -> None:
        """With the mouse, at its middle: what covers it gets the click."""
        self.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'nearest'}})")
        box = self.value(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def errors(self) -> list[str]:
        """What the console shows as errors: exceptions, refused resources, failed requests."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
        return found

    def requested_urls(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]


def _seen(selector: str) -> str:
    return f"(e => e?.checkVisibility() ? e.innerText : '')(document.querySelector({json.dumps(selector)}))"


@contextmanager
def chromium(program: str) -> Iterator[Chromium]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Chromium(program, profile)
        try:
            yield browser
        finally:
            browser.close()
