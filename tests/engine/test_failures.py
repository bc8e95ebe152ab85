"""A step that fails, one request that can't go on, Ctrl-C: the rest goes on, and nothing leaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from pellucid import LLM, InvalidRequestError, PellucidError, SamplingParams
from pellucid.layers.batch import ForwardBatch
from pellucid.models.decoder import Decoder, DecoderOutput
from tests.engine.tiny import MakeLLM, assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
POISON = 77
STRICT = SamplingParams(temperature=0, allowed_token_ids=(1,), min_tokens=3, max_tokens=6)
"""Allows the end token alone and bans it for three tokens: nothing is left to choose from."""


class Faulty:
    """A decoder whose logits are NaN after token `POISON`, and which calls `before` at each step."""

    def __init__(self, decoder: Decoder, before: Callable[[], None]) -> None:
        self.decoder, self.before = decoder, before

    def forward(self, batch: ForwardBatch, capture: Sequence[int] = ()) -> DecoderOutput:
        self.before()
        output = self.decoder.forward(batch, capture)
        output.logits[batch.token_ids[batch.logit_rows] == POISON] = math.nan
        return output


def break_model(llm: LLM, before: Callable[[], None] = lambda: None) -> None:
    runner = llm.engine._worker._runner
    runner.model = Faulty(runner.model, before)  # type: ignore[assignment]


def raise_at(step: int, error: BaseException) -> Callable[[], None]:
    """Raises `error` at the `step`-th call, once."""
    calls = iter([*[None] * (step - 1), error])

    def before() -> None:
        found = next(calls, None)
        if found is not None:
            raise found

    return before


def test_nan_logits_end_their_own_request_alone(make_llm: MakeLLM) -> None:
    prompts = [[5, 6, 7], [9] * 70]
    expected = [output.outputs[0].token_ids for output in make_llm("llama").generate(prompts, GREEDY)]
    assert POISON not in {*expected[0], *expected[1]}
    llm = make_llm("llama", max_num_batched_tokens=32)
    break_model(llm)
    ids = [llm.engine.add_prompt(prompt, GREEDY) for prompt in (prompts[0], [8, POISON], prompts[1])]
    deltas = []
    while not all(llm.engine.is_finished(one) for one in ids):
        deltas += llm.engine.step()
    ended = {delta.request_id: delta for delta in deltas if delta.finish_reason is not None}
    assert ended[ids[1]].finish_reason == "abort"
    assert "not finite" in str(ended[ids[1]].error)
    assert ids[1] in str(ended[ids[1]].error)
    assert [llm.engine.take_result(ids[i]).outputs[0].token_ids for i in (0, 2)] == expected
    assert llm.engine.take_result(ids[1]).outputs[0].finish_reason == "abort"


def test_generate_raises_the_error_of_a_request_that_cannot_go_on_and_can_be_called_again(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    expected = llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="no token to choose from"):
        llm.generate([[5, 6], [7]], [GREEDY, STRICT])
    assert_idle(llm)
    assert llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids == expected


def test_a_stream_raises_its_own_error_and_another_one_goes_on(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    expected = llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids
    healthy = llm.stream([5, 6], GREEDY)
    found = [*next(healthy).token_ids]
    with pytest.raises(InvalidRequestError, match="no token to choose from"):
        list(llm.stream([7], STRICT))
    found += [token_id for delta in healthy for token_id in delta.token_ids]
    assert tuple(found) == expected


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("x"), PellucidError("x")], ids=repr)
def test_after_a_step_that_was_interrupted_the_engine_is_idle_and_serves_as_before(
    error: BaseException, step: int, make_llm: MakeLLM
) -> None:
    prompts = [[5, 6, 7], [9] * 70, [10, 11]]
    expected = [output.outputs[0].token_ids for output in make_llm("llama").generate(prompts, GREEDY)]
    llm = make_llm("llama", max_num_batched_tokens=32, max_num_seqs=2)
    break_model(llm, raise_at(step, error))
    with pytest.raises(type(error)):
        llm.generate(prompts, GREEDY)
    assert_idle(llm)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected


def test_a_stream_whose_step_was_interrupted_elsewhere_ends_with_an_error_and_does_not_hang(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    stream = llm.stream([5, 6], GREEDY)
    next(stream)
    break_model(llm, raise_at(2, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([7, 8], GREEDY)
    with pytest.raises(PellucidError, match="aborted"):
        list(stream)
