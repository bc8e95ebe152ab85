"""Earlier calls of a conversation as the model would have written them. Used when a chat is rendered."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

NUMBERED_IDS = frozenset({"kimi_k2"})
"""Tool parsers whose models write a call's id themselves, as `functions.NAME:K`, and copy the form they find."""

_NUMBERED = re.compile(r"functions\.\S+:\d+")


def with_numbered_call_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with every call's id in the form `functions.NAME:K`, K counting the calls of the conversation.

    Clients make ids of their own (UUIDs, `call_...`), which such a model would imitate instead of numbering on. Ids
    that have the form already stay, so that a conversation with the model's own ids keeps its cached prefix.
    """
    renamed: dict[str, str] = {}
    count = 0
    result: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            own = []
            for call in calls:
                old = call.get("id") or ""
                new = old if _NUMBERED.fullmatch(old) else f"functions.{call['function']['name']}:{count}"
                renamed[old] = new
                own.append({**call, "id": new})
                count += 1
            message = {**message, "tool_calls": own}
        elif message.get("tool_call_id") in renamed:
            message = {**message, "tool_call_id": renamed[message["tool_call_id"]]}
        result.append(message)
    return result
