"""Ids of earlier calls, in the form that a model of the Kimi kind writes."""

from __future__ import annotations

from typing import Any

from pellucid.server.parsers.history import with_numbered_call_ids


def call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_ids_of_clients_are_numbered_through_the_conversation_and_answers_follow() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call("call_a", "search"), call("8f-uuid", "read")]},
        {"role": "tool", "tool_call_id": "8f-uuid", "content": "r"},
        {"role": "tool", "tool_call_id": "call_a", "content": "s"},
        {"role": "assistant", "tool_calls": [call("call_c", "search")]},
        {"role": "tool", "tool_call_id": "call_c", "content": "t"},
    ]
    before = str(messages)
    renamed = with_numbered_call_ids(messages)
    assert [c["id"] for m in renamed for c in m.get("tool_calls", ())] == [
        "functions.search:0", "functions.read:1", "functions.search:2",
    ]  # fmt: skip
    assert [m["tool_call_id"] for m in renamed if "tool_call_id" in m] == [
        "functions.read:1", "functions.search:0", "functions.search:2",
    ]  # fmt: skip
    assert str(messages) == before, "the request's own messages are not touched"


def test_the_models_own_ids_stay() -> None:
    own = [
        {"role": "assistant", "tool_calls": [call("functions.search:7", "search")]},
        {"role": "tool", "tool_call_id": "functions.search:7", "content": "r"},
    ]
    assert with_numbered_call_ids(own) == own


def test_answers_without_a_call_stay() -> None:
    orphan = [{"role": "tool", "tool_call_id": "x", "content": "r"}, {"role": "tool", "content": "r"}]
    assert with_numbered_call_ids(orphan) == orphan
