"""Stop strings over streamed text: what may be shown, and when to stop. Called once per delta by the engine's output.

The matcher reads one character at a time (an Aho-Corasick automaton), so its result cannot depend on how the
characters were grouped into deltas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pellucid.core import InvalidRequestError


class StopStringMatcher:
    """Holds back just the tail that may still become a stop string.

    Which match wins: the one whose *last* character comes first, as a reader of single characters would stop there;
    of several that end at that character, the longest. Text after a match is dropped.

    Attributes:
        matched: the stop string that was found, else None.

    Raises:
        InvalidRequestError: an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if any(not stop for stop in stops):
            raise InvalidRequestError("stop strings must not be empty", "stop")
        self.matched: str | None = None
        self._include = include_stop_str_in_output
        self._held = ""
        self._state = 0
        # State = a prefix of some stop string; 0 is the empty one. Its depth is the length of the tail to hold.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)
        self._link()

    def push(self, delta: str) -> str:
        """The text that is now safe to show: no part of it can belong to a stop string found later."""
        if self.matched is not None:
            return ""
        state, follow, fail, found = self._state, self._next, self._fail, self._found
        for index, char in enumerate(delta):
            while state and char not in follow[state]:
                state = fail[state]
            state = follow[state].get(char, 0)
            stop = found[state]
            if stop is not None:
                self.matched = stop
                text = self._held + delta[: index + 1]
                self._held = ""
                return text if self._include else text[: len(text) - len(stop)]
        self._state = state
        text = self._held + delta
        shown = len(text) - self._depth[state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held-back tail, at the end of the text. Empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = self._next[state][char]
        self._found[state] = stop

    def _link(self) -> None:
        """Point each state at its longest proper suffix that is a state, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback and char not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(char, 0)
                # The deeper state is the longer match; only where it is none does the suffix count.
                self._found[child] = self._found[child] or self._found[self._fail[child]]
                queue.append(child)
