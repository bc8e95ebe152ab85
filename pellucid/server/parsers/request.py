"""`ParserRequest`: what a parse depends on besides the text. Filled by the chat endpoint, read by the call formats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ParserRequest:
    """The request whose output is parsed.

    `prompt` is the rendered prompt, or its end: it tells whether reasoning is open already. `tools` maps each offered
    tool to the names of its parameters; needed only where a model's call is ambiguous. `earlier_calls` counts the tool
    calls in the conversation so far, for ids that continue a model's own numbering. `call_id_prefix` begins the ids
    of formats that have none; the server gives each request another.
    """

    prompt: str = ""
    tools: Mapping[str, Collection[str]] = field(default_factory=dict)
    earlier_calls: int = 0
    call_id_prefix: str = "call_"
