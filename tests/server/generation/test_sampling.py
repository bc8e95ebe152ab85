from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pellucid.core import SamplingParams, StructuredOutputs
from pellucid.server.errors import ApiError
from pellucid.server.generation.sampling import (
    SamplingDefaults,
    make_sampling_params,
    sampling_params,
    structured_outputs,
)
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.chat import ChatCompletionRequest
from pellucid.server.protocol.completions import CompletionRequest

VOCAB_SIZE = 129280
USER = {"role": "user", "content": "hi"}
NO_DEFAULTS = SamplingDefaults()


def chat_params(defaults: SamplingDefaults = NO_DEFAULTS, **fields: Any) -> SamplingParams:
    request, _ = decode_body(json.dumps({"messages": [USER], **fields}).encode(), ChatCompletionRequest)
    return sampling_params(request, defaults, VOCAB_SIZE)


def completion_params(defaults: SamplingDefaults = NO_DEFAULTS, **fields: Any) -> SamplingParams:
    request, _ = decode_body(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)
    return sampling_params(request, defaults, VOCAB_SIZE)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat_params(**fields)
    assert raised.value.status == 400
    return raised.value


def test_a_bare_request_gets_the_engines_defaults() -> None:
    assert chat_params() == SamplingParams(max_tokens=None)
    assert completion_params() == SamplingParams(max_tokens=16)


def test_every_field_arrives() -> None:
    given = {
        "n": 2, "seed": -3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.2, "allowed_token_ids": [1, 2], "prompt_logprobs": 3,
        "stop": ["a", "b"], "stop_token_ids": [7], "min_tokens": 4, "max_tokens": 9, "ignore_eos": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    expected = SamplingParams(logit_bias={5: -1.5}, logprobs=2, **given)
    assert chat_params(**given, logit_bias={"5": -1.5}, logprobs=True, top_logprobs=2) == expected
    assert completion_params(**given, logit_bias={"5": -1.5}, logprobs=2) == expected


def test_one_stop_string_needs_no_list() -> None:
    assert chat_params(stop="END").stop == ("END",)


def test_several_samples_may_be_greedy() -> None:
    assert chat_params(n=3, temperature=0).n == 3


def test_top_k_of_minus_one_is_off() -> None:
    assert chat_params(top_k=-1).top_k == 0


def test_the_request_wins_over_the_models_defaults_and_zero_is_a_wish() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, max_tokens=100)
    params = chat_params(defaults, temperature=0, top_k=3)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0, 0.95, 3, 100)
    assert chat_params(defaults, max_completion_tokens=5).max_tokens == 5


def test_a_completion_without_a_limit_is_16_tokens_whatever_the_model() -> None:
    assert completion_params(SamplingDefaults(max_tokens=100)).max_tokens == 16
    assert completion_params(max_tokens=0, echo=True).max_tokens == 0


def test_a_keep_stop_switch_has_two_names_that_may_not_disagree() -> None:
    assert chat_params(no_stop_trim=True).include_stop_str_in_output
    assert not chat_params(no_stop_trim=False, include_stop_str_in_output=False).include_stop_str_in_output
    assert refusal(no_stop_trim=True, include_stop_str_in_output=False).param == "no_stop_trim"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [151645], "min_tokens": 4}, "stop_token_ids"),
        ({"logit_bias": {"191222": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"allowed_token_ids": [129279, 129280]}, "allowed_token_ids"),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert str(VOCAB_SIZE) in error.message


def test_the_last_token_of_the_vocabulary_is_inside() -> None:
    assert chat_params(stop_token_ids=[VOCAB_SIZE - 1]).stop_token_ids == (VOCAB_SIZE - 1,)


def test_a_refusal_uses_the_requests_own_names() -> None:
    error = refusal(min_tokens=9, max_completion_tokens=8)
    assert error.param == "min_tokens" and "max_completion_tokens (8)" in error.message
    with pytest.raises(ApiError) as raised:
        make_sampling_params({"max_tokens": -1}, NO_DEFAULTS, 10, {"max_tokens": "max_output_tokens"})
    assert raised.value.param == "max_output_tokens"
    assert raised.value.message.startswith("max_output_tokens must be")


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutputs(json=SCHEMA_TEXT)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            StructuredOutputs(json=SCHEMA_TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA_TEXT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputs(json=SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, StructuredOutputs(grammar="root ::= 'a'")),
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"ebnf": "root ::= 'a'"}, StructuredOutputs(grammar="root ::= 'a'")),
        ({"json_schema": SCHEMA}, StructuredOutputs(json=SCHEMA_TEXT)),
        ({"json_schema": json.dumps(SCHEMA)}, StructuredOutputs(json=SCHEMA_TEXT)),
    ],
)  # fmt: skip
def test_every_spelling_of_a_constraint(fields: dict[str, Any], expected: StructuredOutputs | None) -> None:
    assert chat_params(**fields).structured_outputs == expected
    assert completion_params(**fields).structured_outputs == expected


def test_two_spellings_of_one_constraint_may_agree_but_not_differ() -> None:
    assert chat_params(regex="a", structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputs(regex="a")
    assert chat_params(regex="a", response_format={"type": "text"}).structured_outputs == StructuredOutputs(regex="a")
    error = refusal(regex="a", response_format={"type": "json_object"})
    assert error.param == "regex" and "response_format" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs"),
        ({"json_schema": "not json"}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"ebnf": ""}, "ebnf"),
    ],
)
def test_a_constraint_that_says_nothing_is_refused_not_dropped(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert param in error.message


def test_a_request_without_a_constraint_has_none() -> None:
    request, _ = decode_body(b'{"prompt": ""}', CompletionRequest)
    assert structured_outputs(request) is None


def write_config(directory: Path, text: str) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(text)
    return SamplingDefaults.from_checkpoint(directory)


def test_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    config = {
        "temperature": 0.6, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.05,
        "max_new_tokens": 4096, "eos_token_id": 1, "do_sample": True, "bos_token_id": None,
    }  # fmt: skip
    defaults = write_config(tmp_path, json.dumps(config))
    expected = SamplingDefaults(0.6, 0.95, 50, 0.01, 1.05, 4096)
    assert defaults == expected
    assert defaults.given() == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.05, "max_tokens": 4096,
    }  # fmt: skip


def test_a_checkpoint_without_the_file_and_a_gguf_file_have_none(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert SamplingDefaults.from_checkpoint(tmp_path) == SamplingDefaults()
    assert SamplingDefaults.from_checkpoint(gguf) == SamplingDefaults()
    assert SamplingDefaults().given() == {}


@pytest.mark.parametrize(
    "value", ["-1", '"0.6"', "true", "[1]", "NaN", "1e999", "1" + "0" * 400], ids=lambda value: value[:8]
)
def test_a_default_that_makes_no_sense_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    with caplog.at_level(logging.WARNING):
        defaults = write_config(tmp_path, f'{{"temperature": {value}, "max_new_tokens": {value}, "top_p": 0.5}}')
    assert defaults.given() == {"top_p": 0.5}
    assert "temperature" in caplog.text and "max_new_tokens" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff"])
def test_a_damaged_file_gives_no_defaults_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert SamplingDefaults.from_checkpoint(tmp_path) == SamplingDefaults()
    assert "generation_config.json" in caplog.text
