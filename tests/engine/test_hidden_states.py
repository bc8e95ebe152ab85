"""Hidden states of every prompt token, with prefix cache and chunked prefill on (case C11 of the project's list)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pellucid import InvalidRequestError, SamplingParams
from pellucid.core import CheckpointError
from pellucid.engine.engine import DebugModes
from pellucid.engine.hidden_states import HiddenStatesHeader, load_hidden_states, save_hidden_states
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fingerprint import fingerprint
from tests import checkpoints
from tests.engine.tiny import MakeLLM

LAYERS = (0, 1, 2)
HIDDEN = 96


def prompts() -> list[list[int]]:
    """500 tokens; 500 that share the first 448; the first 64."""
    rng = np.random.default_rng(11)
    first = rng.integers(2, 320, 500).tolist()
    return [first, first[:448] + rng.integers(2, 320, 52).tolist(), first[:64]]


@pytest.mark.parametrize("name", ["v3", "v2lite", "llama"])
def test_rows_equal_those_without_cache_and_chunks_bit_by_bit(name: str, make_llm: MakeLLM) -> None:
    plain = make_llm(
        name,
        capture_layers=LAYERS,
        max_model_len=512,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    expected = [plain.hidden_states([prompt])[0].rows for prompt in prompts()]
    llm = make_llm(name, capture_layers=LAYERS, max_model_len=512, block_size=64, max_num_batched_tokens=128)
    assert llm.plan.enable_prefix_caching
    assert (llm.plan.page_size, llm.plan.max_num_batched_tokens) == (64, 128)
    for _ in range(2):
        found = llm.hidden_states(prompts())
        assert [len(one.prompt_token_ids) for one in found] == [500, 500, 64]
        for one, prompt, rows in zip(found, prompts(), expected, strict=True):
            assert one.prompt_token_ids == tuple(prompt)
            assert one.layers == LAYERS
            assert one.rows.shape == (len(prompt), len(LAYERS) * HIDDEN)
            assert torch.equal(one.rows, rows)
        # The cache holds these prompts now, and other requests do read it.
        [output] = llm.generate(prompts()[0], SamplingParams(max_tokens=1))
        metrics = output.outputs[0].metrics
        assert metrics is not None
        assert metrics.cached_prompt_tokens == 448


def test_rows_are_complete_after_preemptions_and_next_to_requests_that_want_none(make_llm: MakeLLM) -> None:
    plain = make_llm("llama", capture_layers=(1,), max_model_len=512)
    expected = [one.rows for one in plain.hidden_states(prompts())]
    llm = make_llm(
        "llama",
        capture_layers=(1,),
        block_size=16,
        max_model_len=512,
        num_kv_pages=40,
        max_num_batched_tokens=48,
        debug=DebugModes(force_preempt_every=4),
    )
    params = SamplingParams(temperature=0, max_tokens=0)
    busy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    others = [llm.engine.add_prompt(prompts()[2][:20], busy) for _ in range(2)]
    ids = [llm.engine.add_prompt(prompt, params, capture_hidden=True) for prompt in prompts()]
    while not all(llm.engine.is_finished(one) for one in (*ids, *others)):
        llm.engine.step()
    assert llm.engine.stats().preemptions > 0
    for request_id, rows in zip(ids, expected, strict=True):
        assert torch.equal(llm.engine.hidden_rows(request_id), rows)
        llm.engine.take_result(request_id)
    assert (
        llm.engine.take_result(others[0]).outputs[0].token_ids == llm.engine.take_result(others[1]).outputs[0].token_ids
    )


def test_layers_come_side_by_side_in_the_order_asked_for(make_llm: MakeLLM) -> None:
    one_by_one = [make_llm("llama", capture_layers=(layer,)).hidden_states([[5, 6, 7]])[0].rows for layer in (2, 0)]
    both = make_llm("llama", capture_layers=(2, 0)).hidden_states([[5, 6, 7]])[0]
    assert both.layers == (2, 0)
    assert torch.equal(both.rows, torch.cat(one_by_one, dim=-1))


def test_a_flat_list_of_ids_and_a_text_are_each_one_prompt(make_llm: MakeLLM) -> None:
    llm = make_llm("llama", capture_layers=(0,))
    assert [one.prompt_token_ids for one in llm.hidden_states([5, 6, 7])] == [(5, 6, 7)]
    [text] = llm.hidden_states("the dog")
    assert text.prompt_token_ids == tuple(llm.engine.encode("the dog"))


def test_hidden_states_without_captured_layers_are_refused_with_the_remedy(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequestError, match="capture_layers"):
        make_llm("llama").hidden_states([[1, 2]])
    with pytest.raises(InvalidRequestError, match=r"layer 3 .* outside \[0, 3\)"):
        make_llm("llama", capture_layers=(3,))


def test_a_bad_prompt_leaves_no_request_behind(make_llm: MakeLLM) -> None:
    llm = make_llm("llama", capture_layers=(0,))
    with pytest.raises(InvalidRequestError, match="999"):
        llm.hidden_states([[1, 2], [999]])
    assert not llm.engine.has_unfinished()


def test_a_file_of_hidden_states_says_what_it_holds(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm("llama", capture_layers=(0, 2))
    states = llm.hidden_states([[5, 6, 7], [8, 9]])
    path = tmp_path / "states.safetensors"
    save_hidden_states(path, states, llm.engine.model_sha256)
    header, loaded = load_hidden_states(path)
    assert header == HiddenStatesHeader(llm.engine.model_sha256, (0, 2), "float32", "output_of_layer, 0-based", True)
    assert [one.prompt_token_ids for one in loaded] == [(5, 6, 7), (8, 9)]
    for mine, theirs in zip(states, loaded, strict=True):
        assert torch.equal(mine.rows, theirs.rows)


def test_another_file_is_refused_by_its_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(CheckpointError, match=r"other\.safetensors: not a file of hidden states"):
        load_hidden_states(tmp_path / "other.safetensors")


def test_the_fingerprint_follows_values_config_and_nothing_else(tmp_path: Path) -> None:
    first = checkpoints.write("llama", tmp_path / "a")
    assert fingerprint(Checkpoint.open(first)) == fingerprint(
        Checkpoint.open(checkpoints.write("llama", tmp_path / "b"))
    )
    weights = tmp_path / "b" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert fingerprint(Checkpoint.open(tmp_path / "b")) != fingerprint(Checkpoint.open(first))
