"""A server that answers as a test scripts it, for tests of the page alone: no engine, no model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pellucid.server.page import page_routes

Script = Callable[[dict[str, Any]], AsyncIterator[dict[str, Any]] | Response]

READY = {
    "status": "ready",
    "phase": None,
    "bytes_done": None,
    "bytes_total": None,
    "eta_s": None,
    "last_step": 7,
    "last_step_age_s": 0.01,
    "running": 0,
    "waiting": 0,
}


@dataclass
class ScriptedApp:
    """What the endpoints give. `script` makes the chunks of a chat from its body, or a refusal."""

    plan: dict[str, Any]
    script: Script
    health: dict[str, Any] = field(default_factory=lambda: dict(READY))
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_prefix: str = "pellucid"
    api_key: str | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        """As new, at the same address."""
        vars(self).update(vars(ScriptedApp(self.plan, self.script, url=self.url)))

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._keyed(lambda _: JSONResponse({"object": "list", "data": [{"id": "tiny"}]}))),
            Route("/v1/chat/completions", self._keyed(None), methods=["POST"]),
            Route("/plan", self._keyed(lambda _: JSONResponse(self.plan))),
            Route("/health/ready", self._health),
            Route("/metrics", self._metrics),
            *page_routes(),
        ]
        return Starlette(routes=routes)

    def _keyed(self, answer: Callable[[Request], Response] | None) -> Any:
        async def endpoint(request: Request) -> Response:
            self.paths.append(request.url.path)
            if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
                return refusal(401, "This server needs an API key.")
            return await self._chat(request) if answer is None else answer(request)

        return endpoint

    async def _health(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        return JSONResponse(self.health, 200 if self.health["status"] == "ready" else 503)

    async def _metrics(self, request: Request) -> Response:
        lines = ["# HELP x y", "# TYPE x gauge"]
        for name, value in self.metrics.items():
            lines.append(f'{self.metrics_prefix}:{name}{{model_name="tiny",engine="0"}} {value}')
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        chunks = self.script(body)
        if isinstance(chunks, Response):
            return chunks
        return StreamingResponse(self._events(chunks), media_type="text/event-stream")

    async def _events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        try:
            yield b": hello\n\n"
            async for chunk in chunks:
                yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.hung_up.set()
            raise


def refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "param": None, "code": None}}, status)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def finish(reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


@contextmanager
def serve(scripted: ScriptedApp) -> Iterator[None]:
    """Runs it on a free port until the block ends; `scripted.url` says where."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        scripted.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        config = uvicorn.Config(scripted.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()
