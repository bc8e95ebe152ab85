"""`ResponseWriter`: a response as a stream of typed events. Used by `responses`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pellucid.server.endpoints.blocks import Block, BlockChange, BlockKind, Change
from pellucid.server.endpoints.response_draft import ResponseDraft
from pellucid.server.errors import ApiError
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.http.sse import named_event
from pellucid.server.protocol.responses_response import OutputReasoning, OutputText, ResponseObject

encode = msgspec.json.encode

_DELTAS = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponseWriter:
    """Chat events to bytes: whole events of OpenAI's protocol, numbered from 0.

        created, in_progress, (output_item.added, [content_part.added,] deltas, done, [content_part.done,]
        output_item.done)*, completed | incomplete | error, failed

    A function call has no content parts. Its `sequence_number` is an event's last member.
    """

    def __init__(self, draft: ResponseDraft) -> None:
        self._draft = draft
        self._number = 0
        self._delta_head = b""

    def write(self, events: Sequence[ChatEvent]) -> bytes:
        """What some chat events in a row give; with the first, also the beginning of the response."""
        return b"".join([*self._opening(), *(blob for event in events for blob in self._write(event))])

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that cannot go on."""
        opening = b"".join(self._opening())
        code = error.type if error.code is None else str(error.code)
        said = self._event("error", code=code, message=error.message, param=error.param)
        return opening + said + self._response("failed", self._draft.failed(error))

    def _opening(self) -> Iterator[bytes]:
        if self._number == 0:
            yield self._response("created", self._draft.opening)
            yield self._response("in_progress", self._draft.opening)

    def _write(self, event: ChatEvent) -> Iterator[bytes]:
        for change in self._draft.read(event):
            match change.change:
                case Change.ADDED:
                    yield self._delta(change)
                case Change.OPENED:
                    yield from self._open(change.block)
                case Change.CLOSED:
                    yield from self._close(change.block)
        if event.finish_reason is not None:
            response = self._draft.finished()
            yield self._response(response.status, response)

    def _open(self, block: Block) -> Iterator[bytes]:
        place = self._place(block)
        yield self._event(
            "response.output_item.added", output_index=block.index, item=self._draft.item(block, opened=True)
        )
        if block.kind is not BlockKind.CALL:
            part = OutputText("") if block.kind is BlockKind.TEXT else OutputReasoning("")
            yield self._event("response.content_part.added", **place, part=part)
        # What is the same in all of a block's deltas is encoded once.
        name = f"{_DELTAS[block.kind]}.delta"
        head = encode({"type": name, **place})[:-1] + b',"delta":'
        self._delta_head = b"event: " + name.encode() + b"\ndata: " + head

    def _delta(self, change: BlockChange) -> bytes:
        logprobs = b""
        if change.block.kind is BlockKind.TEXT:
            logprobs = b',"logprobs":' + encode(self._draft.spell(change.logprobs))
        number, self._number = self._number, self._number + 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (self._delta_head, encode(change.text), logprobs, number)

    def _close(self, block: Block) -> Iterator[bytes]:
        place, done = self._place(block), f"{_DELTAS[block.kind]}.done"
        match block.kind:
            case BlockKind.CALL:
                yield self._event(done, **place, name=block.name, arguments=block.text)
            case BlockKind.TEXT:
                part = self._draft.text_part(block)
                yield self._event(done, **place, text=part.text, logprobs=part.logprobs)
                yield self._event("response.content_part.done", **place, part=part)
            case BlockKind.REASONING:
                yield self._event(done, **place, text=block.text)
                yield self._event("response.content_part.done", **place, part=OutputReasoning(block.text))
        yield self._event("response.output_item.done", output_index=block.index, item=self._draft.item(block))

    def _place(self, block: Block) -> dict[str, Any]:
        """Where in the response a block's events belong."""
        place: dict[str, Any] = {"item_id": self._draft.item_id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _response(self, name: str, response: ResponseObject) -> bytes:
        return self._event(f"response.{name}", response=response)

    def _event(self, name: str, /, **members: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(name, {"type": name, **members, "sequence_number": number})
