"""`close_objects`: a JSON schema as a model has to follow it. Used where schemas become grammars."""

from __future__ import annotations

from typing import Any

_COMBINING = frozenset(
    {"allOf", "if", "not", "dependentSchemas", "dependencies", "unevaluatedProperties", "minProperties"}
)
"""Keywords by which a member that one part of a schema does not list matters to another."""

_SAYS_ITSELF = ("additionalProperties", "patternProperties", "$ref", "$dynamicRef", "anyOf", "oneOf")
_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
_SINGLE = ("items", "additionalProperties", "contains")


def close_objects(schema: Any) -> Any:
    """`schema` without members that it does not list: `additionalProperties: false` where an object says nothing of it.

    What is valid under the result is valid under `schema`. Most schemas that programs make leave objects open, and a
    model that may invent members does so until its tokens run out. A schema with keywords that combine parts
    (`allOf`, `if`, `oneOf` without a discriminator, ...) is left as it is.
    """
    return schema if _combines(schema) else _closed(schema, may_close=True)


def _combines(value: Any) -> bool:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            # Of alternatives that are told apart by one member, closing none makes two fit.
            undecided = "oneOf" in one and "discriminator" not in one
            if undecided or _COMBINING & one.keys():
                return True
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return False


def _closed(schema: Any, may_close: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    # Alternatives beside listed members add members to them.
    alone = "properties" not in schema
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), list):
            result[name] = [_closed(one, alone or name == "prefixItems") for one in schema[name]]
    for name in _BY_NAME:
        if isinstance(schema.get(name), dict):
            result[name] = {key: _closed(one, True) for key, one in schema[name].items()}
    for name in _SINGLE:
        if name in schema:
            result[name] = _closed(schema[name], True)
    if may_close and not alone and not any(name in schema for name in _SAYS_ITSELF):
        result["additionalProperties"] = False
    return result
