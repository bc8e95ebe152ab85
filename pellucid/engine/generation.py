"""`Generation`: one prompt's output while it comes. Filled by `EngineClient`, read by one task of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pellucid.core import PellucidError, Request, TokenLogprobs
from pellucid.engine.output import TextDelta


class Generation:
    """One prompt's deltas, of all its samples. Close it, or its request runs on.

    `prompt_logprobs` are there with the first delta, where they were asked for.
    """

    def __init__(self, request: Request, close: Callable[[], None]) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.lacks_prompt_logprobs = request.params.prompt_logprobs is not None
        self.samples = request.params.n
        self._close = close
        self._unfinished = self._to_come = request.params.n
        self._pending: list[TextDelta] = []
        self._failure: PellucidError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def batches(self) -> AsyncIterator[list[TextDelta]]:
        """Deltas as they come, all that are there at once; ends after the last sample's last.

        Raises:
            InvalidRequestError: the engine refused the request.
            PellucidError: a sample could not go on, or the engine died; later deltas are lost.
        """
        while self._unfinished:
            if not self._pending:
                if self._failure is not None:
                    raise self._failure
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                continue
            deltas, self._pending = self._pending, []
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._unfinished -= 1
                    if delta.error is not None:
                        raise delta.error
            yield deltas

    @property
    def is_whole(self) -> bool:
        """Is every sample's last delta here, read or not?"""
        return not self._to_come

    def close(self) -> None:
        """Abort what still runs; the engine stops computing it within one step. Does nothing the second time."""
        self._close()

    def push(self, delta: TextDelta) -> None:
        self._pending.append(delta)
        if delta.finish_reason is not None:
            self._to_come -= 1

    def fail(self, failure: PellucidError) -> bool:
        """End it early; False, and nothing else, when all of it is here already."""
        if not self._to_come:
            return False
        self._failure = failure
        # Else one whose reader is slower than the engine would never get to the failure.
        self._pending.clear()
        self.wake()
        return True

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
