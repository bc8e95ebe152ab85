from __future__ import annotations

import copy
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core import InvalidRequestError
from pellucid.tokenizer.stop_strings import StopAutomaton, StopStringMatcher

# Case C07: deltas, stop strings, the text to show, and why it ended.
C07 = [
    (("The quick br", "own f", "ox jumps"), ("own fox",), "The quick br", "stop"),
    (("The quick br", "own f", "inal"), ("own fox",), "The quick brown final", "length"),
    (("a", "\nUs", "er", ":", " hi"), ("\nUser:", "hi"), "a", "stop"),
    (("x", "ab", "abc"), ("abc", "bab"), "xa", "stop"),
]


def stream(
    deltas: tuple[str, ...] | list[str], stops: tuple[str, ...], include: bool = False
) -> tuple[str, str | None]:
    matcher = StopStringMatcher(StopAutomaton(stops), include)
    shown = "".join(matcher.push(delta) for delta in deltas) + matcher.flush()
    return shown, matcher.matched


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Brute force: (end, stop) of the match whose last character comes first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@pytest.mark.parametrize(("deltas", "stops", "text", "finish"), C07)
def test_c07_gives_the_expected_text_and_finish(
    deltas: tuple[str, ...], stops: tuple[str, ...], text: str, finish: str
) -> None:
    shown, matched = stream(deltas, stops)
    assert shown == text
    assert ("stop" if matched else "length") == finish


@pytest.mark.parametrize(("deltas", "stops", "text"), [case[:3] for case in C07])
@pytest.mark.parametrize("include", [False, True])
def test_c07_is_the_same_for_every_rechunking(
    deltas: tuple[str, ...], stops: tuple[str, ...], text: str, include: bool
) -> None:
    """All 2^(n-1) chunkings, by walking positions: chunkings that reach one state at one position continue alike."""
    whole = "".join(deltas)
    expected = stream([whole], stops, include)
    reached: list[dict[str, tuple[StopStringMatcher, str]]] = [{} for _ in range(len(whole) + 1)]
    reached[0]["start"] = (StopStringMatcher(StopAutomaton(stops), include), "")
    for start, end in itertools.combinations(range(len(whole) + 1), 2):
        for matcher, shown in list(reached[start].values()):
            branch = copy.copy(matcher)
            shown_now = shown + branch.push(whole[start:end])
            key = json.dumps([shown_now, vars(branch)], default=str, sort_keys=True)
            reached[end].setdefault(key, (branch, shown_now))
    endings = {(shown + matcher.flush(), matcher.matched) for matcher, shown in reached[-1].values()}
    assert endings == {expected}
    if not include:
        assert expected[0] == text


@given(st.data())
def test_every_text_and_chunking_agrees_with_brute_force(data: st.DataObject) -> None:
    stops = tuple(data.draw(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)))
    deltas = data.draw(st.lists(st.text("abc", max_size=6), max_size=8))
    include = data.draw(st.booleans())
    text, match = "".join(deltas), first_match("".join(deltas), stops)
    shown, matched = stream(deltas, stops, include)
    if match is None:
        assert (shown, matched) == (text, None)
    else:
        end, stop = match
        assert (shown, matched) == (text[: end if include else end - len(stop)], stop)


@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4), st.text("abc", max_size=20))
def test_just_the_longest_tail_that_may_become_a_stop_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(StopAutomaton(stops))
    shown = matcher.push(text)
    if matcher.matched is None:
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((text[len(text) - n :] for n in range(len(text) + 1) if text[len(text) - n :] in prefixes), key=len)
        assert shown == text[: len(text) - len(held)]


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopStringMatcher(StopAutomaton(["stop"]))
    assert matcher.push("go stop here") == "go "
    assert matcher.push(" and more") == ""
    assert matcher.flush() == ""


def test_matchers_of_one_automaton_do_not_meet() -> None:
    automaton = StopAutomaton(["stop", "st"])
    first, second = StopStringMatcher(automaton), StopStringMatcher(automaton, include_stop_str_in_output=True)
    assert (first.push("a s"), second.push("b")) == ("a ", "b")
    assert (first.push("t"), second.push("t")) == ("", "t")
    assert (first.matched, second.matched) == ("st", None)


def test_of_two_stops_that_end_together_the_longer_is_reported() -> None:
    assert stream(["x</end>y"], ("end>", "</end>")) == ("x", "</end>")


def test_without_stops_every_delta_passes_at_once() -> None:
    matcher = StopStringMatcher(StopAutomaton([]))
    assert [matcher.push(delta) for delta in ("a", "bc", "")] == ["a", "bc", ""]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop strings must not be empty"):
        StopAutomaton(["a", ""])
