"""`unknown_fields`: the members of a request's objects that their Structs do not have. `body` reports them.

`has_only_known_fields` tells at a fraction of the cost that there are none, as in most requests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union

import msgspec
from msgspec import inspect

MAX_UNKNOWN = 20
"""Most unknown field names that are reported."""

MAX_OBJECTS = 10_000
"""Objects that are looked at: a list that goes beyond is left out, for it would hold up everybody's requests."""

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_NULL = b"null"

_Members = Mapping[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of one Struct: the names it may have in JSON, and (attribute, name in JSON) of those that may hold Structs."""

    known: frozenset[str]
    nested: tuple[tuple[str, str], ...]


def has_only_known_fields(data: bytes, type: type[msgspec.Struct]) -> bool:
    """Whether every member of `data`'s objects is one of their Structs', and `data` may be a `type` at all."""
    try:
        _outline_decoder(type).decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def unknown_fields(request: msgspec.Struct, fields: _Members) -> tuple[str, ...]:
    """Paths of members that have no effect ("messages[0].contnt"), top level first, safe to put in a header.

    `fields` is the object that `request` was decoded from. Null says nothing and is not named; nor is what a Struct
    lists in `NO_EFFECT`. Of the items of a list, the first with a name stands for all. JSON of no fixed shape (schemas,
    template arguments) is not looked into.
    """
    top = sorted(name for name in fields if name not in _shape(type(request)).known and bytes(fields[name]) != _NULL)
    named = [_safe(name) for name in top[:MAX_UNKNOWN]]
    for path in _Walk().below(request, fields, "", ""):
        if len(named) == MAX_UNKNOWN:
            break
        named.append(path)
    return tuple(named)


class _Walk:
    """One pass beside a request and its JSON, the Structs telling which objects to look at."""

    def __init__(self) -> None:
        self._left = MAX_OBJECTS
        self._seen: set[str] = set()

    def below(self, value: msgspec.Struct, members: _Members, path: str, general: str) -> Iterator[str]:
        """Unknown members of the objects in `value`. `general` is `path` without its indices."""
        for attribute, name in _shape(type(value)).nested:
            inner = getattr(value, attribute)
            if not inner or name not in members:
                continue
            if isinstance(inner, list):
                if isinstance(inner[0], msgspec.Struct) and len(inner) <= self._left:
                    items = zip(inner, _ITEMS.decode(members[name]), strict=True)
                    yield from self._objects(items, f"{path}{name}", f"{general}{name}", indexed=True)
            elif isinstance(inner, msgspec.Struct) and self._left:
                one = ((inner, _MEMBERS.decode(members[name])),)
                yield from self._objects(one, f"{path}{name}", f"{general}{name}", indexed=False)

    def _objects(
        self, objects: Iterable[tuple[msgspec.Struct, _Members]], path: str, general: str, *, indexed: bool
    ) -> Iterator[str]:
        for index, (value, members) in enumerate(objects):
            self._left -= 1
            shape = _shape(type(value))
            here = f"{path}[{index}]." if indexed else f"{path}."
            if not shape.known.issuperset(members):
                for name in members:
                    key = f"{general}.{name}"
                    if name not in shape.known and key not in self._seen and bytes(members[name]) != _NULL:
                        self._seen.add(key)
                        yield here + _safe(name)
            if shape.nested:
                yield from self.below(value, members, here, f"{general}.")


def _safe(name: str) -> str:
    return _NOT_A_NAME.sub("?", name[:64])


@functools.cache
def _shape(type: type[msgspec.Struct]) -> _Shape:
    config = type.__struct_config__
    tag = {config.tag_field} if config.tag_field else set()
    no_effect: frozenset[str] = getattr(type, "NO_EFFECT", frozenset())
    described = inspect.type_info(type)
    assert isinstance(described, inspect.StructType)
    nested = tuple((field.name, field.encode_name) for field in described.fields if _holds_struct(field.type))
    return _Shape(frozenset(type.__struct_encode_fields__) | tag | no_effect, nested)


def _holds_struct(kind: inspect.Type) -> bool:
    """Is it a Struct, a list of them, or may it be?"""
    match kind:
        case inspect.StructType():
            return True
        case inspect.UnionType():
            return any(_holds_struct(variant) for variant in kind.types)
        case inspect.Metadata():
            return _holds_struct(kind.type)
        case inspect.ListType():
            return _holds_struct(kind.item_type)
    return False


@functools.cache
def _outline_decoder(type: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_outline(inspect.type_info(type)))


def _outline(kind: inspect.Type) -> Any:
    """A type that takes what `kind` takes, and refuses unknown members. Values that hold no Structs stay undecoded."""
    if not _holds_struct(kind):
        return msgspec.Raw
    match kind:
        case inspect.Metadata():
            return _outline(kind.type)
        case inspect.ListType():
            return list[_outline(kind.item_type)]  # type: ignore[misc]
        case inspect.UnionType():
            return Union[tuple(map(_outline_variant, kind.types))]  # noqa: UP007
    assert isinstance(kind, inspect.StructType)
    members = {field.encode_name: _outline(field.type) for field in kind.fields}
    members |= dict.fromkeys(getattr(kind.cls, "NO_EFFECT", ()), msgspec.Raw)
    return msgspec.defstruct(
        kind.cls.__name__,
        [(name, inner, None) for name, inner in members.items()],
        tag_field=kind.tag_field,
        tag=kind.tag,
        forbid_unknown_fields=True,
        gc=False,
    )


def _outline_variant(kind: inspect.Type) -> Any:
    """As `_outline`, in a union, which an undecoded value would take over."""
    match kind:
        case inspect.NoneType():
            return None
        case inspect.StrType() | inspect.LiteralType():
            return str
    assert _holds_struct(kind), f"no outline of {kind}"
    return _outline(kind)
