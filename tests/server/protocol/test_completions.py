from __future__ import annotations

import json
from typing import Any

import pytest

from pellucid.server.errors import ApiError
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.completions import MAX_PROMPTS, CompletionRequest


def completion(**fields: Any) -> CompletionRequest:
    request, unknown = decode_body(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)
    assert unknown == ()
    return request


def refused_param(**fields: Any) -> str | None:
    with pytest.raises(ApiError) as raised:
        completion(**fields)
    assert raised.value.status == 400
    return raised.value.param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["hi", ""], ["hi", ""]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_kind_of_prompt_is_a_list_of_prompts(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], [1, "a"], ["a", [1]], [1, [1]]])
def test_empty_lists_and_mixed_kinds_are_refused(prompt: object) -> None:
    assert refused_param(prompt=prompt) == "prompt"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(None, "prompt"), (1, "prompt"), ([1.5], "prompt[0]"), ([True], "prompt[0]"), ([[1, None]], "prompt[0][1]")],
)
def test_other_types_are_refused_where_they_are(prompt: object, param: str) -> None:
    assert refused_param(prompt=prompt) == param


def test_the_number_of_prompts_is_bounded_and_that_of_tokens_is_not() -> None:
    assert refused_param(prompt=["a"] * (MAX_PROMPTS + 1)) == "prompt"
    assert refused_param(prompt=[[1]] * (MAX_PROMPTS + 1)) == "prompt"
    assert len(completion(prompt=[1] * (MAX_PROMPTS + 1)).prompts[0]) == MAX_PROMPTS + 1


def test_the_request_of_an_evaluation_harness_is_understood() -> None:
    request = completion(prompt=[[1, 2]], max_tokens=1, logprobs=1, echo=True, seed=1234, temperature=0)
    assert request.echo and request.logprobs_limit == (1, "logprobs") and request.token_limit == (1, "max_tokens")


def test_logprobs_of_zero_is_not_none() -> None:
    assert completion(logprobs=0).logprobs_limit[0] == 0
    assert completion().logprobs_limit[0] is None
    assert refused_param(logprobs=True) == "logprobs"


def test_best_of_may_only_repeat_n() -> None:
    assert completion(best_of=1).n is None
    assert completion(best_of=3, n=3).n == 3
    assert refused_param(best_of=2) == "best_of"
    assert refused_param(best_of=3, n=2) == "best_of"


def test_suffix_is_refused_unless_empty() -> None:
    completion(suffix="")
    assert refused_param(suffix="end") == "suffix"
