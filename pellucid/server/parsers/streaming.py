"""`StreamingParser`: one output's deltas, as text arrives. Used by the chat endpoints, one per choice."""

from __future__ import annotations

from pellucid.server.parsers.grammar import REASONING_MODES, Grammar
from pellucid.server.parsers.message import MessageDelta, difference

LONG_WAIT = 1024
"""Open text above this, in characters, is read again only when it has grown by a sixteenth."""


class StreamingParser:
    """Invariant, for every grouping of the text into pushes: the deltas add up to `grammar.parse(text, True)`.

    Each push parses on from the last point at which everything was decided, and gives the difference between the two
    parses. Time is linear in the text, whatever its grouping: open text is short as a rule, and where it is long (a
    call whose name comes last, pages of newlines) it is not read again for every token.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._point = grammar.start
        self._open_text = ""
        self._unread: list[str] = []
        self._unread_length = 0

    def push(self, delta: str) -> MessageDelta:
        """What `delta` adds to the message; falsy if nothing is certain yet."""
        if len(self._open_text) > LONG_WAIT:
            self._unread.append(delta)
            self._unread_length += len(delta)
            if self._unread_length * 16 < len(self._open_text):
                return MessageDelta()
            delta = self._take_unread()
        return self._advance(delta, finished=False)

    def finish(self) -> MessageDelta:
        """What was held back, now that no text follows. Nothing may be pushed afterwards."""
        return self._advance(self._take_unread(), finished=True)

    @property
    def in_reasoning(self) -> bool:
        """Does the text that was pushed leave off inside reasoning, or where reasoning may still begin?"""
        return self._point.mode in REASONING_MODES

    def _take_unread(self) -> str:
        text = "".join(self._unread)
        self._unread.clear()
        self._unread_length = 0
        return text

    def _advance(self, delta: str, finished: bool) -> MessageDelta:
        calls, text = self._point.calls, self._open_text + delta
        self._point, self._open_text, pieces = self._grammar.advance(self._point, text, finished)
        return difference(pieces, calls)
