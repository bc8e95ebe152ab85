"""Structured outputs through the whole engine: every output conforms, however it is batched, cut or preempted."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from pellucid import InvalidRequestError, SamplingParams
from pellucid.core import CompletionOutput, PellucidError, StructuredOutputs
from pellucid.engine.engine import DebugModes
from pellucid.tokenizer import structured_output
from tests.engine.tiny import MakeLLM, assert_idle

EOS = 1
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMS: list[StructuredOutputs | None] = [
    StructuredOutputs(json=json.dumps(PERSON)),
    None,
    StructuredOutputs(regex=r"[a-z]{3,6} [0-9]{2}"),
    StructuredOutputs(choice=("lazy dog", "lazy fox", "quick")),
    StructuredOutputs(grammar='start: "(" start ")" | "[" ITEM "]"\nITEM: /[xyz]{2}/'),
    None,
]
PROMPTS = ["the quick brown fox", "pack my box", "jumps over", "with five dozen jugs and judge my vow", "a", "b c"]


def params_of(forms: Sequence[StructuredOutputs | None], **fields: Any) -> list[SamplingParams]:
    defaults: dict[str, Any] = {"max_tokens": 48, "temperature": 1.0}
    return [
        SamplingParams(seed=50 + index, structured_outputs=form, **defaults | fields)
        for index, form in enumerate(forms)
    ]


def assert_conforms(form: StructuredOutputs | None, output: CompletionOutput) -> None:
    """A complete output is what was asked for, and ends with its end token; `length` may cut it anywhere."""
    assert output.finish_reason in ("stop", "length")
    if form is None or output.finish_reason == "length":
        return
    assert output.token_ids[-1] == EOS
    text = output.text
    if form.json is not None:
        person = json.loads(text)
        assert list(person) == ["name", "age"]
        assert len(person["name"]) <= 5
        assert 0 <= person["age"] <= 99
    elif form.regex is not None:
        assert re.fullmatch(form.regex, text)
    elif form.choice is not None:
        assert text in form.choice
    else:
        assert re.fullmatch(r"(\(*)\[[xyz]{2}\](\)*)", text)
        assert text.count("(") == text.count(")")


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0}, {"temperature": 1.5, "top_p": 0.8}, {"frequency_penalty": 1.0}]
)
def test_every_output_conforms(fields: dict[str, Any], make_llm: MakeLLM) -> None:
    outputs = make_llm("llama").generate(PROMPTS, params_of(FORMS, **fields))
    for form, output in zip(FORMS, outputs, strict=True):
        assert_conforms(form, output.outputs[0])
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 2


def test_outputs_are_the_same_alone_together_cut_and_preempted(make_llm: MakeLLM) -> None:
    """A preempted request computes its tokens again, and its grammar must not follow them twice."""
    params = params_of(FORMS)
    alone = make_llm("llama", enable_prefix_caching=False)
    expected = [alone.generate(*pair)[0].outputs[0].token_ids for pair in zip(PROMPTS, params, strict=True)]
    ways: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"block_size": 16, "debug": DebugModes(force_preempt_every=3)},
        {"block_size": 8, "max_model_len": 72, "num_kv_pages": 10, "max_num_seqs": 5},
    ]
    for way in ways:
        llm = make_llm("llama", **way)
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == expected, way
        if "block_size" in way:
            assert llm.engine.stats().preemptions > 0
    assert [alone.generate(*pair)[0].outputs[0].token_ids for pair in zip(PROMPTS, params, strict=True)] == expected


def test_samples_of_one_prompt_each_follow_the_form_on_their_own(make_llm: MakeLLM) -> None:
    form = FORMS[2]
    [output] = make_llm("llama").generate("the", SamplingParams(n=5, seed=1, structured_outputs=form, max_tokens=32))
    for one in output.outputs:
        assert_conforms(form, one)
    assert len({one.text for one in output.outputs}) > 1


def test_samples_and_requests_of_one_form_cost_one_compilation(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    run_deep = structured_output.run_deep
    monkeypatch.setattr(structured_output, "run_deep", lambda *given: made.append(1) or run_deep(*given))
    llm = make_llm("llama")
    for _ in range(2):
        form = StructuredOutputs(choice=("lazy dog", "lazy fox"))
        llm.generate(["the", "a"], SamplingParams(n=8, structured_outputs=form, max_tokens=8))
    assert len(made) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"ignore_eos": True},
        {"min_tokens": 40},
        {"ignore_eos": True, "min_tokens": 40},
        {"ignore_eos": True, "stop_token_ids": (EOS,), "min_tokens": 40},
        {"logit_bias": {EOS: -100.0}},
    ],
)
def test_a_complete_output_ends_with_stop_whatever_else_was_asked(fields: dict[str, Any], make_llm: MakeLLM) -> None:
    """`ignore_eos` and `min_tokens` hold as long as the form lets it go on, and no longer."""
    llm = make_llm("llama")
    [output] = llm.generate("the", params_of([StructuredOutputs(regex="[a-f]{9}")], **fields))
    one = output.outputs[0]
    assert (one.finish_reason, one.stop_reason) == ("stop", None)
    assert re.fullmatch("[a-f]{9}", one.text)
    assert one.token_ids.count(EOS) == 1
    assert_idle(llm)
    [longer] = llm.generate("the", params_of([StructuredOutputs(regex="[a-f]+")], ignore_eos=True, max_tokens=20))
    assert longer.outputs[0].finish_reason == "length"
    assert len(longer.outputs[0].text) >= 20


def test_a_stop_string_and_a_stop_token_may_cut_an_output(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    form = StructuredOutputs(regex="aaaa;bbbb")
    [output] = llm.generate("the", params_of([form], stop=(";",)))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("aaaa", ";")
    (semicolon,) = llm.engine.encode(";")
    [output] = llm.generate("the", params_of([form], stop_token_ids=(semicolon,)))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("aaaa", semicolon)


BAD = [
    StructuredOutputs(json='{"type": 5}'),
    StructuredOutputs(json="{"),
    StructuredOutputs(regex="("),
    StructuredOutputs(regex=r"[^\s\S]"),
    StructuredOutputs(grammar="start: start"),
    StructuredOutputs(grammar="root ::= missing"),
]


@pytest.mark.parametrize("bad", BAD, ids=[str(index) for index in range(len(BAD))])
def test_a_bad_form_is_refused_and_the_engine_serves_on(bad: StructuredOutputs, make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    running = llm.engine.add_prompt("the", params_of(FORMS)[0])
    llm.engine.step()
    with pytest.raises(InvalidRequestError) as caught:
        llm.engine.add_prompt("pack", params_of([bad])[0])
    assert caught.value.param == "structured_outputs"
    assert llm.engine.stats().waiting == 0
    while not llm.engine.is_finished(running):
        llm.engine.step()
    assert_conforms(FORMS[0], llm.engine.take_result(running).outputs[0])


def test_without_a_compiler_the_remedy_is_named(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = make_llm("llama")
    with pytest.raises(PellucidError, match=r"pip install 'pellucid\[serve\]'"):
        llm.generate("the", params_of(FORMS)[0])
    assert_idle(llm)


def test_a_form_that_fails_on_the_way_ends_its_request_alone(make_llm: MakeLLM) -> None:
    """More states than the limit come up only as the output grows."""
    llm = make_llm("llama")
    hopeless = StructuredOutputs(regex="a{1000000000}")
    ids = [llm.engine.add_prompt("the", one) for one in params_of([FORMS[2], hopeless, FORMS[3]])]
    errors: dict[str, Any] = {}
    while not all(llm.engine.is_finished(one) for one in ids):
        errors |= {delta.request_id: delta.error for delta in llm.engine.step() if delta.error is not None}
    assert list(errors) == [ids[1]]
    assert isinstance(errors[ids[1]], InvalidRequestError)
    assert_conforms(FORMS[2], llm.engine.take_result(ids[0]).outputs[0])
    assert llm.engine.take_result(ids[1]).outputs[0].finish_reason == "abort"
    assert_conforms(FORMS[3], llm.engine.take_result(ids[2]).outputs[0])


def test_a_request_that_leaves_no_token_within_its_form_ends_alone(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    (x,) = llm.engine.encode("x")
    with pytest.raises(InvalidRequestError, match="no token to choose from"):
        llm.generate("the", params_of([FORMS[2]], allowed_token_ids=(x, EOS))[0])
    [output] = llm.generate("the", params_of([StructuredOutputs(regex="[a-z]{4}")], allowed_token_ids=(x,)))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("xxxx", "stop")
