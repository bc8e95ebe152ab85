"""Whatever a response's or a message's body holds, it is served or refused with a 400."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from pellucid.core import SamplingParams
from pellucid.server.endpoints import messages, responses
from pellucid.server.errors import MAX_MESSAGE, ApiError
from pellucid.server.generation.sampling import SamplingDefaults
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.messages import CountTokensRequest, MessageFields, MessageRequest
from pellucid.server.protocol.responses import ResponseRequest

ROUNDS = 2000
ITEMS = ["message", "function_call", "function_call_output", "reasoning"]
PARTS = {
    ResponseRequest: ["input_text", "output_text", "refusal", "reasoning_text"],
    MessageFields: ["text", "text", "thinking", "redacted_thinking", "tool_use", "tool_result"],
}
OTHERS = ["image", "function", "custom", "auto", "any", "tool", "none", "json_schema", "json_object", "enabled"]
ROLES = ["user", "assistant", "system", "developer"]
SCALARS = [None, True, 0, 7, -1, 2**70, 0.5, float("nan"), "", "a", "b", "\ud800", "low", "none", "auto", *OTHERS]
MEMBERS = [
    "content", "text", "refusal", "output", "arguments", "thinking", "name", "call_id", "id", "tool_use_id", "input",
    "parameters", "input_schema", "schema", "format", "effort", "summary",
]  # fmt: skip


class Bodies:
    """Random JSON that looks like the real thing: most members are the ones that items, blocks and tools have."""

    def __init__(self, type: type[msgspec.Struct], seed: int) -> None:
        self._type, self._random = type, random.Random(seed)
        self._parts = next(parts for kind, parts in PARTS.items() if issubclass(type, kind))

    def body(self) -> dict[str, Any]:
        type = self._type
        names = self._random.sample(type.__struct_fields__, self._random.choice([0, 0, 1, 2]))
        fields = {name: self._value(2) for name in names}
        name = "input" if type is ResponseRequest else "messages"
        fields[name] = [self._object(3, ITEMS) for _ in range(self._random.randint(0, 4))]
        if type is MessageRequest:
            fields.setdefault("max_tokens", 9)
        return fields

    def _object(self, depth: int, types: list[str] = OTHERS) -> dict[str, Any]:
        """Most have texts where texts belong."""
        chance = self._random
        found: dict[str, Any] = {"type": chance.choice(types), "role": chance.choice(ROLES)}
        for name in MEMBERS:
            if chance.random() < 0.9:
                found[name] = chance.choice(["a", "b"]) if chance.random() < 0.95 else self._value(depth)
        if chance.random() < 0.5:
            found["content"] = (
                [self._object(depth - 1, self._parts) for _ in range(chance.randint(0, 2))] if depth else "a"
            )
        if chance.random() < 0.5:
            found["input"] = {"a": chance.choice(["a", 1])}
        return found

    def _value(self, depth: int) -> Any:
        kind = self._random.random()
        if depth == 0 or kind < 0.4:
            return self._random.choice(SCALARS)
        if kind < 0.7:
            return [self._value(depth - 1) for _ in range(self._random.randint(0, 2))]
        return self._object(depth - 1)


def serve(data: bytes, type: type[msgspec.Struct]) -> None:
    """All that an endpoint does with a body before it renders the prompt."""
    request, _ = decode_body(data, type)
    if isinstance(request, ResponseRequest):
        chat = responses.chat_input(request, SamplingDefaults(), 32)
        msgspec.json.encode(responses.opening_response(request, chat.params, "resp_1", "demo", 0))
    else:
        assert isinstance(request, MessageFields)
        params = SamplingParams()
        if isinstance(request, MessageRequest):
            params = messages.message_params(request, SamplingDefaults(), 32)
        chat = messages.chat_input(request, params)
    for message in chat.messages:
        assert isinstance(message["content"], str | list) or message["tool_calls"]
    json.dumps([*chat.messages, *chat.tools, chat.template_arguments])


@pytest.mark.parametrize("type", [ResponseRequest, MessageRequest, CountTokensRequest], ids=lambda type: type.__name__)
def test_any_conversation_is_served_or_refused(type: type[msgspec.Struct]) -> None:
    served = 0
    for seed in range(ROUNDS):
        body = Bodies(type, seed).body()
        try:
            serve(json.dumps(body).encode(), type)
            served += 1
        except ApiError as error:
            assert error.status == 400, body
            assert 0 < len(error.message) <= MAX_MESSAGE, body
            json.dumps([error.body(), error.anthropic_body()])
    # Without some that are served, the bodies would test the refusals alone.
    assert ROUNDS / 20 < served < ROUNDS / 2, served
