"""`LimitedProtocol`: what a connection may send before and between requests, with a small application behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from pellucid.server.http import connection
from pellucid.server.http.connection import limited_protocol

LIMIT = 2000
Send = Callable[[dict[str, Any]], Awaitable[None]]
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Answers the path and the body; /wait says a word now and then, and answers when its client goes away."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        body, message = b"", await receive()
        while message["type"] == "http.request" and message["more_body"]:
            body += message["body"]
            message = await receive()
        body += message.get("body", b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"].startswith("/wait"):
            gone = asyncio.create_task(until_gone(receive))
            while not gone.done():
                await send({"type": "http.response.body", "body": b"begun", "more_body": True})
                await asyncio.wait({gone}, timeout=0.01)
            self.ends.append(scope["path"])
        text = f"<{scope['method']} {scope['path']} {body.decode()}>".encode()
        await send({"type": "http.response.body", "body": text, "more_body": False})


async def until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def talk(conversation: Callable[[App, Callable[[], Awaitable[Client]]], Awaitable[None]]) -> None:
    """Run `conversation(app, connect)` against the protocol on a free port."""

    async def main() -> None:
        app = App()
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        protocol, state = limited_protocol(LIMIT), ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await asyncio.wait_for(conversation(app, lambda: asyncio.open_connection("127.0.0.1", port)), 10)

    asyncio.run(main())


async def exchange(client: Client, data: bytes, until: bytes = b"") -> bytes:
    """What comes back for `data`, up to `until`, or up to the end of the connection."""
    reader, writer = client
    writer.write(data)
    return await (reader.readuntil(until) if until else reader.read())


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def head_of(size: int) -> bytes:
    start = b"GET / HTTP/1.1\r\nHost: test\r\nX-Fill: "
    return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost test\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"CONNECT other:80 HTTP/1.1\r\nHost: other\r\n\r\n",
        b"GET http://other HTTP/1.1\r\nHost: other\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "version", "path", "header", "negative length", "two lengths", "CONNECT", "no path"],
)
def test_what_is_not_http_gets_a_400_in_json_and_the_connection_ends(data: bytes) -> None:
    async def conversation(app: App, connect: Callable[[], Awaitable[Client]]) -> None:
        answer = await exchange(await connect(), data)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["message"] == "the request is not valid HTTP"

    talk(conversation)


def test_a_head_over_the_limit_is_a_431_whole_or_in_pieces_and_one_below_is_served() -> None:
    async def conversation(app: App, connect: Callable[[], Awaitable[Client]]) -> None:
        assert (await exchange(await connect(), head_of(LIMIT - 100), b">")).startswith(b"HTTP/1.1 200")
        whole = await exchange(await connect(), head_of(LIMIT + 200))
        assert whole.startswith(b"HTTP/1.1 431 ")
        assert json.loads(whole.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the request head is over")
        reader, writer = await connect()
        head = head_of(2 * LIMIT)
        for start in range(0, LIMIT + 200, 200):
            writer.write(head[start : start + 200])
            await asyncio.sleep(0)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")

    talk(conversation)


def test_a_body_is_not_counted_as_head() -> None:
    async def conversation(app: App, connect: Callable[[], Awaitable[Client]]) -> None:
        client = await connect()
        for _ in range(3):
            answer = await exchange(client, post("/", b"x" * 10 * LIMIT), b">")
            assert b"HTTP/1.1 200" in answer

    talk(conversation)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: test\r\n"], ids=["none", "part", "most"])
def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)

    async def conversation(app: App, connect: Callable[[], Awaitable[Client]]) -> None:
        # Neither as the first of a connection, nor after a request.
        assert await exchange(await connect(), sent) == b""
        client = await connect()
        await exchange(client, post("/", b"1"), b">")
        if sent:
            assert (await exchange(client, sent)).removeprefix(b"\r\n0\r\n\r\n") == b""

    talk(conversation)


def test_a_connection_is_used_again_and_pipelined_requests_are_answered_in_order() -> None:
    async def conversation(app: App, connect: Callable[[], Awaitable[Client]]) -> None:
        client = await connect()
        for number in range(3):
            assert b"<POST /a %d>" % number in await exchange(client, post("/a", b"%d" % number), b">")
        pipelined = b"".join(post(f"/{number}", b"%d" % number) for number in range(3))
        for number in range(3):
            assert b"<POST /%d %d>" % (number, number) in await exchange(client, pipelined, b">")
            pipelined = b""

    talk(conversation)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("split", [False, True], ids=["at once", "in pieces"])
def test_an_offer_of_http2_is_ignored_and_its_request_served(chunked: bool, split: bool) -> None:
    """Java's HTTP client sends its first request so, body and all, and goes on to use the connection."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    request = post("/a", b'{"n": 1}', *offer)
    if chunked:
        request = request.replace(b"Content-Length: 8", b"Transfer-Encoding: chunked")
        request = request.replace(b'{"n": 1}', b'4\r\n{"n"\r\n4\r\n: 1}\r\n0\r\n\r\n')

    async def conversation(app: App, connect: Callable[[], Awaitable[Client]]) -> None:
        reader, writer = client = await connect()
        for start in range(0, len(request), 7 if split else len(request)):
            writer.write(request[start : start + (7 if split else len(request))])
            await asyncio.sleep(0)
        assert b'<POST /a {"n": 1}>' in await reader.readuntil(b">")
        assert b"<POST /b 2>" in await exchange(client, post("/b", b"2"), b">")
        assert b"<GET /ws >" in await exchange(
            client, b"GET /ws HTTP/1.1\r\nHost: t\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", b">"
        )

    talk(conversation)


def test_garbage_behind_a_running_request_ends_it_and_does_not_get_into_its_answer() -> None:
    async def conversation(app: App, connect: Callable[[], Awaitable[Client]]) -> None:
        client = await connect()
        assert (await exchange(client, post("/wait", b""), b"begun")).startswith(b"HTTP/1.1 200")
        assert b"400" not in await exchange(client, b"\x00\x01garbage\r\n\r\n")
        await until(lambda: app.ends == ["/wait"])

    talk(conversation)


def test_a_client_that_goes_away_is_noticed_with_requests_waiting_behind_the_running_one() -> None:
    async def conversation(app: App, connect: Callable[[], Awaitable[Client]]) -> None:
        client = await connect()
        await exchange(client, post("/wait/1", b"") + post("/wait/2", b""), b"begun")
        client[1].transport.abort()
        await until(lambda: app.ends == ["/wait/1"])

    talk(conversation)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
