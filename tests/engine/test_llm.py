"""`LLM`, the offline API: one prompt or many, chats, streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pellucid import LLM, InvalidRequestError, PellucidError, SamplingParams
from pellucid.engine.output import TextDelta
from tests import checkpoints
from tests.engine.tiny import MakeLLM, assert_idle, engine_arguments, write_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TURNS = [{"role": "user", "content": "the dog"}]


def test_generate_takes_a_text_ids_or_a_list_and_answers_in_order(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ids = tuple(llm.engine.encode("the lazy dog"))
    [text] = llm.generate("the lazy dog", GREEDY)
    [flat] = llm.generate(list(ids), GREEDY)
    assert (text.prompt, text.prompt_token_ids) == ("the lazy dog", ids)
    assert (flat.prompt, flat.prompt_token_ids) == (None, ids)
    assert text.outputs[0].token_ids == flat.outputs[0].token_ids
    many = llm.generate([[5, 6], "the lazy dog", [7] * 80, list(ids)], GREEDY)
    assert [output.prompt_token_ids for output in many] == [(5, 6), ids, (7,) * 80, ids]
    assert many[1].outputs[0].token_ids == many[3].outputs[0].token_ids == flat.outputs[0].token_ids
    assert len({output.request_id for output in many}) == 4
    assert llm.generate([], GREEDY) == []


def test_params_are_one_for_all_or_one_each(make_llm: MakeLLM) -> None:
    llm = make_llm()
    each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 3)]
    found = llm.generate([[5], [6]], each)
    assert [len(output.outputs[0].token_ids) for output in found] == [1, 3]
    with pytest.raises(InvalidRequestError, match="2 prompts but 1 SamplingParams"):
        llm.generate([[5], [6]], each[:1])
    assert len(llm.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs) == 1


def test_a_call_with_one_bad_prompt_runs_none_of_them(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match="5000"):
        llm.generate([[5], [6, 5000], [7]], GREEDY)
    assert_idle(llm)
    assert llm.engine.stats().steps == 0


def test_chat_is_generate_on_the_templates_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm()
    text = "<s>user\nthe dog\n<s>assistant\n"
    assert llm.tokenizer is not None
    prompt = llm.apply_chat_template(TURNS)
    assert llm.tokenizer.decode(prompt, skip_special_tokens=False) == text
    [one] = llm.chat(TURNS, GREEDY)
    assert one.prompt_token_ids == tuple(prompt)
    several = llm.chat([TURNS, [{"role": "user", "content": "fox"}]], GREEDY)
    assert several[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert len(several) == 2
    streamed = list(llm.stream_chat(TURNS, GREEDY))
    assert "".join(delta.text for delta in streamed) == one.outputs[0].text


def test_stream_gives_every_token_once_and_the_end_with_metrics(make_llm: MakeLLM) -> None:
    llm = make_llm()
    deltas = list(llm.stream([5, 6, 7], GREEDY))
    whole = llm.generate([5, 6, 7], GREEDY)[0].outputs[0]
    assert tuple(token_id for delta in deltas for token_id in delta.token_ids) == whole.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["length"]
    assert [delta.metrics is not None for delta in deltas] == [False] * 5 + [True]


def test_samples_are_streamed_side_by_side(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)
    found: dict[int, tuple[int, ...]] = {}
    for delta in llm.stream([5, 6], params):
        found[delta.index] = found.get(delta.index, ()) + delta.token_ids
    assert found == {one.index: one.token_ids for one in llm.generate([5, 6], params)[0].outputs}


def test_leaving_a_stream_early_aborts_its_request(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream([5, 6], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.engine.stats().running == 1
    stream.close()
    assert_idle(llm)
    for _ in llm.stream([5, 6], SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    assert_idle(llm)


def test_a_stream_that_was_never_read_leaves_nothing_behind(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.stream([5, 6], GREEDY)
    assert_idle(llm)


def test_streams_read_in_turns_and_a_call_in_between_each_get_all_of_their_own(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompts = [[5, 6], [7] * 20, [8]]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts[:2]]
    found: list[list[TextDelta]] = [[next(stream)] for stream in streams]
    [between] = llm.generate(prompts[2], GREEDY)
    assert between.outputs[0].token_ids == expected[2]
    for stream, deltas in zip(streams, found, strict=True):
        deltas += stream
        assert deltas[-1].finish_reason == "length"
    assert [tuple(i for delta in deltas for i in delta.token_ids) for deltas in found] == expected[:2]


def test_a_call_does_not_wait_for_a_stream_that_is_open(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream([5, 6], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    llm.generate([8], GREEDY)
    assert llm.engine.stats().steps < 20
    stream.close()


def test_an_aborted_stream_ends_with_an_error_and_does_not_hang(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream([5, 6], GREEDY)
    request_id = next(stream).request_id
    llm.engine.abort(request_id)
    with pytest.raises(PellucidError, match="aborted"):
        list(stream)


def test_without_a_tokenizer_ids_are_served_and_text_is_refused_with_the_remedy(tmp_path: Path) -> None:
    llm = LLM(checkpoints.write("llama", tmp_path), **engine_arguments("llama"))
    [output] = llm.generate([5, 6], GREEDY)
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (6, "")
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        llm.generate("the dog", GREEDY)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        llm.chat(TURNS, GREEDY)
    with pytest.raises(InvalidRequestError, match="tokenizer") as refused:
        llm.generate([5, 6], SamplingParams(stop="x"))
    assert refused.value.param == "stop"
    assert_idle(llm)


def test_a_gguf_file_without_a_tokenizer_serves_ids_too(tmp_path: Path) -> None:
    from tests.gguf_checkpoints import write_gguf

    write_gguf("llama", tmp_path / "model.gguf")
    llm = LLM(tmp_path / "model.gguf", **engine_arguments("llama"))
    expected = LLM(checkpoints.write("llama", tmp_path / "hf"), **engine_arguments("llama")).generate([5, 6], GREEDY)
    assert llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    path = write_tokenizer(checkpoints.write("llama", tmp_path), chat_template=None)
    with pytest.raises(InvalidRequestError, match="chat template"):
        LLM(path, **engine_arguments("llama")).chat(TURNS, GREEDY)


def test_two_engines_live_in_one_process_and_do_not_meet(make_llm: MakeLLM) -> None:
    first, second = make_llm("v3"), make_llm("llama")
    alone = (
        first.generate([5, 6], GREEDY)[0].outputs[0].token_ids,
        second.generate([5, 6], GREEDY)[0].outputs[0].token_ids,
    )
    streams = first.stream([5, 6], GREEDY), second.stream([5, 6], GREEDY)
    found: tuple[list[int], list[int]] = ([], [])
    for pair in zip(*streams, strict=True):
        for tokens, delta in zip(found, pair, strict=True):
            tokens += delta.token_ids
    assert (tuple(found[0]), tuple(found[1])) == alone
    assert alone[0] != alone[1]


def test_loading_reports_its_progress_up_to_the_last_byte(checkpoint: Callable[[str], Path]) -> None:
    seen = []
    LLM(checkpoint("llama"), on_progress=seen.append, **engine_arguments("llama"))
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert seen[-1].done == seen[-1].total
    assert len(seen) > 10


def test_samples_of_one_prompt_compute_it_once(make_llm: MakeLLM) -> None:
    llm = make_llm("llama", block_size=16, num_kv_pages=64)
    prompt = list(range(2, 100))
    [output] = llm.generate([prompt], SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True))
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    # 98 tokens are six full pages of 16: the three later samples read them from the cache.
    assert [one.metrics.cached_prompt_tokens for one in output.outputs if one.metrics] == [0, 96, 96, 96]
    alone = [
        llm.generate([prompt], SamplingParams(temperature=1.0, seed=3 + i, max_tokens=6, ignore_eos=True))[0].outputs[0]
        for i in range(4)
    ]
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone]
