"""A real model, SmolLM2-135M-Instruct in Q4_1: sensible answers, and token for token what transformers gives."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.models.checkpoint import Checkpoint

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,\n\nI am writing to",
    "La photosynth\u00e8se est",
    "The three primary colours are red,",
]
LENGTH = 64
CLOSE_CALL = 1e-3
"""Where transformers' best two logits are nearer than this, rounding may choose either. One of 512 when written."""
MOST_CLOSE_CALLS = 3

GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    # One thread: two that wait for each other on a busy machine can be slower by far.
    return LLM(smollm2_path, threads=1, measure="off")


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is 2 + 2?", "4"),
        ("Which planet do we live on?", "Earth"),
    ],
)
def test_the_answer_holds_the_expected_word_and_ends_by_itself(question: str, word: str, llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": question}], GREEDY)
    answer = output.outputs[0]
    assert word in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text
    assert answer.text == answer.text.strip()


def test_a_second_turn_reads_the_first_from_the_cache_and_is_answered_as_without_it(llm: LLM) -> None:
    turns = [{"role": "user", "content": "My name is Ada, I have a dog called Rex and I live in Lisbon."}]
    first = llm.chat(turns, GREEDY)[0].outputs[0].text
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "Where do I live?"}]
    warm = llm.chat(turns, GREEDY)[0].outputs[0]
    llm.engine.reset_prefix_cache()
    cold = llm.chat(turns, GREEDY)[0].outputs[0]
    assert warm.token_ids == cold.token_ids
    assert "Lisbon" in warm.text
    assert warm.metrics is not None
    assert cold.metrics is not None
    assert (warm.metrics.cached_prompt_tokens, cold.metrics.cached_prompt_tokens) == (64, 0)


def test_a_stop_string_cuts_real_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    stop = whole.text[21:30]
    cut = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=LENGTH, stop=stop))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text.partition(stop)[0], "stop", stop)


def test_every_token_is_the_one_that_transformers_would_take(llm: LLM, smollm2_path: Path) -> None:
    """Teacher-forced: one forward pass of transformers over our prompt and output, its argmax at every position."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    model = load_in_transformers(smollm2_path)
    close_calls = 0
    for output in outputs:
        found = output.outputs[0].token_ids
        assert len(found) == LENGTH
        ids = torch.tensor([[*output.prompt_token_ids, *found]])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
        best = logits.topk(2)
        wrong = best.indices[:, 0] != torch.tensor(found)
        close = best.values[:, 0] - best.values[:, 1] < CLOSE_CALL
        assert not (wrong & ~close).any(), f"{output.prompt!r}: other tokens at {wrong.nonzero().flatten().tolist()}"
        close_calls += int(close.sum())
    assert close_calls <= MOST_CLOSE_CALLS, f"{close_calls} of {len(PROMPTS) * LENGTH} choices are too close to compare"


def test_logprobs_are_those_of_transformers(llm: LLM, smollm2_path: Path) -> None:
    [output] = llm.generate(PROMPTS[1], SamplingParams(max_tokens=0, prompt_logprobs=5))
    with torch.inference_mode():
        logits = load_in_transformers(smollm2_path)(torch.tensor([output.prompt_token_ids])).logits[0]
    expected = logits.log_softmax(-1)
    assert output.prompt_logprobs is not None
    for position, one in enumerate(output.prompt_logprobs[1:], 1):
        assert one is not None
        row = expected[position - 1]
        assert one.chosen.logprob == pytest.approx(float(row[one.chosen.token_id]), abs=1e-3)
        assert [each.logprob for each in one.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)


@cache
def load_in_transformers(path: Path) -> Any:
    """transformers' Llama in fp32 with the file's values, decoded by the `gguf` package and not by us."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = Checkpoint.open(path).config
    config = LlamaConfig(**{name: value for name, value in keys.items() if name != "architectures"})
    reader = gguf.GGUFReader(path)
    held = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for name, values in held.items():
        module = name.removesuffix(".weight")
        if module in names:
            state[f"{names[module]}.weight"] = values
            continue
        _, layer, part = module.split(".")
        if part in heads:
            # Stored with rotary pairs side by side; transformers keeps the two halves of a head apart.
            count = heads[part]
            values = values.reshape(count, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        state[f"model.layers.{layer}.{parts[part]}.weight"] = values
    model = LlamaForCausalLM(config)
    tensors = {name: torch.from_numpy(np.array(values, dtype=np.float32)) for name, values in state.items()}
    absent = model.load_state_dict(tensors, strict=False)
    assert absent.unexpected_keys == []
    assert set(absent.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()
