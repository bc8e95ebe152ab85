"""A request body to a Struct: `decode_body`. Every endpoint that takes JSON calls it; whatever is wrong is a 400."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from pellucid.server.errors import MAX_ECHO, ApiError, bad_request, shorten
from pellucid.server.protocol.allowed_values import allowed_values
from pellucid.server.protocol.unknown_fields import has_only_known_fields, unknown_fields

T = TypeVar("T", bound=msgspec.Struct)

MAX_DEPTH = 64
"""Deepest nesting of a body: what comes after (templates, grammars) walks JSON values recursively."""

MAX_CONTAINERS = 200_000
"""Most lists and objects of a body: each costs time and memory far beyond its two bytes."""

_TOO_DEEP = f"the request body nests deeper than {MAX_DEPTH} levels"
# A bracket to what it adds to the depth, as a signed byte; what is neither a bracket nor a quote goes.
_AS_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHER_BYTES = bytes(set(range(256)) - set(b'[]{}"'))
_LOCATION = re.compile(r"^(?P<message>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD_IN_MESSAGE = re.compile(r"^Object (?:missing required|contains unknown) field `(?P<name>.*)`$", re.DOTALL)
_TYPE_NAME = re.compile(r"\b(?:int|str|bool|float)\b")
_TYPE_NAMES = {"int": "integer", "str": "string", "bool": "boolean", "float": "number"}
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def decode_body(data: bytes, type: type[T]) -> tuple[T, tuple[str, ...]]:
    """The request, and the paths of its fields that have no effect: see `unknown_fields`.

    A top-level field that `type.REFUSED` names (name -> what to do instead) is refused unless it says nothing: null,
    false, an empty list or text.

    Raises:
        ApiError: 400; `param` is the path of the field, as in "messages[0].role".
    """
    _check_text(data)
    # A field that is refused is not one of the Struct's.
    all_known = has_only_known_fields(data, type)
    fields = {} if all_known else _read_object(data)
    refused: Mapping[str, str] = getattr(type, "REFUSED", {})
    for name in fields:
        if name in refused and bytes(fields[name]) not in (b"null", b"false", b"[]", b'""'):
            raise bad_request(f"{name} is not supported: {refused[name]}", name)
    _check_nesting(data)
    try:
        request = _decode(data, type)
    except msgspec.ValidationError as error:
        raise _explain(str(error), type) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(error, data) from None
    return request, () if all_known else unknown_fields(request, fields)


def _decode(data: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    # 16.0 is an integer to JSON and to clients in languages that have floats only; msgspec wants it without the point.
    return msgspec.convert(_with_integers(msgspec.json.decode(data)), type, str_keys=True)


def _with_integers(value: Any) -> Any:
    """`value` with every float that is a whole number, and exact as one, as an int."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


def _check_text(data: bytes) -> None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the request body is not UTF-8 (byte {error.start})") from None
    if not data.strip():
        raise bad_request("the request body is empty; send a JSON object")


def _read_object(data: bytes) -> dict[str, msgspec.Raw]:
    """The body's top-level fields, undecoded."""
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise bad_request("the request body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(error, data) from None


def _malformed(error: Exception, data: bytes) -> ApiError:
    if isinstance(error, RecursionError):
        return bad_request(_TOO_DEEP)
    reason = str(error).removeprefix("JSON is malformed: ")
    # The decoder looks for the other half past the end of the string, and reports what it finds there.
    if reason == "Input data was truncated" and _HALF_PAIR.search(data):
        reason = "a string holds half of a surrogate pair"
    return bad_request(f"the request body is not valid JSON: {shorten(reason, MAX_ECHO)}")


def _explain(text: str, type: type[msgspec.Struct]) -> ApiError:
    """msgspec's message in the API's words, with the path as `param`."""
    found = _LOCATION.match(text)
    assert found is not None
    message, path = found["message"], found["path"] or ""
    named = _FIELD_IN_MESSAGE.match(message)
    if named is not None:
        param = f"{path}.{named['name']}" if path else named["name"]
        what = "is required" if "missing" in message else "is not a field of this object"
        return bad_request(f"{shorten(param, MAX_ECHO)} {what}", param)
    # The value of a mapping has no name here: `logit_bias[...]`.
    param = path.removesuffix("[...]")
    if message.startswith(("Invalid value", "Invalid enum value")):
        value = shorten(message.partition("value ")[2], MAX_ECHO)
        allowed = allowed_values(type, path)
        expected = f"; one of: {', '.join(map(str, allowed))}" if allowed else ""
        if _is_part_type(path):
            return bad_request(f"{param}: this model takes text only, got a part of type {value}", param)
        return bad_request(f"{param} must not be {value}{expected}", param)
    if message.startswith("Expected "):
        message = _TYPE_NAME.sub(lambda match: _TYPE_NAMES[match[0]], message.replace("`", ""))
        message = message.replace(" | ", " or ").replace("Expected", "expected")
    else:
        message = message.replace("`", "")
    where = f"{param}, keys" if found["key"] else param
    return bad_request(f"{where}: {message}" if where else message, param or None)


def _is_part_type(path: str) -> bool:
    return re.search(r"\bcontent\[\d+\]\.type$", path) is not None


def _check_nesting(data: bytes) -> None:
    """Raises ApiError 400 for valid JSON with more levels, or more lists and objects, than a request can need."""
    # It has no more of either than opening brackets.
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    steps = _bracket_steps(data)
    if steps.count(b"\x01") > MAX_CONTAINERS:
        raise bad_request(f"the request body holds more than {MAX_CONTAINERS:,} lists and objects")
    if max(accumulate(array("b", steps)), default=0) > MAX_DEPTH:
        raise bad_request(_TOO_DEEP)


def _bracket_steps(data: bytes) -> bytes:
    """What each bracket outside of strings adds to the depth, as signed bytes. Whole passes in C: bodies are large."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(_AS_STEPS, _OTHER_BYTES).replace(b'""', b"")
    # What is left between two quotes are brackets in a string.
    return b"".join(marks.split(b'"')[::2])
