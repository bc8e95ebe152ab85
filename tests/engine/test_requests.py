"""Which requests the engine takes, how it refuses the others, and that nobody else notices. Cases C06 and C09."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pellucid import LLM, InvalidRequestError, SamplingParams
from pellucid.core import PlanError, Request
from pellucid.engine.engine import DebugModes
from tests import checkpoints
from tests.engine.tiny import MakeLLM, assert_idle, engine_arguments, write_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)


def finish(llm: LLM, *request_ids: str) -> None:
    for _ in range(500):
        if all(llm.engine.is_finished(one) for one in request_ids):
            return
        llm.engine.step()
    raise AssertionError(f"{request_ids} did not end within 500 steps")


# Case C06: max_model_len 256, page 16, a pool of 4 pages.
FITTING = {"block_size": 16, "num_kv_pages": 4, "max_model_len": 256}


@pytest.mark.parametrize("name", ["v3", "llama"])
def test_requests_that_can_never_fit_are_refused_at_once_and_block_nobody(name: str, make_llm: MakeLLM) -> None:
    llm = make_llm(name, **FITTING)
    tokens = np.random.default_rng(0).integers(2, 320, 300).tolist()

    def add(prompt_tokens: int, max_tokens: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return llm.engine.add_prompt(tokens[:prompt_tokens], params)

    with pytest.raises(InvalidRequestError) as refused:
        add(100, 8)
    assert "100" in str(refused.value)
    assert "64" in str(refused.value)
    served = add(10, 8)
    for prompt_tokens, max_tokens in ((60, 8), (256, 1), (257, 0), (65, 0), (64, 1)):
        with pytest.raises(InvalidRequestError, match=r"64|256"):
            add(prompt_tokens, max_tokens)
    whole = add(64, 0)
    to_the_brim = add(60, 4)
    finish(llm, served, whole, to_the_brim)
    first, *_ = (llm.engine.take_result(one).outputs[0] for one in (served, whole, to_the_brim))
    assert len(first.token_ids) == 8
    assert_idle(llm)
    again = add(10, 8)
    finish(llm, again)
    assert llm.engine.take_result(again).outputs[0].token_ids == first.token_ids
    assert_idle(llm)


def test_max_tokens_none_ends_with_length_where_the_pool_ends(make_llm: MakeLLM) -> None:
    [output] = make_llm(**FITTING).generate([5] * 50, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (14, "length")


# Case C09, with this vocabulary of 320 in place of 129280.
OUTSIDE: list[tuple[list[int] | str, dict[str, Any], str]] = [
    ([1, 2], {"stop_token_ids": [15164], "min_tokens": 4}, "stop_token_ids"),
    ([1, 2], {"logit_bias": {1912: -100}}, "logit_bias"),
    ([1, 2], {"logit_bias": {-1: 5}}, "logit_bias"),
    ([1, 2, 320], {}, "prompt"),
    ([1, 2, -1], {}, "prompt"),
    ([1, 2], {"allowed_token_ids": [319, 320]}, "allowed_token_ids"),
    ([], {}, "prompt"),
    ("", {}, "prompt"),
]


@pytest.mark.parametrize("name", ["v3", "llama"])
def test_token_ids_outside_the_vocabulary_are_refused_by_name_and_neighbours_keep_their_bits(
    name: str, make_llm: MakeLLM
) -> None:
    neighbours = [[7, 8, 9, 10], [11] * 70, [300, 5]]
    expected = [output.outputs[0] for output in make_llm(name).generate(neighbours, GREEDY)]
    llm = make_llm(name)
    ids = []
    for neighbour in neighbours:
        ids.append(llm.engine.add_prompt(neighbour, GREEDY))
        llm.engine.step()
        for prompt, arguments, param in OUTSIDE:
            with pytest.raises(InvalidRequestError) as refused:
                llm.engine.add_prompt(prompt, SamplingParams(max_tokens=8, **arguments))
            assert refused.value.param == param
    finish(llm, *ids)
    for request_id, one in zip(ids, expected, strict=True):
        found = llm.engine.take_result(request_id).outputs[0]
        assert (found.token_ids, found.logprobs, found.text) == (one.token_ids, one.logprobs, one.text)


def test_the_ids_of_case_c09_are_judged_by_the_vocabulary() -> None:
    vocabulary = 129280
    for arguments, param in (
        ({"stop_token_ids": [151645], "min_tokens": 4}, "stop_token_ids"),
        ({"logit_bias": {191222: -100}}, "logit_bias"),
        ({"logit_bias": {-1: 5}}, "logit_bias"),
        ({"allowed_token_ids": [129279, 129280]}, "allowed_token_ids"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            SamplingParams(**arguments).check_vocabulary(vocabulary)  # type: ignore[arg-type]
        assert refused.value.param == param
    SamplingParams(stop_token_ids=(129279,)).check_vocabulary(vocabulary)


def test_token_ids_given_twice_count_once() -> None:
    ids = [5, 3, 5, 4, 3] * 1000
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids)  # type: ignore[arg-type]
    assert params.stop_token_ids == params.allowed_token_ids == (5, 3, 4)
    params.check_vocabulary(6)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        more_than_there_are: dict[str, Any] = {name: dict.fromkeys(range(7), 1.0)}
        with pytest.raises(InvalidRequestError) as refused:
            SamplingParams(**more_than_there_are).check_vocabulary(6)
        assert refused.value.param == name


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("ids", [5, [[5]], [{}]], ids=str)
def test_what_is_no_list_of_token_ids_is_refused(name: str, ids: Any) -> None:
    given: dict[str, Any] = {name: ids}
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**given)
    assert refused.value.param == name


def test_samples_share_the_lists_of_their_request() -> None:
    params = SamplingParams(
        n=3, seed=4, allowed_token_ids=range(900), stop_token_ids=range(9), logit_bias={5: 1.0}, prompt_logprobs=1  # type: ignore[arg-type]
    )  # fmt: skip
    samples = [params.single(index) for index in range(3)]
    assert samples == [replace(params, n=1, seed=4 + i, prompt_logprobs=None if i else 1) for i in range(3)]
    assert params.n == 3
    for sample in samples:
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            assert getattr(sample, name) is getattr(params, name)


def test_the_last_row_of_the_vocabulary_may_be_named_everywhere(make_llm: MakeLLM) -> None:
    params = SamplingParams(
        temperature=0, stop_token_ids=(319,), logit_bias={319: 100.0}, allowed_token_ids=(318, 319), min_tokens=2
    )
    [output] = make_llm().generate([319], params)
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ((318, 318, 319), 319)


def test_an_empty_text_is_served_where_the_tokenizer_adds_bos(tmp_path: Path) -> None:
    path = write_tokenizer(checkpoints.write("llama", tmp_path), adds_bos=True)
    [output] = LLM(path, **engine_arguments("llama")).generate("", GREEDY)
    assert output.prompt_token_ids == (0,)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    "prompt", [[1.5], ["a"], [None], [1, "b"], None, 5, [[1, 2]]], ids=str
)  # fmt: skip
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(prompt: Any, make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    with pytest.raises(InvalidRequestError) as refused:
        llm.engine.add_prompt(prompt, GREEDY)
    assert refused.value.param == "prompt"


def test_ids_may_come_as_an_array_or_a_tensor(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    [expected] = llm.generate([5, 6, 7], GREEDY)
    for prompt in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7)):
        [output] = llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
        assert output.prompt_token_ids == (5, 6, 7)
        assert all(type(one) is int for one in output.prompt_token_ids)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_id_in_use_is_refused_and_can_be_used_again_after_its_end(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    params = SamplingParams(n=2, temperature=0, max_tokens=4, ignore_eos=True)
    assert llm.engine.add_prompt([5, 6], params, request_id="mine") == "mine"
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="mine") as refused:
            llm.engine.add_prompt([7], GREEDY, request_id="mine")
        assert refused.value.param == "request_id"
        finish(llm, "mine")  # finished, but its result is still to be taken
    assert len(llm.engine.take_result("mine").outputs) == 2
    llm.engine.add_prompt([7], GREEDY, request_id="mine")
    llm.engine.abort("mine")


def test_ids_given_by_the_engine_never_meet_ids_given_by_the_caller(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    taken = [llm.engine.add_prompt([5], GREEDY, request_id=f"request-{i}") for i in (0, 1, 3)]
    given = [llm.engine.add_prompt([5], GREEDY) for _ in range(3)]
    assert len({*taken, *given}) == 6
    finish(llm, *taken, *given)


def test_a_request_refused_for_a_later_sample_leaves_no_earlier_one_behind(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm("llama", enable_prefix_caching=False)
    add_request = llm.engine._worker.add_request

    def refuse_the_second(request: Request) -> None:
        if request.request_id.endswith("#1"):
            raise InvalidRequestError("not this one")
        add_request(request)

    monkeypatch.setattr(llm.engine._worker, "add_request", refuse_the_second)
    with pytest.raises(InvalidRequestError, match="not this one"):
        llm.engine.add_prompt([5], SamplingParams(n=2))
    assert not llm.engine.has_unfinished()


def test_seeds_of_samples_wrap_around(make_llm: MakeLLM) -> None:
    """The last seed there is, with samples after it."""
    params = SamplingParams(n=3, seed=2**63 - 1, max_tokens=4, temperature=1.0)
    first, second = (make_llm("llama").generate([5], params)[0].outputs for _ in range(2))
    assert [output.token_ids for output in first] == [output.token_ids for output in second]


@pytest.mark.parametrize("debug", [DebugModes(), DebugModes(force_preempt_every=2)], ids=["plain", "preempting"])
def test_an_abort_in_any_state_frees_its_pages_and_changes_nobody_elses_output(
    debug: DebugModes, make_llm: MakeLLM
) -> None:
    arguments: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 3, "debug": debug}
    prompts = [[7] * 40, [9, 10, 11], list(range(2, 92)), [5] * 17, [6, 7]]
    expected = [output.outputs[0].logprobs for output in make_llm("llama").generate(prompts, GREEDY)]
    for steps in range(12):
        llm = make_llm("llama", max_model_len=128, **arguments)
        ids = [llm.engine.add_prompt(prompt, GREEDY) for prompt in prompts]
        for _ in range(steps):
            llm.engine.step()
        # Prefilling, decoding, preempted or still waiting, depending on the number of steps.
        for request_id in (ids[0], ids[2], ids[4], "never heard of", ids[0]):
            llm.engine.abort(request_id)
            llm.engine.check_conservation()
        finish(llm, ids[1], ids[3])
        assert [llm.engine.take_result(ids[i]).outputs[0].logprobs for i in (1, 3)] == [expected[1], expected[3]]
        assert_idle(llm)


def test_an_abort_ends_all_samples(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    request_id = llm.engine.add_prompt([5, 6], SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    # The first computes the prompt, the others wait for its pages: abort must reach both kinds.
    llm.engine.step()
    stats = llm.engine.stats()
    assert stats.running + stats.waiting == 3
    llm.engine.abort(request_id)
    assert_idle(llm)
    assert not llm.engine.knows(request_id)
    assert llm.engine.step() == []


def test_batch_invariance_asked_of_a_backend_that_lacks_it_is_refused_with_the_remedy(make_llm: MakeLLM) -> None:
    with pytest.raises(PlanError) as refused:
        make_llm("v3", "reference", batch_invariant=True)
    message = str(refused.value)
    assert "depend on the batch" in message
    assert "--batch-invariant" in message
    assert "cpu_native" in message
    assert make_llm("v3", "cpu_native", batch_invariant=True).plan.batch_invariant
    assert not make_llm("v3", "reference").plan.batch_invariant


def test_end_tokens_beyond_the_models_rows_are_no_error(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    """A tokenizer may name an end token that the model has no row for; min_tokens bans end tokens by row."""
    path = write_tokenizer(checkpoints.write("llama", tmp_path))
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 5000]}')
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=3)
    [output] = LLM(path, **engine_arguments("llama")).generate([5, 6], params)
    [expected] = LLM(checkpoint("llama"), **engine_arguments("llama")).generate([5, 6], params)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
