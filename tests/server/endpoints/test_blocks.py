"""Blocks add up to the message that the parsers saw, for every format, also where the output is garbage."""

from __future__ import annotations

import random

import pytest

from pellucid.server.endpoints.blocks import BlockKind, BlockReader, Change
from pellucid.server.parsers.choice import REASONING_PARSERS, TOOL_PARSERS, build_grammar
from pellucid.server.parsers.message import assemble_deltas
from pellucid.server.parsers.request import ParserRequest
from pellucid.server.parsers.streaming import StreamingParser
from tests.server.chat_events import chat_event

SCRAPS = [
    "<think>", "</think>", "text ", "\n", '{"a": 1}', '{"a":', "}", '"', ";", "null", "<tool_call>", "</tool_call>",
    '{"name": "f", "arguments": {"a": 1}}', '{"arguments": [], "name": "f"}', "<|python_tag|>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>f", "f<｜tool▁sep｜>", "\n```json\n", "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜function_calls>",
]  # fmt: skip


@pytest.mark.parametrize("tool_parser", sorted(TOOL_PARSERS))
def test_blocks_add_up_to_the_message_of_the_same_output(tool_parser: str) -> None:
    for seed in range(400):
        chance = random.Random(seed)
        text = "".join(chance.choices(SCRAPS, k=chance.randint(1, 14)))
        request = ParserRequest(tools={"f": ["a"]})
        parser = StreamingParser(build_grammar(tool_parser, chance.choice([*REASONING_PARSERS, None]), request))
        deltas = []
        while text:
            size = chance.randint(1, 9)
            deltas.append(parser.push(text[:size]))
            text = text[size:]
        reader = BlockReader()
        changes = [change for delta in deltas for change in reader.read(chat_event(delta))]
        deltas.append(parser.finish())
        changes += reader.read(chat_event(deltas[-1], "stop"))

        message, blocks = assemble_deltas(deltas), reader.blocks
        texts = {kind: "".join(block.text for block in blocks if block.kind is kind) for kind in BlockKind}
        assert (texts[BlockKind.REASONING], texts[BlockKind.TEXT]) == (message.reasoning, message.content)
        calls = [block for block in blocks if block.kind is BlockKind.CALL]
        assert [(call.call_id, call.name, call.text, call.complete) for call in calls] == [
            (call.id, call.name, call.arguments, call.complete) for call in message.tool_calls
        ]
        # One is open at a time: each opens, grows and closes before the next.
        assert [change.block.index for change in changes] == sorted(change.block.index for change in changes)
        for block in blocks:
            first, *middle, last = [change.change for change in changes if change.block is block]
            assert (first, last, set(middle) <= {Change.ADDED}) == (Change.OPENED, Change.CLOSED, True)
            assert "".join(change.text for change in changes if change.block is block) == block.text
