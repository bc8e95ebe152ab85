"""`Conversation`: the messages of a chat template, built up from items or blocks. Used by responses and messages.

Both protocols cut an assistant's turn into reasoning, text and calls; for a template they are one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Conversation:
    """Messages in OpenAI's form, as `chat_messages.template_messages` gives them.

    Attributes:
        call_ids: of all calls so far.
    """

    def __init__(self) -> None:
        self.call_ids: set[str] = set()
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None

    def add_system(self, text: str) -> None:
        """System texts at the beginning become one message: there are templates that allow no second."""
        self.end_turn()
        if [message["role"] for message in self._messages] == ["system"]:
            self._messages[0]["content"] += "\n\n" + text
        else:
            self._messages.append({"role": "system", "content": text})

    def add_user(self, texts: Sequence[str]) -> None:
        self.end_turn()
        self._messages.append({"role": "user", "content": _content(texts)})

    def add_result(self, call_id: str, texts: Sequence[str]) -> None:
        """What the call with that id gave."""
        self.end_turn()
        self._messages.append({"role": "tool", "content": _content(texts), "tool_call_id": call_id})

    def add_reasoning(self, text: str) -> None:
        """Reasoning comes before the rest of its turn: after that it begins another."""
        if self._turn is not None and (self.has_answer or "tool_calls" in self._turn):
            self.end_turn()
        turn = self._open_turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_answer(self, text: str) -> None:
        turn = self._open_turn()
        turn["content"] = (turn["content"] or "") + text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """`arguments` is JSON text."""
        self.call_ids.add(call_id)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open_turn().setdefault("tool_calls", []).append(call)

    @property
    def has_answer(self) -> bool:
        """Has the assistant's open turn a text, and no call yet?"""
        return self._turn is not None and self._turn["content"] is not None and "tool_calls" not in self._turn

    def end_turn(self) -> None:
        """What the assistant says next is a message of its own."""
        if self._turn is not None and self._turn["content"] is None and "tool_calls" not in self._turn:
            # Templates know a content of None beside calls only.
            self._turn["content"] = ""
        self._turn = None

    def messages(self) -> list[dict[str, Any]]:
        """All of it; the last turn is ended."""
        self.end_turn()
        return self._messages

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self._messages.append(self._turn)
        return self._turn


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """One text as it is, several as text parts: how to join them is for the template to say."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else ""
