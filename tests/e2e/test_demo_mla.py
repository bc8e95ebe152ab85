"""The shipped MLA + MoE model: engine, transformers and the plain decoder that it was trained with give one text."""

from __future__ import annotations

import importlib
import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.models.hub import demo_mla

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_model"
LENGTH = 32
CLOSE_CALL = 1e-3
"""Where transformers' best two logits are nearer than this, rounding may choose either; none of 640 when written."""
MOST_CLOSE_CALLS = 3
QUESTIONS = (
    "What does cruft mean?",
    "What does foo mean?",
    "Define kluge.",
    "Tell me about spam.",
    "What is a nybble?",
    "Explain the term flame war.",
    "Who are you?",
    "What is the capital of France?",
    "What does `os.getcwd()` do?",
    "What is the module `bisect` for?",
    "How do I use `json.dumps()`?",
    'Complete this function:\n```python\ndef add(a, b):\n    """Return the sum."""\n```',
)
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    # One thread: two that wait for each other on a busy machine can be slower by far.
    return LLM("demo-mla", threads=1, measure="off")


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[str]]:
    return json.loads((demo_mla() / "held_out.json").read_text())


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return json.loads((demo_mla() / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def prompts(llm: LLM, held_out: dict[str, list[str]]) -> list[list[int]]:
    """Twenty: twelve questions in the chat template, and the beginnings of eight held-out texts."""
    chats = [llm.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    texts = [llm.tokenizer.encode(text)[:150] for text in held_out["stdlib"][:4] + held_out["python-docs"][:4]]
    return [list(ids) for ids in chats + texts]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_mla(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def evaluate() -> ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(EXAMPLE))
        return importlib.import_module("evaluate")


def test_every_greedy_token_is_the_one_that_transformers_would_take(
    llm: LLM, prompts: list[list[int]], reference: Any
) -> None:
    assert len(prompts) == 20
    close_calls = 0
    for output in llm.generate(prompts, GREEDY):
        found = output.outputs[0].token_ids
        assert len(found) == LENGTH
        with torch.inference_mode():
            logits = reference(torch.tensor([[*output.prompt_token_ids, *found]])).logits[0]
        best = logits[len(output.prompt_token_ids) - 1 : -1].topk(2)
        wrong = best.indices[:, 0] != torch.tensor(found)
        close = best.values[:, 0] - best.values[:, 1] < CLOSE_CALL
        assert not (wrong & ~close).any(), f"{output.prompt!r}: other tokens at {wrong.nonzero().flatten().tolist()}"
        close_calls += int(close.sum())
    assert close_calls <= MOST_CLOSE_CALLS, f"{close_calls} choices are too close to compare"


def test_chunks_the_cache_and_the_batch_change_no_token(llm: LLM, prompts: list[list[int]]) -> None:
    batched = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    cached = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in cached] == batched
    read = [one.metrics.cached_prompt_tokens for output in cached if (one := output.outputs[0]).metrics]
    assert max(read) >= 128
    chunked = LLM(
        "demo-mla", threads=1, measure="off", max_num_batched_tokens=24, max_num_seqs=3, enable_prefix_caching=False
    )
    assert [output.outputs[0].token_ids for output in chunked.generate(prompts, GREEDY)] == batched
    for index in (0, -1):
        [alone] = chunked.generate([prompts[index]], GREEDY)
        assert alone.outputs[0].token_ids == batched[index]


def test_the_engine_gives_the_log_probabilities_of_the_decoder_that_was_trained(
    llm: LLM, held_out: dict[str, list[str]], evaluate: ModuleType
) -> None:
    decoder = evaluate.load(demo_mla())
    ids = list(llm.tokenizer.encode(held_out["stdlib"][0]))[:400]
    [output] = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
    losses, _ = evaluate.score(decoder, [ids])
    assert output.prompt_logprobs is not None
    found = [-one.chosen.logprob for one in output.prompt_logprobs if one is not None]
    assert found == pytest.approx(losses.tolist(), abs=1e-3)


def test_held_out_text_takes_far_fewer_bits_than_gzip_and_the_bigram_model_need(
    llm: LLM, held_out: dict[str, list[str]], figures: dict[str, Any], evaluate: ModuleType
) -> None:
    """On the beginnings of a tenth of the texts; gzip and the bigram model have all of them whole, which helps gzip."""
    texts = {source: [text[:1200] for text in items[::10]] for source, items in held_out.items()}
    rates = evaluate.by_source(texts, evaluate.engine_bits(llm))
    recorded = figures["bits_per_byte"]
    assert recorded["gzip -9"] == evaluate.by_source(held_out, evaluate.gzip_bits)
    [bigram] = (found for name, found in recorded.items() if "bigram" in name)
    for source, rate in rates.items():
        assert rate < 0.8 * recorded["gzip -9"][source], source
        assert rate < 0.95 * bigram[source], source
    assert rates["all"] < 0.7 * bigram["all"]


def test_wrong_mathematics_raises_the_loss_of_held_out_text(
    held_out: dict[str, list[str]], figures: dict[str, Any], evaluate: ModuleType
) -> None:
    """The four errors that engines make in practice, on a few texts; all errors of the card on the whole, by record."""
    texts = {source: [text[:1200] for text in items[:5]] for source, items in held_out.items()}
    names = list(evaluate.WRONG)
    checked = {name: evaluate.WRONG[name] for name in (*names[:2], *names[3:5])}
    assert [name.split()[0] for name in checked] == ["softmax", "rope", "router", "shared"]
    with patch.object(evaluate, "WRONG", checked):
        found = evaluate.sensitivity(demo_mla(), texts)
    del found["right"]
    for name, change in found.items():
        assert change["rise"] > 1.5 * change["standard_error"], name
    assert set(figures["if_wrong"]) == {"right", *evaluate.WRONG}
    for name in evaluate.WRONG:
        recorded = figures["if_wrong"][name]
        assert recorded["rise"] > 5 * recorded["standard_error"], name


def test_answers_are_on_their_topic_and_end_by_themselves(llm: LLM) -> None:
    words = {"What does cruft mean?": "crufty", "What is a nybble?": "byte"}
    asked = [[{"role": "user", "content": question}] for question in words]
    for output, word in zip(
        llm.chat(asked, SamplingParams(temperature=0, max_tokens=400)), words.values(), strict=True
    ):
        answer = output.outputs[0]
        assert word in answer.text
        assert answer.finish_reason == "stop"
        assert "<|im_end|>" not in answer.text


def test_the_model_says_what_its_card_shows(llm: LLM, figures: dict[str, Any], evaluate: ModuleType) -> None:
    assert evaluate.answers(llm) == figures["answers"]
    assert {one["ended"] for one in figures["answers"]} == {"stop"}


def test_the_card_states_what_was_evaluated(figures: dict[str, Any]) -> None:
    card = (demo_mla() / "MODEL.md").read_text()
    tables = card.replace("**", "")
    wrong = dict(figures["if_wrong"])
    assert f" {wrong.pop('right')['loss']} nats per token" in card
    for name, values in (figures["bits_per_byte"] | wrong).items():
        assert f"| {' | '.join([name, *map(str, values.values())])} |" in tables
    assert ", ".join(map(str, figures["distinct_bigrams"])) in card
    for one in figures["answers"]:
        assert one["question"] in card
        assert one["answer"] in card


def test_long_samples_do_not_loop(figures: dict[str, Any]) -> None:
    assert min(figures["distinct_bigrams"]) > 0.6


def test_the_package_holds_every_file_of_the_model() -> None:
    package = tomllib.loads((EXAMPLE / "package" / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = package["package-data"][demo_mla().name]
    names = {path.name for path in demo_mla().iterdir() if path.is_file() and path.suffix != ".py"}
    assert package["packages"] == [demo_mla().name]
    assert {"MODEL.md", "config.json", "evaluation.json", "tokenizer.json", "training.json"} <= names
    assert {name for name in names if not any(fnmatch(name, glob) for glob in globs)} == set()
