"""Constraints on the output as a request spells them: `response_format` (OpenAI) and `structured_outputs` (vLLM)."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class TextFormat(Struct, tag_field="type", tag="text", frozen=True):
    """No constraint."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", frozen=True, forbid_unknown_fields=True):
    """Any JSON object, or one that fits `schema` (as llama.cpp spells it)."""

    schema: dict[str, Any] | bool | None = None


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` may be false: the schema is enforced in any case."""

    json_schema: dict[str, Any] | bool = field(name="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", frozen=True, forbid_unknown_fields=True):
    """JSON that fits a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputsFields(Struct, frozen=True, forbid_unknown_fields=True):
    """One of these. Unknown members are refused: an ignored constraint is an unconstrained answer."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
