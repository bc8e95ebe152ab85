"""Chat messages to prompt text: `ChatTemplate`, a sandboxed Jinja template as checkpoints carry it.

Used by `Tokenizer`. What a template can digest (lists of parts, tool arguments as text) is found by rendering a
probe, not by the model's name.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pellucid.core import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from jinja2 import Environment

_PROBE = "Wq7probe"
_MORE_PROBE = "Zx3probe"


class ChatTemplate:
    """A template and the named special tokens (`bos_token` and so on) that it may write.

    Raises:
        CheckpointError: the source is not a Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        import jinja2

        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _build_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template does not compile (line {error.lineno}: {error.message}); "
                f"give another with --chat-template FILE"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text. `kwargs` are variables of the template (`enable_thinking`, `documents`, ...).

        `content` is text, None, or a list of text parts. Parts go to the template as they are if it can read them,
        else joined by newlines. Tool-call arguments, JSON text in the OpenAI protocol, go as objects where the
        template would otherwise quote them twice.

        Raises:
            InvalidRequestError: malformed messages, or the template refuses them; its message is quoted.
        """
        return self._render_prepared(self._prepare_all(messages), tools, add_generation_prompt, kwargs)

    def render_unfinished(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> str:
        """The prompt text up to the end of the last message's text, as the template writes it: trimmed if it trims.

        Raises:
            InvalidRequestError: as `render`; or the last message has no text, or the template does not show it.
        """
        prepared = self._prepare_all(messages)
        # A search for the text itself might find it elsewhere: "im" stands in <|im_end|> too.
        end = uuid.uuid4().hex
        given, marked = _append_text(prepared[-1] if prepared else {}, end)
        text, found, _ = self._render_prepared([*prepared[:-1], marked], tools, False, kwargs).rpartition(end)
        if found and given != given.rstrip():
            # The mark keeps white space before it from being trimmed; without it, what survives is seen.
            plain, length = self._render_prepared(prepared, tools, False, kwargs), len(text.rstrip())
            found = found if plain.startswith(text[:length]) else ""
            while text[length : length + 1] == plain[length : length + 1] != "":
                length += 1
            text = text[:length]
        if not found:
            raise InvalidRequestError(
                "continue_final_message needs a last message whose text the chat template writes as it is", "messages"
            )
        return text

    def find_end_of_turn(self, tokens: Collection[str]) -> str | None:
        """The one of `tokens` that the template writes right after an assistant's turn, or None."""
        rendered = self._try([{"role": "user", "content": "u"}, {"role": "assistant", "content": _PROBE}])
        _, found, rest = rendered.rpartition(_PROBE)
        following = rest.lstrip()
        candidates = [token for token in tokens if token.strip() and following.startswith(token)]
        return max(candidates, key=len) if found and candidates else None

    def _prepare_all(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._prepare(message, index) for index, message in enumerate(messages)]

    def _prepare(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """One message as the template wants it."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{index}] must be an object with a role", "messages")
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts = [_text_of_part(part, index) for part in content]
            content = list(content) if self._reads_parts else "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise InvalidRequestError(f"messages[{index}].content must be text or a list of text parts", "messages")
        prepared = {**message, "content": content}
        if message["role"] == "developer" and not self._knows_developers:
            prepared["role"] = "system"
        if message.get("tool_calls"):
            if content is None and not self._takes_calls_alone:
                prepared["content"] = ""
            if self._wants_argument_objects:
                prepared["tool_calls"] = [_parse_arguments(call) for call in message["tool_calls"]]
        return prepared

    @cached_property
    def _reads_parts(self) -> bool:
        """Does a list of parts come out as its texts, and not as the list's printed form?"""
        parts = [{"type": "text", "text": _PROBE}, {"type": "text", "text": _MORE_PROBE}]
        rendered = self._try([{"role": "user", "content": parts}])
        return _PROBE in rendered and _MORE_PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered

    @cached_property
    def shows_tools(self) -> bool:
        """Do the tools of a request come out in its prompt?"""
        function = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            messages = [{"role": "user", "content": "u"}]
            rendered = self._render(messages, [{"type": "function", "function": function}], True, {})
        except _failures():
            return False
        return _PROBE in rendered

    @cached_property
    def _knows_developers(self) -> bool:
        """Does a developer's message come out at all? Most templates know system messages only."""
        return _PROBE in self._try([{"role": "developer", "content": _PROBE}, {"role": "user", "content": "u"}])

    @cached_property
    def _takes_calls_alone(self) -> bool:
        """Can calls come with a content that is None, which some templates tell from "" and others fail on?"""
        forms: tuple[Any, ...] = ("{}", {})
        functions = [{"name": "probe", "arguments": arguments} for arguments in forms]
        calls = [{"id": "functions.probe:0", "type": "function", "function": function} for function in functions]
        turns = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls]
        return any(self._try([{"role": "user", "content": "u"}, turn]) for turn in turns)

    @cached_property
    def _wants_argument_objects(self) -> bool:
        """Does the template lose, or quote again, arguments that are JSON text?"""
        given = json.dumps({_PROBE: 1})
        function = {"name": "probe", "arguments": given}
        call = {"id": "functions.probe:0", "type": "function", "function": function}
        for content in (None, ""):
            turn = {"role": "assistant", "content": content, "tool_calls": [call]}
            if given in self._try([{"role": "user", "content": "u"}, turn]):
                return False
        return True

    def _try(self, messages: list[dict[str, Any]]) -> str:
        """A probe's rendering; empty where the template refuses it."""
        try:
            return self._render(messages, None, False, {})
        except _failures():
            return ""

    def _render_prepared(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        extra: dict[str, Any],
    ) -> str:
        try:
            return self._render(messages, tools, add_generation_prompt, extra)
        except _failures() as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(f"the chat template refuses these messages: {reason}", "messages") from error

    def _render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool, extra: dict[str, Any]
    ) -> str:
        variables = {
            **self._special_tokens,
            **extra,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(variables)


def _failures() -> tuple[type[Exception], ...]:
    """What a template can raise: its own refusal, the sandbox's, and plain errors on odd values."""
    import jinja2

    return (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    )


def _build_environment() -> Environment:
    """The environment that templates of Hugging Face checkpoints are written for."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}`, which marks the model's words for training. Here its body is just written."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes, which the models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _text_of_part(part: Any, index: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"messages[{index}].content has a part of type {kind!r}; only text parts are supported", "messages"
    )


def _append_text(message: Mapping[str, Any], text: str) -> tuple[str, dict[str, Any]]:
    """(the last text of a prepared message, the message with `text` at its end)."""
    content = message.get("content")
    if isinstance(content, str):
        return content, {**message, "content": content + text}
    if content:
        *before, last = content
        return last["text"], {**message, "content": [*before, {**last, "text": last["text"] + text}]}
    raise InvalidRequestError("continue_final_message needs a last message that has text", "messages")


def _parse_arguments(call: Any) -> Any:
    """The tool call with its arguments as an object; what is not JSON (a model's own slip) stays text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
