"""Thousands of requests that make no sense, to every POST endpoint: each is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.malformed import Malformed, Malformer
from tests.server.running import RunningServer, run_server
from tests.server.streams import request_bytes

SEED = 0
REQUESTS = 10_000
CONNECTIONS = 8
ANSWER_S = 15
NEIGHBOURS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": [9, 8, 7, 6], "max_tokens": 100, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the quick fox"}], "max_tokens": 60}),
)


def body_fields(server: RunningServer) -> dict[str, list[str]]:
    """POST path -> the names of its body's fields, by the server's own description."""
    document = server.get("/openapi.json").json
    fields = {}
    for path, operations in document["paths"].items():
        if "post" in operations:
            schema = operations["post"].get("requestBody", {}).get("content", {}).get("application/json", {})
            name = schema.get("schema", {}).get("$ref", "").rpartition("/")[2]
            shape = document["components"]["schemas"].get(name, {})
            fields[path.replace("{", "").replace("}", "")] = sorted(shape.get("properties", {}))
    return fields


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server that has nothing to complain of: nonsense is the client's fault, and no error of ours."""
    log = tmp_path / "log"
    flags = ("--served-model-name", "tiny", "--threads", "1", "--log-level", "error")
    with log.open("wb") as file, run_server(tiny_model, *flags, stderr=file) as running:
        yield running
        assert running.stop() == 0
    assert log.read_text() == ""


class Client:
    """A keep-alive connection, opened again when the server or the request ended it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: Malformed) -> tuple[int, bytes]:
        """(status, body); status 0 where none can come, or where the server closed a connection without one."""
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        self._writer.write(request.data)
        if not request.answered:
            await asyncio.sleep(0.001)
            self.close()
            return 0, b""
        try:
            status, body, stays = await asyncio.wait_for(self._read(request.data[:5] == b"HEAD "), ANSWER_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            return 0, b""
        # What a wrong length leaves over is the beginning of the next request.
        if not stays or "length" in request.kind or "chunks" in request.kind:
            self.close()
        return status, body

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    async def _read(self, only_head: bool = False) -> tuple[int, bytes, bool]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status == 100:
            return await self._read()
        length = re.search(rb"content-length: (\d+)", head)
        if only_head:
            body = b""
        elif b"transfer-encoding: chunked" in head:
            body = await self._reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            body = await self._reader.readexactly(int(length[1])) if length else b""
        return status, body, b"connection: close" not in head


async def listen_to_neighbour(port: int, path: str, body: dict[str, Any], stop: asyncio.Event) -> list[str]:
    """The text of the same greedy stream, again and again, until `stop`."""
    texts = []
    request = Malformed(request_bytes(path, {**body, "temperature": 0, "stream": True}), True, "neighbour")
    client = Client(port)
    while not stop.is_set():
        status, answer = await client.ask(request)
        assert status == 200
        events = re.findall(rb"^data: (\{.*)$", answer, re.MULTILINE)
        choices = [json.loads(event)["choices"][0] for event in events]
        texts.append("".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices))
    client.close()
    return texts


async def fuzz(port: int, malformer: Malformer, count: int) -> tuple[Counter[int], list[str], list[list[str]]]:
    """Statuses of the answers, what was wrong, and the neighbours' texts."""
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    stop = asyncio.Event()

    async def work() -> None:
        client = Client(port)
        for _ in range(count // CONNECTIONS):
            request = malformer.next()
            try:
                status, body = await client.ask(request)
                if status == 0 and request.answered:
                    # A connection that ends with bytes unread is reset, which may overtake the answer: not twice.
                    status, body = await client.ask(request)
            except TimeoutError:
                wrong.append(f"no answer to {request.kind}: {request.data[:2000]!r}")
                client.close()
                continue
            statuses[status] += 1
            if status >= 500 or (status == 0 and request.answered) or b"internal_error" in body:
                wrong.append(f"{status} for {request.kind}: {request.data[:2000]!r} {body[:300]!r}")
        client.close()

    neighbours = [asyncio.create_task(listen_to_neighbour(port, path, body, stop)) for path, body in NEIGHBOURS]
    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    stop.set()
    return statuses, wrong, await asyncio.gather(*neighbours)


def test_malformed_requests_are_refused_and_disturb_nobody(server: RunningServer) -> None:
    engine = server.engine_pid
    malformer = Malformer(SEED, body_fields(server))
    statuses, wrong, neighbours = asyncio.run(fuzz(server.port, malformer, REQUESTS))
    assert not wrong, "\n".join(wrong[:10])
    assert sum(statuses.values()) == REQUESTS
    # Each way in which a request can be refused was taken, and some mutations left theirs valid.
    assert all(statuses[status] for status in (200, 400, 404, 405, 408, 415, 431))
    for texts in neighbours:
        assert len(texts) > 5
        assert set(texts) == {texts[0]}
    assert server.engine_pid == engine
    assert server.chat().status == 200
    assert server.get("/health/ready").json["running"] == 0
