"""Kimi-K2's calls: `MarkedCalls` whose heads are call ids of the form `functions.NAME:K`. Chosen in `choice`.

K counts the calls of the whole conversation, and the model copies the ids that it finds there. So an id is kept as
the model wrote it, and one that it wrote badly is put into that form.
"""

from __future__ import annotations

import re

from pellucid.server.parsers.grammar import WHITESPACE, Mode, Point, Source
from pellucid.server.parsers.json_text import MemberReader, Members
from pellucid.server.parsers.marked_calls import CallMarkers, MarkedCalls
from pellucid.server.parsers.request import ParserRequest

KIMI_K2 = CallMarkers(
    section_begin=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    section_end=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call_begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    head=re.compile(r"\s*([^<]*[^<\s])\s*<\|tool_call_argument_begin\|>"),
    whole_head=re.compile(r"\s*([^\s<]+:\d+)\s*"),
)

_NUMBERED = re.compile(r"(\S+):(\d+)")
_ONLY_NUMBER = re.compile(r"(?:functions)?[.:]*(\d+)")
_UNPUNCTUATED = re.compile(r"(?:functions)?\.?(\S+?)(\d*)")
_NAME = re.compile(r"[\w.\-]+")


class KimiK2Calls(MarkedCalls):
    """A head is `functions.NAME:K` or `NAME:K`, where NAME may have dots and need not be an offered tool's.

    Also read: a bare counter `K`, whose tool is found by the arguments' names; a name without counter; and
    `functionsNAMEK` and its like, if NAME is an offered tool's.
    """

    def __init__(self, request: ParserRequest) -> None:
        super().__init__(KIMI_K2, request)
        self._tools = {name: frozenset(parameters) for name, parameters in request.tools.items()}
        self._earlier_calls = request.earlier_calls
        self._reader = MemberReader(self._all)
        self.steps[Mode.NAMELESS] = self._find_name

    def start_call(self, point: Point, head: str, source: Source) -> Point | None:
        numbered, only_number = _NUMBERED.fullmatch(head), _ONLY_NUMBER.fullmatch(head)
        if only_number and not (numbered and numbered[1] in self._tools):
            return point._replace(mode=Mode.NAMELESS, label=only_number[1])
        if numbered:
            return self._start(point, numbered[1].removeprefix("functions."), numbered[2], source)
        if head in self._tools:
            return self._start(point, head, "", source)
        if loose := _UNPUNCTUATED.fullmatch(head):
            # A name may itself end in digits.
            for cut in range(len(loose[2]) + 1):
                if (name := loose[1] + loose[2][:cut]) in self._tools:
                    return self._start(point, name, loose[2][cut:], source)
        return self._start(point, head.removeprefix("functions."), "", source) if _NAME.fullmatch(head) else None

    def _start(self, point: Point, name: str, number: str, source: Source) -> Point:
        counter = self._earlier_calls + point.calls
        call_id = f"functions.{name}:{number or counter}"
        while call_id in point.call_ids:
            call_id = f"functions.{name}:{counter}"
            counter += 1
        point = point._replace(call_ids=point.call_ids | {call_id})
        return source.start_call(point, call_id, name, Mode.ARGUMENTS_BEGINNING)

    def _find_name(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        """The tool that has every argument as a parameter, as soon as an argument leaves only one.

        Of several that have them all, the one with the fewest other parameters. If none has, the text is content.
        """
        start = source.skip(pos, WHITESPACE)
        members, is_object = point.members, source.text.startswith("{", start)
        if is_object:
            members = self._reader.read(source.text, start, members)
        fitting = self._tools
        for key in (None, *(member.key for member in members.found)):
            if key is not None:
                fitting = {name: parameters for name, parameters in fitting.items() if key in parameters}
            # Tools with the same parameters can never be told apart.
            if len(set(fitting.values())) <= 1:
                break
        else:
            if not members.closed:
                fitting = {}
                undecided = is_object and not members.stopped
                if not source.finished and (undecided or start == len(source.text)):
                    return point._replace(members=members), pos
        if not fitting:
            return point._replace(mode=Mode.TEXT, label="", members=Members()), pos
        name = min(fitting, key=lambda name: len(fitting[name]))
        return self._start(point, name, point.label, source), pos
