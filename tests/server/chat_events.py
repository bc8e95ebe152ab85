"""Chat events as the engine and the parsers would give them for a scripted output, for tests without an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from pellucid.core import RequestMetrics, TokenLogprobs
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.parsers.choice import build_grammar
from pellucid.server.parsers.message import MessageDelta
from pellucid.server.parsers.request import ParserRequest
from pellucid.server.parsers.streaming import StreamingParser

THOUGHT = "<think>\nHe wants the weather.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CUT_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'
WRONG_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>'

PARTS = (THOUGHT, CALL, OTHER_CALL, CUT_CALL, WRONG_CALL, "Bonjour, 🦄!\n", "<tool_call>", " ", "</think>")
OUTPUTS = st.lists(st.sampled_from(PARTS), max_size=5).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=12)
FINISHES = st.sampled_from(["stop", "length"])
NOTHING = MessageDelta()


def chat_event(
    delta: MessageDelta = NOTHING,
    finish: str | None = None,
    stop: str | int | None = None,
    logprobs: Sequence[TokenLogprobs] = (),
) -> ChatEvent:
    metrics = None if finish is None else RequestMetrics(0.0)
    return ChatEvent(0, delta, (7,), tuple(logprobs), finish, stop, metrics)


def chat_events(
    output: str, cuts: Iterable[int] = (), finish: str = "stop", stop: str | int | None = None
) -> list[ChatEvent]:
    """The events of an output whose text arrives in pieces that end at `cuts`."""
    parser = StreamingParser(build_grammar("hermes", "qwen3", ParserRequest(call_id_prefix="call_x")))
    bounds = sorted({0, len(output), *(min(cut, len(output)) for cut in cuts)})
    events = [chat_event(parser.push(output[start:end])) for start, end in pairwise(bounds)]
    last = parser.finish()
    calls = [call for delta in (*(event.delta for event in events), last) for call in delta.tool_calls]
    reason = "tool_calls" if finish == "stop" and calls and calls[-1].complete else finish
    return [*events, chat_event(last, reason, stop)]


def sse(blob: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events. Asserts that each is whole, and named as its data says."""
    assert blob.endswith(b"\n\n")
    events = []
    for text in blob.decode().split("\n\n")[:-1]:
        found = re.fullmatch(r"event: (\S+)\ndata: ([^\n]+)", text)
        assert found is not None, text
        data = json.loads(found[2])
        assert data["type"] == found[1]
        events.append(data)
    return events
