"""Which parsers a model needs: `detect_parsers` by its vocabulary and chat template, `override` by name.

Called at start-up; `build_grammar` then makes one request's grammar. Never looks at a model's name: the names here
are those of output formats, as vLLM and SGLang spell them on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from pellucid.core import PlanError
from pellucid.server.parsers.dsml import DsmlCalls
from pellucid.server.parsers.grammar import CallFormat, Grammar, PlainText, ReasoningFormat
from pellucid.server.parsers.json_calls import HermesCalls, Llama3Calls
from pellucid.server.parsers.kimi_k2 import KimiK2Calls
from pellucid.server.parsers.marked_calls import DEEPSEEK_V3, DEEPSEEK_V31, MarkedCalls
from pellucid.server.parsers.request import ParserRequest

NONE = "none"
"""The name that turns a parser off."""

TOOL_PARSERS: Mapping[str, Callable[[ParserRequest], CallFormat]] = {
    "deepseek_v3": lambda request: MarkedCalls(DEEPSEEK_V3, request),
    "deepseek_v31": lambda request: MarkedCalls(DEEPSEEK_V31, request),
    "deepseek_v32": DsmlCalls,
    "hermes": HermesCalls,
    "kimi_k2": KimiK2Calls,
    "llama3_json": Llama3Calls,
}

REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(opened=True),
    "deepseek_v3": ReasoningFormat(),
    "kimi_k2": ReasoningFormat(ended_by_calls=True),
    "qwen3": ReasoningFormat(),
}


@dataclass(frozen=True, slots=True)
class Detected:
    """Names in `TOOL_PARSERS` and `REASONING_PARSERS`, None where the model needs none, and what showed it."""

    tool_parser: str | None
    reasoning_parser: str | None
    because: str


def detect_parsers(vocabulary: Collection[str], chat_template: str | None) -> Detected:
    """The parsers for a model whose tokens are `vocabulary` (added tokens suffice) and whose template this is.

    A marker in the template counts before one in the vocabulary: distilled models keep their base's vocabulary,
    but write as their template does.
    """
    template = chat_template or ""
    tool_parser, tool_reason = _detect_tool_parser(vocabulary, template)
    reasoning_parser, reasoning_reason = _detect_reasoning_parser(vocabulary, template)
    return Detected(tool_parser, reasoning_parser, f"{tool_reason}; {reasoning_reason}")


def override(detected: Detected, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Detected:
    """`detected` with what a flag asks for: None is not asked, "none" is no parser. Hyphens are underscores.

    Raises:
        PlanError: no parser has that name; the names are listed.
    """
    if tool_parser is not None:
        name = _check("--tool-call-parser", tool_parser, TOOL_PARSERS)
        detected = replace(detected, tool_parser=name, because=f"--tool-call-parser {tool_parser}; {detected.because}")
    if reasoning_parser is not None:
        name = _check("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
        because = f"--reasoning-parser {reasoning_parser}; {detected.because}"
        detected = replace(detected, reasoning_parser=name, because=because)
    return detected


def build_grammar(tool_parser: str | None, reasoning_parser: str | None, request: ParserRequest) -> Grammar:
    """The grammar of one request's output, to which special tokens must belong (`skip_special_tokens=False`).

    Pass `tool_parser=None` for a request without tools, or with `tool_choice="none"`.

    Raises:
        PlanError: no parser has that name; the names are listed.
    """
    tool_name = None if tool_parser is None else _check("--tool-call-parser", tool_parser, TOOL_PARSERS)
    calls = PlainText() if tool_name is None else TOOL_PARSERS[tool_name](request)
    if reasoning_parser is None:
        return Grammar(calls)
    name = _check("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
    if name is None:
        return Grammar(calls)
    reasoning = REASONING_PARSERS[name]
    opened = is_reasoning_open(request.prompt, reasoning)
    return Grammar(calls, reasoning if opened is None else reasoning._replace(opened=opened))


def is_reasoning_open(prompt: str, reasoning: ReasoningFormat) -> bool | None:
    """Does the output begin inside reasoning? False if the prompt's end has closed it, None if it does not say."""
    end = prompt.rstrip()
    if end.endswith(reasoning.opening):
        return True
    return False if end.endswith(reasoning.closing) else None


def _check(flag: str, name: str, known: Mapping[str, object]) -> str | None:
    spelled = name.replace("-", "_").lower()
    if spelled == NONE:
        return None
    if spelled not in known:
        raise PlanError(f"{flag}: no parser is called {name!r}; choose one of {', '.join(sorted(known))}, or {NONE}")
    return spelled


@dataclass(frozen=True, slots=True)
class _Sign:
    """`marker` in the template or the vocabulary shows that `parser` is meant."""

    parser: str
    marker: str


_TOOL_SIGNS = (
    _Sign("kimi_k2", "<|tool_calls_section_begin|>"),
    _Sign("deepseek_v32", "｜DSML｜"),
    _Sign("deepseek_v3", "<｜tool▁calls▁begin｜>"),
    _Sign("hermes", "<tool_call>"),
    _Sign("llama3_json", "<|python_tag|>"),
)
_OTHER_CALLS = ("<function=", "<arg_key>")
"""Inside `<tool_call>`, these begin calls that are not JSON."""
_FENCE = "```json"


def _detect_tool_parser(vocabulary: Collection[str], template: str) -> tuple[str | None, str]:
    for place, text in (("chat template", template), ("vocabulary", vocabulary)):
        for sign in _TOOL_SIGNS:
            if sign.marker not in text:
                continue
            where = f"{sign.marker} in the {place}"
            if sign.parser == "hermes" and (other := next((o for o in _OTHER_CALLS if o in template), None)):
                return None, f"{where}, but the template writes calls as {other}, which no parser here reads"
            if sign.parser == "deepseek_v3":
                return _tell_deepseek_apart(where, template)
            return sign.parser, f"{sign.parser}: {where}"
    return None, "no tool parser: neither vocabulary nor chat template has a marker of tool calls"


def _tell_deepseek_apart(where: str, template: str) -> tuple[str, str]:
    """V3 writes arguments in a fenced block, V3.1 bare."""
    if "<｜tool▁sep｜>" in template and _FENCE not in template:
        return "deepseek_v31", f"deepseek_v31: {where}, arguments without {_FENCE}"
    detail = f"arguments in {_FENCE}" if template else "no template to show the form of the arguments"
    return "deepseek_v3", f"deepseek_v3: {where}, {detail}"


def _detect_reasoning_parser(vocabulary: Collection[str], template: str) -> tuple[str | None, str]:
    """By the closing tag: where there is a template, it must have the tag, for it writes or strips reasoning."""
    closing = ReasoningFormat().closing
    if closing not in (template or vocabulary):
        place = "chat template" if template else "vocabulary"
        return None, f"no reasoning parser: no {closing} in the {place}"

    def has(marker: str) -> bool:
        return marker in template or marker in vocabulary

    if has("<|tool_calls_section_begin|>"):
        return "kimi_k2", f"kimi_k2: {closing}, which a tool call may stand for"
    if has("<｜Assistant｜>"):
        if "thinking" in template or (not template and has("｜DSML｜")):
            return "deepseek_v3", f"deepseek_v3: {closing}, written by the prompt as thinking is on or off"
        return "deepseek_r1", f"deepseek_r1: {closing}, reasoning may begin without a tag"
    return "qwen3", f"qwen3: {closing}"
