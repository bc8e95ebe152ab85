"""Server-sent events: what the specification says they mean, and the same however the bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.cli.event_stream import Event, parse_events


def events(text: str | bytes) -> list[Event]:
    return list(parse_events([text.encode() if isinstance(text, str) else text]))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_may_end_in_any_of_three_ways(end: str) -> None:
    text = end.join(["data: one", "", ": a comment", "id: 3", "retry: 10", "event: error", "data:two", "data", "", ""])
    assert events(text) == [Event("message", "one"), Event("error", "two\n")]


def test_only_one_space_after_the_colon_is_taken_off() -> None:
    assert events("data:  x\n\n") == [Event("message", " x")]


def test_an_event_without_data_is_none_and_its_name_is_forgotten() -> None:
    assert events("event: ping\n\ndata: x\n\n") == [Event("message", "x")]


@pytest.mark.parametrize("end", ["", "\n", "\r"])
def test_the_last_event_needs_no_blank_line(end: str) -> None:
    assert events("data: [DONE]" + end) == [Event("message", "[DONE]")]


def test_a_broken_character_does_not_end_the_stream() -> None:
    assert events(b"data: a\xffb\n\ndata: c\n\n") == [Event("message", "a\ufffdb"), Event("message", "c")]


LINES = st.sampled_from(["data: né 水 🙂", "data:", "event: error", ": c", "", "", "data: x\u2028y"])
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=12), st.lists(st.integers(0, 200), max_size=12))
def test_every_cutting_of_the_bytes_gives_the_same_events(lines: list[tuple[str, str]], cuts: list[int]) -> None:
    data = "".join(line + end for line, end in lines).encode()
    bounds = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    chunks = [data[start:end] for start, end in pairwise(bounds)]
    assert list(parse_events(chunks)) == events(data)
