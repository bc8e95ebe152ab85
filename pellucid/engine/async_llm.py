"""`AsyncLLM`: the same engine behind asyncio. One thread steps it; callers await their own deltas."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pellucid.core import PellucidError, SamplingParams
from pellucid.engine.engine import Engine, Prompt
from pellucid.engine.output import TextDelta
from pellucid.selection.args import EngineArgs

Command = tuple[Callable[[], Any], "Future[Any]"]
Subscriber = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[TextDelta | PellucidError]"]


class AsyncLLM:
    """Many callers, one engine. The engine is touched by its own thread only; commands reach it through a queue.

    `close` stops the thread; requests in flight then raise PellucidError. Also an async context manager.
    """

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        self.engine = Engine(EngineArgs(model=str(model), **engine_args))
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._subscribers: dict[str, Subscriber] = {}
        self._failure: PellucidError | None = None
        self._thread = threading.Thread(target=self._loop, name="pellucid-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[TextDelta]:
        """Deltas of all samples of one prompt. Leaving the iteration early aborts the request within one step.

        Raises:
            InvalidRequestError: the prompt or its parameters can't be served.
            PellucidError: the engine has stopped.
        """
        params = params or SamplingParams()
        deltas: asyncio.Queue[TextDelta | PellucidError] = asyncio.Queue()
        subscriber = (asyncio.get_running_loop(), deltas)
        request_id = await asyncio.wrap_future(self._submit(lambda: self._subscribe(prompt, params, subscriber)))
        unfinished = params.n
        try:
            while unfinished:
                delta = await deltas.get()
                if isinstance(delta, PellucidError):
                    raise delta
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            self._commands.put((lambda: self._unsubscribe(request_id), Future()))

    async def close(self) -> None:
        """Stop the engine thread and wait for it."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _submit(self, call: Callable[[], str]) -> Future[str]:
        """Run `call` on the engine thread; its result or error comes back through the future."""
        future: Future[str] = Future()
        self._commands.put((call, future))
        if not self._thread.is_alive():
            self._refuse_commands()
        return future

    def _subscribe(self, prompt: Prompt, params: SamplingParams, subscriber: Subscriber) -> str:
        request_id = self.engine.add_prompt(prompt, params)
        self._subscribers[request_id] = subscriber
        return request_id

    def _unsubscribe(self, request_id: str) -> None:
        self._subscribers.pop(request_id, None)
        self.engine.abort(request_id)

    def _loop(self) -> None:
        # Any other exception is a bug: it goes to the thread's hook, and callers must not wait for ever.
        failure = PellucidError("the engine thread died of an internal error; its traceback is in the log")
        try:
            while self._run_commands():
                for delta in self.engine.step():
                    self._deliver(delta.request_id, delta)
            failure = PellucidError("the engine was closed")
        except PellucidError as error:
            failure = error
        finally:
            self._failure = failure
            for request_id in self._subscribers:
                self._deliver(request_id, failure)
            self._refuse_commands()

    def _run_commands(self) -> bool:
        """Run what is queued, waiting for it when there is nothing to step. False when told to stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished())
            except queue.Empty:
                return True
            if command is None:
                return False
            call, future = command
            try:
                future.set_result(call())
            except PellucidError as error:
                future.set_exception(error)

    def _refuse_commands(self) -> None:
        """Nobody will run them any more."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command[1].set_exception(self._failure or PellucidError("the engine is closed"))

    def _deliver(self, request_id: str, item: TextDelta | PellucidError) -> None:
        subscriber = self._subscribers.get(request_id)
        if subscriber is not None:
            loop, deltas = subscriber
            loop.call_soon_threadsafe(deltas.put_nowait, item)
