"""`ResponseDraft`: a response while it is generated. Used by `responses`; `response_events` makes its stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pellucid.core import TokenLogprobs
from pellucid.server.endpoints.blocks import Block, BlockChange, BlockKind, BlockReader
from pellucid.server.errors import ApiError
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.generation.tracked import Usage
from pellucid.server.protocol.chat_response import ChatLogprob
from pellucid.server.protocol.responses_response import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)

_ID_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


class ResponseDraft:
    """A response and its output so far.

    `opening` is the response before its first token, `usage` counts along. `spell` writes log-probabilities, `now`
    gives the time of the end in Unix seconds.
    """

    def __init__(
        self,
        opening: ResponseObject,
        usage: Usage,
        spell: Callable[[Sequence[TokenLogprobs]], list[ChatLogprob]],
        now: Callable[[], int],
    ) -> None:
        self.opening = opening
        self.spell = spell
        self._usage, self._now = usage, now
        self._reader = BlockReader()

    def read(self, event: ChatEvent) -> list[BlockChange]:
        """Take an event. Raises ApiError where the generation was given up."""
        return self._reader.read(event)

    def item_id(self, block: Block) -> str:
        """A block's id, which no other block of any response has."""
        return f"{_ID_PREFIXES[block.kind]}_{self.opening.id.removeprefix('resp_')}_{block.index}"

    def item(self, block: Block, opened: bool = False) -> OutputItem:
        """A block as an output item, whole as it is, or empty as it was when it `opened`."""
        status: ItemStatus = "in_progress" if opened else "completed" if block.complete else "incomplete"
        item_id = self.item_id(block)
        match block.kind:
            case BlockKind.REASONING:
                return ReasoningItem(item_id, status, [] if opened else [OutputReasoning(block.text)])
            case BlockKind.TEXT:
                return OutputMessage(item_id, status, [] if opened else [self.text_part(block)])
            case BlockKind.CALL:
                return FunctionCallItem(item_id, status, block.call_id, block.name, "" if opened else block.text)

    def text_part(self, block: Block) -> OutputText:
        """The only content part of a text block."""
        return OutputText(block.text, logprobs=self.spell(block.logprobs))

    def finished(self) -> ResponseObject:
        """The response after its last event."""
        complete = self._reader.finish_reason != "length"
        return msgspec.structs.replace(
            self._with_output(),
            status="completed" if complete else "incomplete",
            completed_at=self._now() if complete else None,
            incomplete_details=None if complete else IncompleteDetails("max_output_tokens"),
        )

    def failed(self, error: ApiError) -> ResponseObject:
        """The response that ends with `error`. What it was in the middle of is incomplete."""
        return msgspec.structs.replace(
            self._with_output(), status="failed", error=ResponseError("server_error", error.message)
        )

    def _with_output(self) -> ResponseObject:
        usage = self._usage
        return msgspec.structs.replace(
            self.opening,
            output=[self.item(block) for block in self._reader.blocks],
            usage=ResponseUsage(
                usage.prompt_tokens,
                InputTokensDetails(usage.cached_tokens),
                usage.completion_tokens,
                OutputTokensDetails(usage.reasoning_tokens),
                usage.prompt_tokens + usage.completion_tokens,
            ),
        )
