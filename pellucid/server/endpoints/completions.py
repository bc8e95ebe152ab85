"""POST /v1/completions: texts or token ids in, text out; `echo`, `n`, several prompts at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from pellucid.core import SamplingParams, TokenLogprobs
from pellucid.engine.output import TextDelta
from pellucid.engine.prompts import EncodedPrompt
from pellucid.server.context import ServerContext, context_of, new_id
from pellucid.server.endpoints.logprobs import CompletionLogprobs, prompt_logprobs
from pellucid.server.endpoints.merging import merge
from pellucid.server.errors import ApiError, bad_request
from pellucid.server.generation.sampling import sampling_params
from pellucid.server.generation.tracked import TrackedGeneration, Usage, begin_generation, encode_off_loop, preparation
from pellucid.server.http.reading import read_request
from pellucid.server.http.responding import JSONResponse
from pellucid.server.http.sse import DONE, EventStreamResponse, until_disconnected
from pellucid.server.protocol.completions import CompletionRequest

encode = msgspec.json.encode

Entry = tuple[int, TokenLogprobs | None]

MAX_SEQUENCES = 2048
"""Most completions of one request, over all prompts."""


async def create_completion(request: Request) -> ASGIApp:
    """Completions of every prompt, streamed if asked; choice i*n + j is sample j of prompt i."""
    context = context_of(request)
    body = await read_request(request, context, CompletionRequest)
    context.check_model(body.model)
    running = await _begin(context, body)
    if body.stream:
        return EventStreamResponse(
            _stream(context, body, running), close=running.close, keep_alive_s=context.args.sse_keep_alive_interval
        )
    try:
        choices = await until_disconnected(request.receive, _collect(context, body, running))
    finally:
        running.close()
    completion = {**_head(context, running), "choices": choices, "usage": running.usage().openai()}
    return JSONResponse(completion)


@dataclass(frozen=True, slots=True)
class _Running:
    """The prompts of one request and their generations."""

    response_id: str
    prompts: list[EncodedPrompt] = field(default_factory=list)
    generations: list[TrackedGeneration] = field(default_factory=list)

    def usage(self) -> Usage:
        parts = [generation.usage for generation in self.generations]
        return Usage(
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            completion_tokens=sum(part.completion_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
        )

    def close(self, reason: str = "client_disconnected") -> None:
        for generation in self.generations:
            generation.close(reason)


async def _begin(context: ServerContext, body: CompletionRequest) -> _Running:
    """All prompts, or none."""
    count = len(body.prompts) * (body.n or 1)
    if count > MAX_SEQUENCES:
        raise bad_request(f"{count} completions in one request; the most is {MAX_SEQUENCES}: send several", "n")
    params = _params(context, body)
    running = _Running(f"cmpl-{body.request_id}" if body.request_id else new_id("cmpl"))
    async with preparation(context, count):
        await context.check_structured(params.structured_outputs)
        for prompt in body.prompts:
            running.prompts.append(await encode_off_loop(context, prompt))
        try:
            for index, encoded in enumerate(running.prompts):
                generation = begin_generation(
                    context,
                    encoded,
                    params,
                    request_id=f"{running.response_id}-{index}",
                    cache_salt=body.cache_salt or "",
                    may_shorten=body.token_limit[0] is None,
                )
                running.generations.append(generation)
        except BaseException:
            # One prompt was refused, and with it all.
            running.close("error")
            raise
    return running


def _params(context: ServerContext, body: CompletionRequest) -> SamplingParams:
    params = sampling_params(body, context.defaults, context.encoder.vocab_size)
    if body.echo and body.logprobs is not None:
        return replace(params, prompt_logprobs=max(body.logprobs, params.prompt_logprobs or 0))
    return params


class _Choice:
    """One sample's pieces as `choices[]` has them; the first is the echoed prompt's, where that is asked for."""

    def __init__(self, context: ServerContext, body: CompletionRequest, running: _Running, prompt: int, sample: int):
        self._context, self._body = context, body
        self._encoded, self._generation = running.prompts[prompt], running.generations[prompt].generation
        self.index = prompt * (body.n or 1) + sample
        skips_special = body.skip_special_tokens is not False
        self._logprobs = CompletionLogprobs(context.encoder.tokenizer, skips_special)

    def echo(self) -> dict[str, Any]:
        """The prompt. Its log-probabilities are there from the first delta on."""
        encoded, tokenizer = self._encoded, self._context.encoder.tokenizer
        text = encoded.text
        if text is None:
            skip = self._body.skip_special_tokens is not False
            text = "" if tokenizer is None else tokenizer.decode(encoded.token_ids, skip)
        known = self._generation.prompt_logprobs or (None,) * len(encoded.token_ids)
        return self._piece(text, list(zip(encoded.token_ids, known, strict=True)), None, None)

    def piece(self, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        """What some deltas in a row add."""
        entries: list[Entry] = [(entry.chosen.token_id, entry) for delta in deltas for entry in delta.logprobs]
        last = deltas[-1]
        piece = self._piece("".join([delta.text for delta in deltas]), entries, last.finish_reason, last.stop_reason)
        if self._body.return_token_ids:
            piece["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return piece

    def _piece(self, text: str, entries: Sequence[Entry], finish: str | None, stop: str | int | None) -> dict[str, Any]:
        logprobs = self._logprobs.take(entries) if self._body.logprobs is not None and entries else None
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}


async def _collect(context: ServerContext, body: CompletionRequest, running: _Running) -> list[dict[str, Any]]:
    n = body.n or 1
    deltas: list[list[TextDelta]] = [[] for _ in range(len(running.prompts) * n)]
    async for prompt, batch in _batches(running):
        for delta in batch:
            deltas[prompt * n + delta.index].append(delta)
    choices = []
    for index, own in enumerate(deltas):
        choice = _Choice(context, body, running, index // n, index % n)
        whole = choice.echo() if body.echo else None
        answer = choice.piece(own)
        if whole is not None:
            answer["text"] = whole["text"] + answer["text"]
            answer["logprobs"] = _concatenated(whole["logprobs"], answer["logprobs"])
        generation = running.generations[index // n].generation
        if body.prompt_logprobs is not None and generation.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(context.encoder.tokenizer, generation.prompt_logprobs)
        if body.return_token_ids:
            answer["prompt_token_ids"] = generation.prompt_token_ids
        choices.append(answer)
    return choices


def _concatenated(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


async def _stream(context: ServerContext, body: CompletionRequest, running: _Running) -> AsyncIterator[bytes]:
    n = body.n or 1
    choices = [_Choice(context, body, running, index // n, index % n) for index in range(len(running.prompts) * n)]
    unopened = set(range(len(choices))) if body.echo else set()
    head = b"data: " + encode(_head(context, running))[:-1] + b',"choices":['
    plain = body.logprobs is None and not body.return_token_ids and not body.continuous_usage_stats

    def tail() -> bytes:
        if body.continuous_usage_stats:
            return b'],"usage":' + encode(running.usage().openai()) + b"}\n\n"
        return b'],"usage":null}\n\n' if body.include_usage else b"]}\n\n"

    ending = tail()
    async for prompt, batch in _batches(running):
        chunks: list[bytes] = []
        for delta in batch:
            choice = choices[prompt * n + delta.index]
            if choice.index in unopened:
                unopened.discard(choice.index)
                chunks.append(head + encode(choice.echo()) + tail())
            if plain and delta.finish_reason is None:
                if delta.text:
                    chunks.append(
                        b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b'
                        % (head, choice.index, encode(delta.text), ending)
                    )
                continue
            chunks.append(head + encode(choice.piece([delta])) + tail())
        if chunks:
            yield b"".join(chunks)
    usage = head + b'],"usage":' + encode(running.usage().openai()) + b"}\n\n" if body.include_usage else b""
    yield usage + DONE


async def _batches(running: _Running) -> AsyncIterator[tuple[int, list[TextDelta]]]:
    """(prompt, deltas) as they come. An error of one prompt ends the others. Raises ApiError."""
    try:
        async for prompt, batch in merge([generation.batches() for generation in running.generations]):
            yield prompt, batch
    except ApiError:
        running.close("error")
        raise


def _head(context: ServerContext, running: _Running) -> dict[str, Any]:
    return {
        "id": running.response_id,
        "object": "text_completion",
        "created": context.now(),
        "model": context.model_name,
        "system_fingerprint": context.fingerprint,
    }
