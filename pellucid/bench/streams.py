"""A server process, and event streams read from it by one thread that does as little as it can.

Used by `bench.server`, on an engine that takes no time, and by `bench.http`, on a real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.core import PellucidError

SILENCE_S = 300.0
"""Without news on any stream for so long, the server counts as hung."""

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Stream:
    """One request's answer: (monotonic seconds, bytes) of everything read; `sent` is when the request was sent."""

    sent: float
    reads: list[tuple[float, bytes]] = field(default_factory=list)

    def whole(self) -> Iterator[tuple[float, bytes]]:
        """The reads, cut where events end: an event counts when its last byte is there."""
        rest = b""
        for when, data in self.reads:
            whole, separator, rest = (rest + data).rpartition(b"\n\n")
            yield when, whole + separator


def post(path: str, body: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON request on a connection of its own."""
    data = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "host: bench",
        "content-type: application/json",
        f"content-length: {len(data)}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + data


def read_streams(port: int, requests: Sequence[bytes]) -> list[Stream]:
    """Send all requests, each on a connection that is open by then, and read each answer to its end.

    Raises:
        PellucidError: nothing came for `SILENCE_S`.
    """
    streams = []
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in requests]
        for connection, request in zip(connections, requests, strict=True):
            streams.append(Stream(time.monotonic()))
            connection.sendall(request)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, streams[-1].reads)
        while selector.get_map():
            ready = selector.select(SILENCE_S)
            if not ready:
                raise PellucidError(f"{len(selector.get_map())} streams had no news for {SILENCE_S:.0f} s")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                data = _receive(key.fileobj)
                if data:
                    key.data.append((time.monotonic(), data))
                else:
                    selector.unregister(key.fileobj)
    return streams


def _receive(connection: socket.socket) -> bytes:
    """Nothing at the end, also where a server that died cut the connection: what is missing shows in the stream."""
    try:
        return connection.recv(1 << 18)
    except ConnectionError:
        return b""


def free_port() -> int:
    """A port of this machine that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_server(command: Sequence[str], port: int, timeout_s: float) -> Iterator[int]:
    """The process id of a server that is ready on `port`; it is ended at the end.

    Raises:
        PellucidError: it ended, or was not ready in time.
    """
    # A key in the environment would be the server's, and the requests here bring none.
    environment = {name: value for name, value in os.environ.items() if name != "PELLUCID_API_KEY"}
    server = subprocess.Popen(command, env=environment)
    try:
        _wait_ready(server, port, timeout_s)
        yield server.pid
    finally:
        server.terminate()
        server.wait()


def _wait_ready(server: subprocess.Popen[bytes], port: int, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10):
                return
        except OSError:
            time.sleep(POLL_S)
    raise PellucidError("the server did not get ready; its log is above")


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used so far."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a `share` of all are below; 0.5 is the (upper) median."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
