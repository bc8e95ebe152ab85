from __future__ import annotations

from typing import Any

import pytest

from pellucid.core import InvalidRequestError, PellucidError, SamplingParams
from pellucid.server import errors
from pellucid.server.errors import ApiError

EVERY_ERROR = {
    400: errors.bad_request("max_tokens must be positive", "max_tokens"),
    401: errors.unauthorized(),
    404: errors.not_found("the model 'x' is not served here", "model"),
    405: errors.method_not_allowed("DELETE", ("GET", "HEAD")),
    408: errors.timed_out("waited 30 s"),
    413: errors.too_large(10_000_000),
    415: errors.unsupported_media_type("text/plain"),
    500: errors.internal(),
    503: errors.overloaded("the queue is full", 2.5),
}


@pytest.mark.parametrize("status", EVERY_ERROR)
def test_the_body_is_openais_nested_object(status: int) -> None:
    error = EVERY_ERROR[status]
    assert error.status == status
    body = error.body()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"] and body["error"]["type"]


def test_the_field_and_the_code_reach_the_body() -> None:
    error = errors.bad_request("too long", "messages", "context_length_exceeded").body()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert EVERY_ERROR[404].body()["error"]["code"] == "model_not_found"


def test_anthropics_envelope_names_the_kind_and_the_field() -> None:
    kinds = {status: error.anthropic_body()["error"]["type"] for status, error in EVERY_ERROR.items()}
    assert kinds == {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        408: "timeout_error",
        413: "request_too_large",
        415: "invalid_request_error",
        500: "api_error",
        503: "overloaded_error",
    }
    assert errors.bad_request("must be positive", "max_tokens").anthropic_body() == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "max_tokens: must be positive"},
    }


def test_headers_tell_when_to_come_back_and_what_is_allowed() -> None:
    assert EVERY_ERROR[503].headers == {"Retry-After": "3"}
    assert errors.engine_dead(0).headers == {"Retry-After": "1"}
    assert EVERY_ERROR[405].headers == {"Allow": "GET, HEAD"}
    assert "WWW-Authenticate" in EVERY_ERROR[401].headers


def test_an_invalid_request_keeps_its_field() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(temperature=-1)
    error = errors.from_pellucid(refused.value)
    assert (error.status, error.param, error.type) == (400, "temperature", "invalid_request_error")
    assert error.message == str(refused.value)


def test_any_other_failure_is_500_without_local_paths() -> None:
    error = errors.from_pellucid(PellucidError("/home/ada/models/k2/config.json: damaged; see /v1/models or a/b"))
    assert error.status == 500
    assert error.message == "config.json: damaged; see /v1/models or a/b"


def test_a_message_is_one_line_of_limited_length() -> None:
    error = errors.bad_request("Traceback\n  File\tx\r\n\x00\x1b[31m" + "y" * 10_000, "p" * 10_000)
    assert error.message.startswith("Traceback File x [31myyy")
    assert len(error.message) == errors.MAX_MESSAGE
    assert error.param is not None and len(error.param) == errors.MAX_ECHO


@pytest.mark.parametrize("value", ["x" * 5000, "\n" * 300, list(range(5000)), 10**4000])
def test_a_quoted_value_is_short(value: object) -> None:
    assert len(errors.quote(value)) <= errors.MAX_ECHO
    assert "\n" not in errors.quote(value)


def sdk_error(module: Any, error: ApiError, body: dict[str, Any]) -> Any:
    """What an SDK's client raises when the server answers this."""
    httpx = pytest.importorskip("httpx2")
    answer = httpx.Response(error.status, json=body, headers=error.headers)
    transport = httpx.MockTransport(lambda request: answer)
    options: dict[str, Any] = {"api_key": "k", "base_url": "http://test", "max_retries": 0}
    client = getattr(module, "OpenAI", None) or module.Anthropic
    with pytest.raises(module.APIStatusError) as raised, httpx.Client(transport=transport) as http:
        client(http_client=http, **options).models.list()
    return raised.value


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (404, "NotFoundError"),
        (500, "InternalServerError"),
        (503, "InternalServerError"),
    ],
)
def test_openais_sdk_reads_every_member(status: int, name: str) -> None:
    openai = pytest.importorskip("openai")
    error = EVERY_ERROR[status]
    raised = sdk_error(openai, error, error.body())
    assert type(raised) is getattr(openai, name)
    assert (raised.param, raised.code, raised.type) == (error.param, error.code, error.type)
    assert error.message in str(raised)


@pytest.mark.parametrize(("status", "name"), [(400, "BadRequestError"), (413, "RequestTooLargeError")])
def test_anthropics_sdk_reads_the_envelope(status: int, name: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    error = EVERY_ERROR[status]
    raised = sdk_error(anthropic, error, error.anthropic_body())
    assert type(raised) is getattr(anthropic, name)
    assert raised.body == error.anthropic_body()
