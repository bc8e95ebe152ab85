"""A real server in its own processes, for tests: started by the command line, spoken to over HTTP."""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

START_TIMEOUT_S = 90


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event, "[DONE]" as text."""
        data = re.findall(rb"^data: (.*)$", self.body, re.MULTILINE)
        return [json.loads(item) if item != b"[DONE]" else "[DONE]" for item in data]


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """Of the child that runs the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        named = [int(pid) for pid in children if b"pellucid.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(named) == 1, children
        return named[0]

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.base_url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def get(self, path: str, **arguments: Any) -> Answer:
        return self.request("GET", path, **arguments)

    def post(self, path: str, body: Any, **arguments: Any) -> Answer:
        return self.request("POST", path, body, **arguments)

    def chat(self, content: str = "What is gravity?", **fields: Any) -> Answer:
        """Greedy, 8 tokens, unless `fields` say otherwise."""
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8, **fields})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        found = 0.0
        for line in self.get("/metrics").body.decode().splitlines():
            series, _, value = line.rpartition(" ")
            if re.split(r"[{ ]", series)[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                found += float(value)
        return found

    def stop(self, timeout_s: float = 30) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextmanager
def run_server(
    model: str | Path, *flags: str, stderr: IO[bytes] | int | None = None, wait: bool = True, **environment: str
) -> Iterator[RunningServer]:
    """`pellucid serve MODEL FLAGS` on a free port, ready, and killed in the end if it still runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pellucid", "serve", str(model), "--port", str(port), *flags]
    process = subprocess.Popen(command, stderr=stderr, env={**os.environ, **environment})
    server = RunningServer(process, port)
    try:
        if wait:
            wait_until(lambda: _is_ready(server), START_TIMEOUT_S)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _is_ready(server: RunningServer) -> bool:
    assert server.process.poll() is None, f"the server ended with exit code {server.process.returncode}"
    try:
        return server.get("/health/ready").status == 200
    except OSError:
        return False


def wait_until(condition: Any, timeout_s: float = 10, what: str = "") -> None:
    """Raises AssertionError when `condition` does not come true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what or "it did not happen in time"
        time.sleep(0.02)
