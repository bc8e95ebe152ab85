"""Logprobs of prompts and outputs against the full logits of the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pellucid import SamplingParams
from pellucid.core import TokenLogprobs
from pellucid.engine.engine import DebugModes
from tests import harness
from tests.engine.tiny import MakeLLM

Array = npt.NDArray[np.float64]

PROMPT = np.random.default_rng(4).integers(2, 320, 75).tolist()

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "preempted": {"block_size": 16, "max_num_batched_tokens": 20, "debug": DebugModes(force_preempt_every=3)},
    "smallest pool": {"block_size": 16, "num_kv_pages": 7},
}


@pytest.fixture(scope="module", params=["v3", "llama"])
def name(request: pytest.FixtureRequest) -> str:
    shape: str = request.param
    return shape


@pytest.fixture(scope="module")
def full(name: str, checkpoint: Callable[[str], Path]) -> Array:
    """Log-probabilities of every token after every position of the prompt, [75, 320]."""
    logits = harness.logits(checkpoint(name), [[(0, PROMPT)]], "cpu_native")[0]
    found: Array = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def assert_is(one: TokenLogprobs, token_id: int, row: Array, count: int) -> None:
    assert one.chosen.token_id == token_id
    assert one.chosen.logprob == pytest.approx(row[token_id], abs=1e-4)
    assert one.chosen.rank == (row > row[token_id]).sum() + 1
    best = np.argsort(-row)[:count]
    assert [top.token_id for top in one.top] == best.tolist()
    assert [top.rank for top in one.top] == list(range(1, count + 1))
    assert [top.logprob for top in one.top] == pytest.approx(row[best].tolist(), abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_prompt_logprobs_are_those_of_the_model_at_every_position(
    way: str, name: str, full: Array, make_llm: MakeLLM
) -> None:
    llm = make_llm(name, max_model_len=112, **WAYS[way])
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=4)
    other = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    # The second comes to a cache that holds its whole prompt, and must not read it.
    for _ in range(2):
        outputs = llm.generate([PROMPT[:30], PROMPT, PROMPT[:40]], [other, params, other])
        found = outputs[1].prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == len(PROMPT)
        for position, one in enumerate(found[1:], 1):
            assert one is not None
            assert_is(one, PROMPT[position], full[position - 1], 4)
        assert outputs[0].prompt_logprobs is None
    if way == "preempted":
        assert llm.engine.stats().preemptions > 0


def test_prompt_logprobs_of_a_prompt_alone_need_no_generated_token(full: Array, name: str, make_llm: MakeLLM) -> None:
    llm = make_llm(name)
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    assert output.outputs[0].token_ids == ()
    for position, one in enumerate(output.prompt_logprobs[1:], 1):
        assert one is not None
        assert_is(one, PROMPT[position], full[position - 1], 0)
    [single] = llm.generate([7], SamplingParams(max_tokens=0, prompt_logprobs=3))
    assert single.prompt_logprobs == (None,)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("kind", [{"temperature": 0}, {"seed": 5, "temperature": 1.4, "top_k": 40}])
def test_output_logprobs_equal_the_prompt_logprobs_of_the_same_text(
    kind: dict[str, Any], name: str, make_llm: MakeLLM
) -> None:
    """Decode against prefill, sampled against given: the same bits."""
    llm = make_llm(name)
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, logprobs=5, **kind))
    one = output.outputs[0]
    assert one.logprobs is not None
    assert [each.chosen.token_id for each in one.logprobs] == list(one.token_ids)
    given = SamplingParams(max_tokens=0, prompt_logprobs=5)
    [again] = llm.generate([*PROMPT, *one.token_ids], given)
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[len(PROMPT) :] == one.logprobs


def test_logprobs_come_with_the_deltas_that_they_belong_to(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    deltas = list(llm.stream(PROMPT, params))
    assert [[one.chosen.token_id for one in delta.logprobs] for delta in deltas] == [
        list(delta.token_ids) for delta in deltas
    ]
    assert (
        tuple(one for delta in deltas for one in delta.logprobs) == llm.generate(PROMPT, params)[0].outputs[0].logprobs
    )
    silent = llm.generate(PROMPT, SamplingParams(max_tokens=2))[0]
    assert silent.outputs[0].logprobs is None
