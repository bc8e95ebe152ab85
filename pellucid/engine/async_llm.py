"""`AsyncLLM`: the same engine behind asyncio. One thread steps it; callers await their own deltas."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from pellucid.core import PellucidError, SamplingParams
from pellucid.engine.engine import Engine
from pellucid.engine.output import TextDelta
from pellucid.engine.prompts import EncodedPrompt, Prompt
from pellucid.models.weights import LoadProgress
from pellucid.selection.args import EngineArgs

Command = tuple[Callable[[], Any], "Future[Any]"]
Subscriber = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[TextDelta | PellucidError]"]

CALLERS_FAULTS = (PellucidError, TypeError, ValueError, AttributeError)
"""What a call with wrong arguments may raise: it goes back to that caller, and the engine goes on."""


class AsyncLLM:
    """Many callers, one engine. The engine is touched by its own thread only; commands reach it through a queue.

    `close` stops the thread; requests in flight then raise PellucidError. Also an async context manager.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        on_progress: Callable[[LoadProgress], None] | None = None,
        **engine_args: Any,
    ) -> None:
        self.engine = Engine(EngineArgs(model=str(model), **engine_args), on_progress=on_progress)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._subscribers: dict[str, Subscriber] = {}
        self._failure: PellucidError | None = None
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._loop, name="pellucid-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> AsyncIterator[TextDelta]:
        """Deltas of all samples of one prompt. Leaving the iteration early aborts the request within one step.

        Raises:
            InvalidRequestError: the prompt or its parameters can't be served.
            PellucidError: the request could not go on, or the engine has stopped.
        """
        params = sampling_params or SamplingParams()
        # Off the event loop and off the engine's thread: a long prompt must stall no stream.
        encoded = await asyncio.to_thread(self.engine.encode_prompt, prompt)
        deltas: asyncio.Queue[TextDelta | PellucidError] = asyncio.Queue()
        subscriber = (asyncio.get_running_loop(), deltas)
        # Named here, so that a caller who is cancelled while still waiting to be added can be removed too.
        request_id = f"async-{next(self._ids)}"
        unfinished = params.n
        try:
            add = partial(self._subscribe, request_id, encoded, params, cache_salt, subscriber)
            await asyncio.wrap_future(self._submit(add))
            while unfinished:
                delta = await deltas.get()
                if isinstance(delta, PellucidError):
                    raise delta
                if delta.error is not None:
                    raise delta.error
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            self._submit(lambda: self._unsubscribe(request_id))

    async def close(self) -> None:
        """Stop the engine thread and wait for it."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _submit(self, call: Callable[[], None]) -> Future[None]:
        """Run `call` on the engine thread; its error comes back through the future."""
        future: Future[None] = Future()
        self._commands.put((call, future))
        # The thread sets `_failure` before its last look at the queue, so one of the two sees this command.
        if self._failure is not None:
            self._refuse_commands(self._failure)
        return future

    def _subscribe(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, cache_salt: str, subscriber: Subscriber
    ) -> None:
        self.engine.add_prompt(prompt, params, request_id=request_id, cache_salt=cache_salt)
        self._subscribers[request_id] = subscriber

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
            for request_id in list(self._subscribers):
                self._deliver(request_id, failure)
                self._unsubscribe(request_id)
            self._refuse_commands(failure)

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
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except CALLERS_FAULTS as error:
                future.set_exception(error)

    def _refuse_commands(self, failure: PellucidError) -> None:
        """Nobody will run them any more. Called by the engine thread at its end, and by whoever comes later."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(failure)

    def _deliver(self, request_id: str, item: TextDelta | PellucidError) -> None:
        subscriber = self._subscribers.get(request_id)
        if subscriber is None:
            return
        loop, deltas = subscriber
        try:
            loop.call_soon_threadsafe(deltas.put_nowait, item)
        except RuntimeError:
            # The caller's event loop was closed without its leave: nobody waits for this request any more.
            self._unsubscribe(request_id)
