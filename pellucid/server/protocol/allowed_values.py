"""Which words a request field takes: `allowed_values`. `body` lists them when a request has another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

_STEP = re.compile(r"\[(?P<index>[^\]]*)\]|(?P<name>[^.\[\]]+)")


def allowed_values(type: type[msgspec.Struct], path: str) -> tuple[Any, ...]:
    """The literals, or the tags of the variants, that the field at `path` ("messages[0].role") may hold."""
    here: list[inspect.Type] = [inspect.type_info(type)]
    steps = list(_STEP.finditer(path))
    for position, step in enumerate(steps):
        here = [variant for kind in here for variant in _variants(kind)]
        if position == len(steps) - 1 and step["name"]:
            structs = [kind for kind in here if isinstance(kind, inspect.StructType)]
            tags = [struct.tag for struct in structs if struct.tag_field == step["name"]]
            if tags:
                return tuple(tags)
        here = [inner for kind in here for inner in _inside(kind, step["name"])]
    literals = [kind for outer in here for kind in _variants(outer) if isinstance(kind, inspect.LiteralType)]
    return tuple(value for kind in literals for value in kind.values)


def _variants(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for variant in kind.types:
            yield from _variants(variant)
    elif isinstance(kind, inspect.Metadata):
        yield from _variants(kind.type)
    else:
        yield kind


def _inside(kind: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """What is one step further in: the field `name`, or with None the items."""
    if name is None:
        if isinstance(kind, inspect.ListType):
            yield kind.item_type
        elif isinstance(kind, inspect.DictType):
            yield kind.value_type
    elif isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == name)
