"""What clients attach to a request for themselves: `Metadata`. A field of every generating request."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

_Name = Annotated[str, Meta(max_length=64)]
_Text = Annotated[str, Meta(max_length=512)]

# OpenAI's limits. Untyped, it could hold millions of values that nobody reads.
Metadata = Annotated[dict[_Name, _Text], Meta(max_length=16)]

# Anthropic's `user_id` may be null.
MetadataWithNull = Annotated[dict[_Name, _Text | None], Meta(max_length=16)]
