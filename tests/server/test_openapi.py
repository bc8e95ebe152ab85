from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pellucid.server import app
from pellucid.server.errors import ApiError
from pellucid.server.openapi import ROUTES, openapi_document
from pellucid.server.protocol.chat import ChatCompletionRequest
from pellucid.server.protocol.error import AnthropicErrorResponse, ErrorResponse

DOCUMENT = openapi_document("1.2.3", models=("k2",))
POST = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize", "/reset_prefix_cache", "/flush_cache",
]  # fmt: skip
GET = [
    "/v1/models", "/v1/models/{id}", "/health", "/health/live", "/ready", "/health/ready", "/server_info", "/metrics",
    "/plan", "/version", "/openapi.json", "/",
]  # fmt: skip


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (inner for key, inner in value.items() if key == "$ref")
        yield from (found for inner in value.values() for found in references(inner))
    elif isinstance(value, list):
        yield from (found for inner in value for found in references(inner))


def operations(document: dict[str, Any] = DOCUMENT) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def schema_of(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = DOCUMENT["components"]["schemas"][name]
    return schema


def test_every_route_of_the_server_is_in_it() -> None:
    assert DOCUMENT["openapi"].startswith("3.1")
    assert DOCUMENT["info"]["version"] == "1.2.3"
    methods = {(method, path) for path, found in DOCUMENT["paths"].items() for method in found}
    assert methods >= {("post", path) for path in POST} | {("get", path) for path in GET}


def test_it_is_json() -> None:
    assert json.loads(msgspec.json.encode(DOCUMENT)) == DOCUMENT


def test_every_reference_leads_somewhere() -> None:
    found = set(references(DOCUMENT))
    assert "#/components/schemas/ChatCompletionRequest" in found
    names = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert found <= names
    mappings = re.findall(r'"mapping": (\{.*?\})', json.dumps(DOCUMENT))
    assert mappings and {value for mapping in mappings for value in json.loads(mapping).values()} <= names


def test_operations_have_names_of_their_own_and_describe_every_status() -> None:
    names = [operation["operationId"] for _, operation in operations()]
    assert len(set(names)) == len(names) == len(ROUTES)
    for path, operation in operations():
        assert "200" in operation["responses"], path
        assert all(response["description"] for response in operation["responses"].values()), path


def test_path_parameters_are_declared() -> None:
    for path, operation in operations():
        declared = [parameter["name"] for parameter in operation.get("parameters", ())]
        assert declared == re.findall(r"\{(\w+)\}", path)


def test_generating_routes_stream_and_tell_when_they_cannot() -> None:
    for path in POST[:4]:
        responses = DOCUMENT["paths"][path]["post"]["responses"]
        assert "text/event-stream" in responses["200"]["content"]
        assert {"400", "404", "408", "413", "415", "503"} <= set(responses)


def test_bounds_and_words_of_fields_are_said() -> None:
    chat = schema_of("ChatCompletionRequest")
    assert chat["required"] == ["messages"]
    assert chat["properties"]["messages"]["minItems"] == 1
    assert chat["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
    roles = chat["properties"]["messages"]["items"]["discriminator"]["mapping"]
    assert list(roles) == ["system", "developer", "user", "assistant", "tool"]
    prompt = schema_of("CompletionRequest")["properties"]["prompt"]
    assert [kind["type"] for kind in prompt["anyOf"]] == ["string", "array", "array", "array"]


def test_every_field_of_a_request_is_in_its_schema_and_no_refused_one() -> None:
    properties = set(schema_of("ChatCompletionRequest")["properties"])
    assert properties == set(ChatCompletionRequest.__struct_encode_fields__)
    assert not properties & set(ChatCompletionRequest.REFUSED)


def test_descriptions_are_for_users_of_the_api() -> None:
    text = json.dumps(DOCUMENT)
    assert "Raises" not in text and "msgspec" not in text


def test_models_that_are_served_are_the_ones_that_a_request_may_name() -> None:
    assert schema_of("ChatCompletionRequest")["properties"]["model"] == {"enum": ["k2", None]}
    assert DOCUMENT["paths"]["/v1/models/{id}"]["get"]["parameters"][0]["schema"]["enum"] == ["k2"]
    unsaid = openapi_document("1")
    assert {"type": "string"} in unsaid["components"]["schemas"]["ChatCompletionRequest"]["properties"]["model"][
        "anyOf"
    ]


@pytest.mark.parametrize("keys", [True, False])
def test_keys_are_asked_for_where_the_server_asks(keys: bool) -> None:
    document = openapi_document("1", keys=keys)
    assert ("securitySchemes" in document["components"]) is keys
    secured = {path for path, operation in operations(document) if "security" in operation}
    refusing = {path for path, operation in operations(document) if "401" in operation["responses"]}
    assert secured == refusing
    assert ("/v1/chat/completions" in secured) is keys
    assert not secured & {"/health", "/ready", "/metrics"}


def test_anthropics_routes_answer_with_anthropics_errors() -> None:
    schemas = {
        path: operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path, operation in operations()
        if "400" in operation["responses"]
    }
    anthropic = {path for path, name in schemas.items() if name == "AnthropicErrorResponse"}
    assert anthropic == {"/v1/messages", "/v1/messages/count_tokens"}
    assert set(schemas.values()) == {"AnthropicErrorResponse", "ErrorResponse"}


@pytest.mark.parametrize("status", [400, 401, 404, 503])
def test_errors_fit_their_schemas(status: int) -> None:
    error = ApiError(status, "m", param="p")
    for body, type in ((error.body(), ErrorResponse), (error.anthropic_body(), AnthropicErrorResponse)):
        assert msgspec.to_builtins(msgspec.convert(body, type)) == body


def test_it_lists_the_routes_that_the_application_has() -> None:
    served = {(method, re.sub(r"{.*?}", "{}", route.path)) for route in app.ROUTES for method in route.methods or ()}
    described = {(route.method, re.sub(r"{.*?}", "{}", route.path)) for route in ROUTES}
    assert {(method, path) for method, path in served if method != "HEAD"} <= described


def test_it_can_be_made_of_other_routes() -> None:
    document = openapi_document("1", routes=ROUTES[:1])
    assert list(document["paths"]) == ["/v1/chat/completions"]
    assert "CompletionRequest" not in document["components"]["schemas"]
