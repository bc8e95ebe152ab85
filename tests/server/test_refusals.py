"""Requests that can never be served are refused at once by name, and whoever shares the batch does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer, run_server
from tests.server.streams import LONG, open_stream

VOCABULARY = 320


@pytest.fixture(scope="module")
def small_server(tiny_model: Path) -> Iterator[RunningServer]:
    """A KV pool of four pages of 16 tokens, a quarter of the context length."""
    small = ("--max-model-len", "256", "--num-kv-pages", "4", "--block-size", "16", "--log-level", "warning")
    with run_server(tiny_model, "--threads", "1", *small) as server:
        yield server
        assert server.stop() == 0


def test_what_can_never_fit_the_pool_is_refused_and_blocks_nobody(small_server: RunningServer) -> None:
    def complete(prompt_tokens: int, max_tokens: int) -> Any:
        body = {"prompt": [5] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
        return small_server.post("/v1/completions", body, timeout_s=10)

    too_long = complete(100, 8)
    assert too_long.status == 400
    assert all(number in too_long.json["error"]["message"] for number in ("100", "64"))
    assert complete(10, 8).status == 200
    almost = complete(60, 8)
    if almost.status == 200:
        assert almost.json["choices"][0]["finish_reason"] == "length"
    else:
        assert almost.status == 400
    assert complete(256, 1).status == 400
    assert complete(257, 0).status == 400
    ready = small_server.get("/health/ready").json
    assert (ready["running"], ready["waiting"]) == (0, 0)
    pages = small_server.post("/reset_prefix_cache", {}).json["pages"]
    assert pages == {"free": 4, "cached": 0, "held": 0, "total": 4}
    assert complete(10, 8).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [VOCABULARY + 5], "min_tokens": 4}, "stop_token_ids"),
        ({"logit_bias": {str(VOCABULARY): -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"prompt": [1, 2, VOCABULARY]}, "prompt"),
        ({"allowed_token_ids": [VOCABULARY - 1, VOCABULARY]}, "allowed_token_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
    ],
    ids=str,
)
def test_a_token_outside_the_vocabulary_is_a_400_that_names_the_field(
    tiny_server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    refused = tiny_server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 8, **fields})
    assert refused.status == 400
    error = refused.json["error"]
    assert (error["type"], error["param"].split("[")[0]) == ("invalid_request_error", param)
    assert error["message"]


def test_the_last_token_of_the_vocabulary_is_served_and_neighbours_of_refused_requests_go_on(
    tiny_server: RunningServer,
) -> None:
    body = {**LONG, "max_tokens": 300}
    alone = tiny_server.post("/v1/completions", body).json["choices"][0]["text"]
    with open_stream(tiny_server, body) as stream:
        first = stream.next()
        for _ in range(5):
            last = {"prompt": [VOCABULARY - 1], "max_tokens": 4, "stop_token_ids": [VOCABULARY - 1]}
            assert tiny_server.post("/v1/completions", last).status == 200
            assert tiny_server.post("/v1/completions", {"prompt": [VOCABULARY], "max_tokens": 4}).status == 400
        events = [first, *stream.rest()]
    assert events.pop() == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == alone
