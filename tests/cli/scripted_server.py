"""An HTTP server that answers as a test scripts it, byte for byte, and records what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Send = Callable[[bytes], None]
Step = bytes | Callable[[Send], object]


@dataclass
class Reply:
    """`steps` are bytes to send, or functions that do something in between and may send.

    `framing`: "chunked"; "cut", chunked with the end missing; "close", the end of the connection is the end.
    """

    steps: list[Step] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})
    framing: str = "chunked"

    @classmethod
    def json(cls, values: Any, status: int = 200, **headers: str) -> Reply:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls([json.dumps(values).encode()], status, {"Content-Type": "application/json", **names})


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class ScriptedServer:
    """`replies` answer the requests in turn; `hung_up` is set when a client closes in the middle of an answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.replies: list[Reply] = []
        self.asked: list[Asked] = []
        self.hung_up = threading.Event()

    @property
    def bodies(self) -> list[Any]:
        return [asked.body for asked in self.asked if asked.method == "POST"]


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            script.asked.append(Asked(self.command, self.path, dict(self.headers), body))
            reply = script.replies.pop(0)
            self.close_connection = True
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.framing != "close":
                self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Connection", "close")
            self.end_headers()

            def send(data: bytes) -> None:
                self.wfile.write(data if reply.framing == "close" else b"%x\r\n%s\r\n" % (len(data), data))

            try:
                for step in reply.steps:
                    if isinstance(step, bytes):
                        send(step)
                    else:
                        step(send)
                if reply.framing == "chunked":
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                script.hung_up.set()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script = ScriptedServer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
