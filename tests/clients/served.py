"""The server under test as a process of its own: `start_server`. Called by `run`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid.core import PellucidError

API_KEY = "key-of-the-client-tests"
START_LIMIT_S = 600.0
"""A first start downloads the model and compiles the CPU kernels."""
STOP_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask: `url` has no path, `api_key` is "none" where the server checks none."""

    url: str
    model: str
    api_key: str

    def get(self, path: str) -> bytes:
        """The body of GET `path`; urllib's errors and OSError go through."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            body: bytes = answer.read()
        return body

    def require_idle(self) -> None:
        """Raises PellucidError when requests are left in the engine though every client has gone."""
        text = self.get("/metrics").decode()
        left = re.findall(r"^\w+:num_requests_(?:running|waiting)(?:{[^}]*})? (\S+)$", text, re.MULTILINE)
        if not left or any(float(value) for value in left):
            raise PellucidError(
                f"after all clients have gone, requests that run and wait: {', '.join(left) or 'untold'}"
            )


@contextlib.contextmanager
def start_server(model: str, served_name: str, flags: Sequence[str], folder: Path) -> Iterator[Server]:
    """`pellucid serve` on a free port, ready when the block begins, stopped by SIGTERM when it ends.

    Raises:
        PellucidError: it did not get ready, or did not end by itself with status 0; its last line is in the message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keys, log = folder / "keys.txt", folder / "server.log"
    keys.write_text(API_KEY + "\n")
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "pellucid",
        "serve",
        model,
        "--port",
        str(port),
        "--served-model-name",
        served_name,
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--api-key-file", str(keys), *flags],
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", served_name, API_KEY)
    try:
        _wait_until_ready(server, process, log)
        yield server
        _stop(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PellucidError(f"the server ended with status {process.returncode} at its start: {_last_line(log)}")
        with contextlib.suppress(urllib.error.URLError, http.client.HTTPException, OSError):
            if json.loads(server.get("/health/ready"))["status"] == "ready":
                return
        time.sleep(0.2)
    raise PellucidError(f"the server was not ready after {START_LIMIT_S:g} s: {_last_line(log)}")


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise PellucidError(f"the server died, with status {process.returncode}: {_last_line(log)}")
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise PellucidError(
            f"the idle server did not end {STOP_LIMIT_S:g} s after SIGTERM: {_last_line(log)}"
        ) from None
    if status != 0:
        raise PellucidError(f"the server ended with status {status} after SIGTERM: {_last_line(log)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
