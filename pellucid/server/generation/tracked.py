"""Starts generations: admission, deadline, accounting. The only door from HTTP to the engine client."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from pellucid.core import ContextLengthError, PellucidError, SamplingParams
from pellucid.engine.client import EngineDeadError
from pellucid.engine.generation import Generation
from pellucid.engine.output import TextDelta
from pellucid.engine.prompts import EncodedPrompt
from pellucid.server.context import DRAINING_RETRY_S, ServerContext
from pellucid.server.errors import ApiError, engine_dead, from_pellucid, overloaded, timed_out
from pellucid.server.telemetry.record import RequestRecord, current_record


class RequestTimedOutError(PellucidError):
    """The request's deadline came before its end."""


class ServerStoppingError(PellucidError):
    """The time to drain is over."""


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request. A prompt counts once, whatever `n` is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def openai(self) -> dict[str, object]:
        """As OpenAI's chat and completions endpoints write it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class TrackedGeneration:
    """A generation under the rules of the server: its errors are `ApiError`s, it ends at the request's deadline."""

    def __init__(self, context: ServerContext, generation: Generation, record: RequestRecord) -> None:
        self.generation = generation
        self.usage = Usage(prompt_tokens=len(generation.prompt_token_ids))
        self._context, self._record = context, record
        loop, self._timer = asyncio.get_running_loop(), None
        if record.deadline < math.inf:
            self._timer = loop.call_later(record.deadline - time.monotonic(), self._time_out)
        self._ended = False

    async def batches(self) -> AsyncIterator[list[TextDelta]]:
        """As `Generation.batches`. Raises ApiError."""
        try:
            async for deltas in self.generation.batches():
                self._count(deltas)
                yield deltas
            self._end(None)
        except RequestTimedOutError:
            self._end("request_timeout")
            seconds = self._record.time_allowed
            raise self._told(timed_out(f"the request took longer than the {seconds:g} s that it has")) from None
        except ServerStoppingError as error:
            self._end("shutdown")
            raise self._told(overloaded(str(error), DRAINING_RETRY_S, "draining")) from None
        except EngineDeadError:
            self._end("dead")
            raise self._told(engine_dead()) from None
        except PellucidError as error:
            self._end("error")
            raise self._told(from_pellucid(error)) from None

    def _told(self, error: ApiError) -> ApiError:
        """Into the record, for on a stream that has begun nobody else sees it."""
        self._record.error = error
        return error

    def close(self, reason: str = "client_disconnected") -> None:
        """Abort what still runs; `reason` is one of `metrics.ABORTS`. Does nothing after the end."""
        self._end(reason)

    def _count(self, deltas: list[TextDelta]) -> None:
        usage, record = self.usage, self._record
        for delta in deltas:
            usage.completion_tokens += len(delta.token_ids)
            record.output_tokens += len(delta.token_ids)
            if delta.token_ids and record.first_token_time is None:
                record.first_token_time = time.monotonic()
            if delta.metrics is not None:
                record.finish_reason = delta.finish_reason
                # Samples after the first find the prompt that the first one has just computed.
                if delta.index == 0:
                    usage.cached_tokens = delta.metrics.cached_prompt_tokens
                    record.cached_tokens += usage.cached_tokens
                    record.metrics = record.metrics or delta.metrics

    def _time_out(self) -> None:
        # At once, and not when the error is sent: a client that reads nothing would keep it running.
        if self.generation.fail(RequestTimedOutError("the request's time is over")):
            self._end("request_timeout")

    def _end(self, abort: str | None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if abort is not None:
            self._record.finish_reason = abort
            self._context.accounting.abort(self.generation.request_id, abort)
        self.generation.close()


@contextlib.asynccontextmanager
async def preparation(context: ServerContext, sequences: int) -> AsyncIterator[None]:
    """Around all that comes before a request's generations begin: it counts as one in flight, and its time runs.

    Raises:
        ApiError: nothing is taken now (503), so many sequences never are (400), or the time is over (408).
    """
    context.check_admission(sequences)
    record = current_record()
    context.lifecycle.preparing += sequences
    try:
        seconds = record.deadline - time.monotonic()
        async with asyncio.timeout(seconds if seconds < math.inf else None):
            yield
    except TimeoutError:
        raise timed_out(f"the request took longer than the {record.time_allowed:g} s that it has") from None
    finally:
        context.lifecycle.preparing -= sequences


def begin_generation(
    context: ServerContext,
    prompt: EncodedPrompt,
    params: SamplingParams,
    *,
    request_id: str,
    cache_salt: str = "",
    may_shorten: bool = False,
    prompt_field: str = "prompt",
) -> TrackedGeneration:
    """Hand a prompt to the engine, within a `preparation`.

    `may_shorten`: `max_tokens` is a default, and gives way to a long prompt. `prompt_field` is where the request has
    its prompt.

    Raises:
        ApiError: the engine takes nothing now (503), or can never serve this (400).
    """
    record = current_record()
    # A client's own id may come again while the answer to its first use is still on the way out.
    request_id = f"{request_id}-{uuid.uuid4().hex[:12]}"
    if may_shorten and params.max_tokens is not None:
        room = context.engine.longest - len(prompt.token_ids)
        params = replace(params, max_tokens=max(params.min_tokens, 1, min(params.max_tokens, room)))
    try:
        generation = context.engine.generate(
            prompt, params, request_id=request_id, cache_salt=cache_salt, arrival_time=record.arrival or None
        )
    except EngineDeadError:
        raise engine_dead() from None
    except ContextLengthError as error:
        param = prompt_field if error.param == "prompt_token_ids" else error.param
        raise from_pellucid(ContextLengthError(str(error), param)) from None
    except PellucidError as error:
        raise from_pellucid(error) from None
    record.params = record.params or params
    record.prompt_tokens += len(prompt.token_ids)
    context.accounting.begin(request_id, len(prompt.token_ids), params.n, record.arrival or time.monotonic())
    return TrackedGeneration(context, generation, record)


async def encode_off_loop(context: ServerContext, text: str | Sequence[int]) -> EncodedPrompt:
    """Token ids of a prompt; a long text must stall no stream.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        if isinstance(text, str) and len(text) < SHORT_TEXT:
            return context.encoder.encode_prompt(text)
        return await asyncio.to_thread(context.encoder.encode_prompt, text)
    except PellucidError as error:
        raise from_pellucid(error) from None


SHORT_TEXT = 2000
"""Characters that are encoded in less time than a thread takes to be told of them."""
