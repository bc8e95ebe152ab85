"""Stop strings over streamed text: what may be shown, and when to stop. Called once per delta by the engine's output.

`StopAutomaton` is what the samples of a request share, `StopStringMatcher` is one sample's place in it.

The matcher reads one character at a time (an Aho-Corasick automaton), so its result cannot depend on how the
characters were grouped into deltas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pellucid.core import InvalidRequestError


class StopAutomaton:
    """The stop strings of a request, compiled; never changes once made. Takes time and space linear in their length.

    A state is a prefix of some stop string; 0 is the empty one.

    Attributes:
        is_empty: there are none, and all text can be shown as it comes.

    Raises:
        InvalidRequestError: an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise InvalidRequestError("stop strings must not be empty", "stop")
        self.is_empty = not stops
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)
        self._link()

    def advance(self, state: int, char: str) -> int:
        """The state after one more character: the longest prefix of a stop string that the text now ends in."""
        follow, fail = self._next, self._fail
        while state and char not in follow[state]:
            state = fail[state]
        return follow[state].get(char, 0)

    def found(self, state: int) -> str | None:
        """The longest stop string that the text ends in."""
        return self._found[state]

    def held(self, state: int) -> int:
        """How many characters at the end of the text may still become part of a stop string."""
        return self._depth[state]

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


class StopStringMatcher:
    """Follows one sample's text. Holds back just the tail that may still become a stop string.

    Which match wins: the one whose *last* character comes first, as a reader of single characters would stop there;
    of several that end at that character, the longest. Text after a match is dropped.

    Attributes:
        matched: the stop string that was found, else None.
    """

    def __init__(self, automaton: StopAutomaton, include_stop_str_in_output: bool = False) -> None:
        self.matched: str | None = None
        self._automaton, self._include = automaton, include_stop_str_in_output
        self._held = ""
        self._state = 0

    def push(self, delta: str) -> str:
        """The text that is now safe to show: no part of it can belong to a stop string found later."""
        if self.matched is not None:
            return ""
        if self._automaton.is_empty:
            return delta
        state, automaton = self._state, self._automaton
        for index, char in enumerate(delta):
            state = automaton.advance(state, char)
            stop = automaton.found(state)
            if stop is not None:
                self.matched = stop
                text = self._held + delta[: index + 1]
                self._held = ""
                return text if self._include else text[: len(text) - len(stop)]
        self._state = state
        text = self._held + delta
        shown = len(text) - automaton.held(state)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held-back tail, at the end of the text. Empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held
