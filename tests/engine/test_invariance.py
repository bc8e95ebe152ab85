"""What a request gets does not depend on what it is batched with, how its prefill is cut, or what the cache holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pellucid import SamplingParams
from pellucid.core import RequestOutput
from pellucid.engine.engine import DebugModes
from tests.engine.tiny import MakeLLM

SHAPES = ("v3", "llama", "qwen3-moe")
LENGTHS = (70, 1, 33, 64, 65, 5)


def prompts() -> list[list[int]]:
    """Six prompts over pages of 16; the third and the last two begin as the first does."""
    rng = np.random.default_rng(2)
    found = [rng.integers(2, 320, length).tolist() for length in LENGTHS]
    for index, shared in ((2, 33), (4, 48), (5, 4)):
        found[index][:shared] = found[0][:shared]
    return found


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunks of 19, pages of 16": {"max_num_batched_tokens": 19, "max_num_seqs": 6, "block_size": 16},
    "two at a time": {"max_num_seqs": 2},
    "whole prompts": {"enable_chunked_prefill": False},
    "pages of 8": {"block_size": 8},
    "smallest pool": {"block_size": 16, "num_kv_pages": 7},
    "smallest pool without cache": {"block_size": 16, "num_kv_pages": 7, "enable_prefix_caching": False},
    "preempted every third step": {"block_size": 16, "debug": DebugModes(force_preempt_every=3)},
    "all at once": {
        "block_size": 8,
        "num_kv_pages": 14,
        "max_num_batched_tokens": 11,
        "max_num_seqs": 5,
        "debug": DebugModes(force_preempt_every=3),
    },
}
PREEMPTING = ("smallest pool", "smallest pool without cache", "preempted every third step", "all at once")
REFERENCE_WAYS = ("together", "chunks of 7", "smallest pool", "all at once")


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_output_of_the_reference_is_the_same_in_every_way_to_run_it(name: str, make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
    alone = make_llm(name, "reference", max_model_len=112, enable_prefix_caching=False)
    expected = [alone.generate(prompt, params)[0] for prompt in prompts()]
    for output in expected:
        # It rounds otherwise in another batch: only clear choices can be compared.
        for one in output.outputs[0].logprobs or ():
            assert one.top[0].logprob - one.top[1].logprob > 2e-4
    for way in REFERENCE_WAYS:
        llm = make_llm(name, "reference", **{"max_model_len": 112, **WAYS[way]})
        assert tokens(llm.generate(prompts(), params)) == tokens(expected), way


@pytest.mark.parametrize("name", SHAPES)
def test_cpu_native_gives_the_same_bits_in_every_way_to_run_it(name: str, make_llm: MakeLLM) -> None:
    """Penalties too: they count what was generated, and a preemption must not make them count twice."""
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        ignore_eos=True,
        logprobs=3,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    )
    alone = make_llm(name, max_model_len=112, enable_prefix_caching=False)
    expected = [alone.generate(prompt, params)[0].outputs[0].logprobs for prompt in prompts()]
    for way, arguments in WAYS.items():
        llm = make_llm(name, **{"max_model_len": 112, **arguments})
        found = llm.generate(prompts(), params)
        assert [output.outputs[0].logprobs for output in found] == expected, way
        warm = llm.generate(prompts()[::-1], params)[::-1]
        assert [output.outputs[0].logprobs for output in warm] == expected, f"{way}, warm cache"
        if way in PREEMPTING:
            assert llm.engine.stats().preemptions > 0, way


SEEDED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0},
]


@pytest.mark.parametrize("name", SHAPES)
def test_a_seeded_request_samples_the_same_tokens_in_every_way_to_run_it(name: str, make_llm: MakeLLM) -> None:
    params = [
        SamplingParams(seed=100 + index, max_tokens=16, ignore_eos=True, **kind) for index, kind in enumerate(SEEDED)
    ]
    alone = make_llm(name, max_model_len=112, enable_prefix_caching=False)
    expected = [tokens(alone.generate(prompt, one))[0] for prompt, one in zip(prompts(), params, strict=True)]
    assert len(set(expected)) == len(expected)
    for way, arguments in WAYS.items():
        llm = make_llm(name, **{"max_model_len": 112, **arguments})
        assert tokens(llm.generate(prompts(), params)) == expected, way


def test_another_seed_samples_other_tokens_and_the_engines_seed_counts_where_a_request_has_none(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm(max_model_len=112)
    first, second = (tokens(llm.generate([5, 6, 7], SamplingParams(seed=seed, max_tokens=16)))[0] for seed in (1, 2))
    assert first != second
    unseeded = [tokens(make_llm(seed=seed).generate([5, 6, 7], SamplingParams(max_tokens=16))) for seed in (0, 0, 1)]
    assert unseeded[0] == unseeded[1] != unseeded[2]


def test_samples_of_one_prompt_are_numbered_and_equal_to_single_requests_with_the_next_seeds(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm(max_model_len=112, block_size=8, num_kv_pages=20, debug=DebugModes(force_preempt_every=3))
    params = SamplingParams(n=5, seed=40, max_tokens=12, ignore_eos=True)
    [output] = llm.generate(prompts()[2], params)
    assert [one.index for one in output.outputs] == [0, 1, 2, 3, 4]
    single = [
        llm.generate(prompts()[2], SamplingParams(seed=40 + index, max_tokens=12, ignore_eos=True))[0]
        for index in range(5)
    ]
    assert [one.token_ids for one in output.outputs] == tokens(single)
    assert len({one.token_ids for one in output.outputs}) == 5


def test_samples_of_one_greedy_prompt_are_equal(make_llm: MakeLLM) -> None:
    [output] = make_llm("llama").generate([3, 4, 5], SamplingParams(n=3, temperature=0, max_tokens=6))
    assert len({one.token_ids for one in output.outputs}) == 1


def test_the_prefix_cache_is_used_and_salts_keep_it_apart(make_llm: MakeLLM) -> None:
    llm = make_llm(block_size=16)
    params = SamplingParams(temperature=0, max_tokens=2)

    def cached(salt: str) -> int:
        request_id = llm.engine.add_prompt(prompts()[0], params, cache_salt=salt)
        while not llm.engine.is_finished(request_id):
            llm.engine.step()
        metrics = llm.engine.take_result(request_id).outputs[0].metrics
        assert metrics is not None
        return metrics.cached_prompt_tokens

    assert [cached(""), cached(""), cached("tenant"), cached("tenant"), cached("")] == [0, 64, 0, 64, 64]
    llm.engine.reset_prefix_cache()
    assert cached("") == 0
