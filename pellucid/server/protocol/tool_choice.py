"""`select_tool`: what a request's `tool_choice` comes to. Chat, responses and messages ask, each in its own words."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid.server.errors import bad_request, quote


def select_tool(
    choice: str | None, named: str | None, offered: Sequence[str], required: str = '"required"'
) -> tuple[str, bool]:
    """("auto" | "none" | "required", False), or (a tool's name, True). Without tools ("none", False).

    `choice` is one of the three words, None for the default; `named` wins over it. `offered` are the tools' names,
    `required` is how the protocol writes that a tool must be called.

    Raises:
        ApiError: 400; the tool that is named is not offered, or one must be called and none is.
    """
    if named is not None:
        if named not in offered:
            raise bad_request(f"tool_choice names {quote(named)}, which is not among tools", "tool_choice")
        return named, True
    if choice == "required" and not offered:
        raise bad_request(f"tool_choice {required} needs tools", "tool_choice")
    return (choice or "auto") if offered else "none", False
