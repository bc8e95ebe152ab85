"""Whatever bytes come, the protocol layer answers with a request or with an ApiError 400, never anything else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pellucid.server.errors import MAX_MESSAGE, ApiError
from pellucid.server.generation.sampling import SamplingDefaults, sampling_params
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.chat import ChatCompletionRequest
from pellucid.server.protocol.completions import CompletionRequest
from pellucid.server.protocol.messages import MessageRequest
from pellucid.server.protocol.responses import ResponseRequest
from pellucid.server.protocol.sampling_fields import SamplingFields
from pellucid.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

REQUESTS = (
    ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, ResponseRequest, MessageRequest,
)  # fmt: skip

WORDS = sorted(
    {
        "role", "content", "type", "text", "function", "name", "arguments", "parameters", "tool_calls", "id", "json",
        "regex", "choice", "grammar", "schema", "json_schema", "json_object", "include_usage", "0", "7", "-1", "x",
        "system", "user", "assistant", "tool", "auto", "required", "none", "image_url", "high",
    }
)  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 40) | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=4),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.none() | st.text()},
        optional={"tool_calls": VALUES, "reasoning": st.text(), "name": st.text()},
    ),
    max_size=3,
)
PLAUSIBLE = {
    "messages": MESSAGES, "input": MESSAGES | VALUES, "prompt": st.text() | VALUES, "max_tokens": st.integers(0, 9),
    "tokens": st.lists(st.integers(0, 9)),
}  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn, type: type[msgspec.Struct]) -> dict[str, Any]:
    """An object with some of the fields, most of them with any value."""
    names = draw(st.lists(st.sampled_from(type.__struct_fields__), max_size=4, unique=True))
    # Many fields are switches, and what is on decides which checks run.
    body = {name: draw(st.just(True) | VALUES) for name in names}
    for name in type.__struct_fields__:
        if name in PLAUSIBLE and draw(st.integers(0, 9)) > 1:
            body[name] = draw(PLAUSIBLE[name])
    return body


def serve(data: bytes, type: type[msgspec.Struct]) -> None:
    """Everything that an endpoint asks of the protocol layer."""
    try:
        request, _ = decode_body(data, type)
        if isinstance(request, SamplingFields):
            sampling_params(request, SamplingDefaults(temperature=0.6), vocab_size=32)
        if isinstance(request, CompletionRequest):
            assert request.prompts
        if isinstance(request, ChatCompletionRequest | TokenizeRequest | ResponseRequest | MessageRequest):
            json.dumps([request.template_messages(), request.template_tools(), request.chat_template_kwargs])
    except ApiError as error:
        assert error.status == 400
        assert 0 < len(error.message) <= MAX_MESSAGE
        json.dumps(error.body())


@pytest.mark.parametrize("type", REQUESTS, ids=lambda type: type.__name__)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_json_is_a_request_or_a_400(type: type[msgspec.Struct], data: st.DataObject) -> None:
    # Half of a surrogate pair and NaN are written as Python's json writes them, which no decoder must take.
    serve(json.dumps(data.draw(bodies(type))).encode(), type)


@settings(max_examples=100, deadline=None)
@given(data=st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_request_or_a_400(data: bytes) -> None:
    for type in REQUESTS:
        serve(data, type)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_request_is_a_request_or_a_400(data: st.DataObject) -> None:
    whole = (
        b'{"messages":[{"role":"user","content":"\\ud83d\\ude00 \xc3\xa9"}],"max_tokens":12,"logit_bias":{"1":-1e2}}'
    )
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 4)))
    serve(whole[:start] + data.draw(st.binary(max_size=3)) + whole[end:], ChatCompletionRequest)
