"""`close_objects`: what it closes, what it leaves, and that it never lets in what the schema keeps out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import validator_for

from pellucid.tokenizer.json_schema import close_objects

A = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, {**A, "additionalProperties": False}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"items": A}, {"items": {**A, "additionalProperties": False}}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"},
         {"$defs": {"x": {**A, "additionalProperties": False}}, "$ref": "#/$defs/x"}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [{**A, "additionalProperties": False}, {"type": "null"}]}),
    ],
)  # fmt: skip
def test_objects_that_say_nothing_of_other_members_have_none(schema: Any, expected: Any) -> None:
    assert close_objects(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {}}},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {**A, "anyOf": [{"required": ["b"], "properties": {"b": {}}}]},
        {"properties": {"a": {"allOf": [A]}}},
        {"enum": [{"properties": {"a": 1}}]},
        {"const": {"properties": {"a": 1}}},
    ],
    ids=str,
)
def test_what_says_it_itself_stays(schema: Any) -> None:
    assert close_objects(schema) == schema


NAMES = st.sampled_from(["a", "b", "c", "properties", "items"])
LEAVES = st.sampled_from([True, {}, {"type": "integer"}, {"enum": [1, {"a": 1}]}, {"const": {"b": 2}}])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)},
            optional={
                "required": st.lists(NAMES, max_size=2, unique=True),
                "additionalProperties": inner,
                "anyOf": st.lists(inner, min_size=1, max_size=2),
            },
        ),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=3)}),
    ),
    max_leaves=8,
)
VALUES = st.recursive(
    st.sampled_from([1, "x", None]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, VALUES)
def test_what_is_valid_when_closed_was_valid_before(schema: Any, value: Any) -> None:
    if validator_for(close_objects(schema)).is_valid(value):
        assert validator_for(schema).is_valid(value)
