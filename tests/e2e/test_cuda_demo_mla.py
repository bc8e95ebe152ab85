"""The trained MLA + MoE model on a card, in bf16 and fused, against itself on the CPU in fp32."""

from __future__ import annotations

import pytest
import torch

from pellucid import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUESTIONS = (
    "What is a hacker?",
    "What does grok mean?",
    "What does kluge mean?",
    "What is a wizard?",
    "What does bogosity mean?",
    "What is a core dump?",
    "What does os.path.join do?",
    "Who are you?",
    "Hello",
    "What does cruft mean?",
)
NEAR = 0.35
"""Nats between two tokens that bf16 may choose between: eight bits of logits that reach 20 and more."""


@pytest.mark.parametrize("path", ["fused", "layered"])
def test_the_greedy_text_is_the_cpus_up_to_near_ties(path: str) -> None:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=2)
    cpu = LLM("demo-mla", device="cpu", dtype="float32").chat(chats, params)
    gpu = LLM("demo-mla", device="cuda", measure="off", decode_path=path, num_kv_pages=64, max_num_seqs=16).chat(
        chats, SamplingParams(temperature=0, max_tokens=64)
    )
    near = 0
    for expected, found in zip(cpu, gpu, strict=True):
        ids, other = expected.outputs[0].token_ids, found.outputs[0].token_ids
        at = next((i for i, pair in enumerate(zip(ids, other, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        # Beyond the first difference the two continue different texts.
        best = {one.token_id: one.logprob for one in expected.outputs[0].logprobs[at].top}
        assert other[at] in best, f"token {at} is neither of the two likeliest"
        assert best[ids[at]] - best[other[at]] < NEAR
        near += 1
    assert near <= 3
