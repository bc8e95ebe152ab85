"""The scripts that train demo-mla: the plain decoder is DeepSeek-V3's, the corpus leaks nothing, the loop feeds all."""

from __future__ import annotations

import importlib
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_model"
Train = Callable[..., Any]
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield {name: importlib.import_module(name) for name in ("corpus", "model", "train", "evaluate")}


@pytest.fixture
def decoder(scripts: dict[str, ModuleType]) -> Any:
    torch.manual_seed(0)
    made = scripts["model"].Decoder(scripts["model"].CONFIG | SMALL).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0).copy_(parameter.bfloat16())  # large enough that an error shows, exact in the checkpoint
        for layer in made.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.2)
    return made


def biases_of(decoder: Any) -> list[torch.Tensor]:
    return [layer.mlp.gate.e_score_correction_bias for layer in decoder.layers[1:]]


def in_transformers(decoder: Any) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM(DeepseekV3Config(**decoder.config)).eval()
    tensors = decoder.checkpoint()
    held: dict[str, torch.Tensor] = {}
    for name, target in model.state_dict().items():  # transformers 5 stacks the experts
        prefix, _, part = name.partition(".experts.")
        if not part:
            held[name] = tensors[name].float()
            continue
        each = range(decoder.config["n_routed_experts"])
        if part == "down_proj":
            held[name] = torch.stack([tensors[f"{prefix}.experts.{i}.down_proj.weight"] for i in each]).float()
        else:
            pairs = [[tensors[f"{prefix}.experts.{i}.{one}_proj.weight"] for one in ("gate", "up")] for i in each]
            held[name] = torch.stack([torch.cat(pair) for pair in pairs]).float()
        assert held[name].shape == target.shape
    model.load_state_dict(held)
    return model


def test_the_plain_decoder_gives_the_logits_of_transformers(decoder: Any) -> None:
    ids = torch.randint(0, SMALL["vocab_size"], (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found, loads, scores = decoder(ids)
        expected = in_transformers(decoder)(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-3 * float(expected.std()), rtol=0)
    experts, mean = decoder.config["n_routed_experts"], ids.numel() * decoder.config["num_experts_per_tok"] / 16
    counts = loads * mean
    torch.testing.assert_close(counts, counts.round(), atol=1e-3, rtol=0)
    assert counts.round().sum(1).tolist() == [mean * experts] * 2
    assert scores.shape == (2, experts)
    assert ((scores > 0) & (scores < 1)).all()


def test_every_planted_error_changes_the_logits_and_is_undone(decoder: Any, scripts: dict[str, ModuleType]) -> None:
    evaluate = scripts["evaluate"]
    ids = torch.randint(0, SMALL["vocab_size"], (1, 600), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = decoder(ids)[0]
        for layer in decoder.layers:
            layer.self_attn.kv_a_layernorm.weight.mul_(0.5)
        halved = decoder(ids)[0]
        for name in evaluate.WRONG:
            with evaluate.wrong(name, decoder):
                assert not torch.allclose(decoder(ids)[0], halved, atol=1e-3), name
            assert torch.equal(decoder(ids)[0], halved), name
    assert not torch.allclose(right, halved, atol=1e-3)


def test_balancing_lowers_the_bias_of_the_busy_and_raises_that_of_the_idle(decoder: Any) -> None:
    biases = biases_of(decoder)
    before = [bias.clone() for bias in biases]
    loads = torch.ones(2, 16)  # 1 is the mean
    loads[:, 3], loads[:, 5] = 2, 0
    decoder.balance(loads, 0.01)
    for bias, old in zip(biases, before, strict=True):
        change = (bias - old).round(decimals=4)
        assert (change[3], change[5], change[0]) == (pytest.approx(-0.01), pytest.approx(0.01), 0)


def test_a_new_router_s_bias_is_spread_and_in_each_layer_in_another_order(scripts: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    made = scripts["model"].Decoder(scripts["model"].CONFIG | SMALL)
    first, second = biases_of(made)
    spread = torch.linspace(-0.3, 0.3, 16)
    assert torch.equal(first.sort().values, spread)
    assert torch.equal(second.sort().values, spread)
    assert not torch.equal(first, second)


def test_unevenness_is_nothing_when_loads_are_even_and_else_lowers_the_scores_of_the_busy(
    scripts: dict[str, ModuleType],
) -> None:
    unevenness = scripts["train"].unevenness
    scores = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert unevenness(torch.ones(2, 16), scores) == 0
    loads = torch.ones(2, 16)
    loads[:, 3], loads[:, 5] = 2, 0
    unevenness(loads, scores).backward()
    assert (scores.grad[:, 3] > 0).all()  # what descends lowers it
    assert (scores.grad[:, 5] < 0).all()
    assert (scores.grad[:, 0] == 0).all()


@pytest.fixture
def train_briefly(scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Trains a small decoder for some steps on random text; keywords are arguments of train.py."""
    rng = np.random.default_rng(0)
    for split, size in (("train", 2000), ("validation", 100)):
        tokens, starts = rng.integers(0, SMALL["vocab_size"], size).astype(np.uint16), np.arange(0, size, 40)
        kinds = ("plain", "chat")
        arrays = {f"{kind}_tokens": tokens for kind in kinds} | {f"{kind}_starts": starts for kind in kinds}
        np.savez(tmp_path / f"{split}.npz", **arrays)
    monkeypatch.setattr(scripts["model"], "CONFIG", scripts["model"].CONFIG | SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    usual = {"seed": 1, "epochs": 1.0, "length": 32, "batch": 2, "optimizer": "muon", "lr": 0.004, "weight_decay": 0.1}
    usual |= {"dropout": 0.1, "report": 100, "seconds": 0.0, "evenness": 3.0}
    precision = torch.get_float32_matmul_precision()
    yield lambda **given: scripts["train"].train(tmp_path, Namespace(**(usual | given)))[0]
    torch.set_float32_matmul_precision(precision)


def test_the_bias_is_fixed_while_the_routers_learn_alone_and_balances_afterwards(train_briefly: Train) -> None:
    alone = biases_of(train_briefly(steps=4, router_alone=1.0))
    spread = torch.linspace(-0.3, 0.3, 16)
    assert all(torch.equal(bias.sort().values, spread) for bias in alone)
    half = biases_of(train_briefly(steps=4, router_alone=0.5))
    for bias, start in zip(half, alone, strict=True):  # the same seed, so the same order
        assert (bias - start).abs().max() == pytest.approx(0.002, abs=1e-6)  # two steps of 0.001


def test_the_evenness_loss_teaches_the_routers_while_they_learn_alone_and_never_afterwards(
    train_briefly: Train,
) -> None:
    def router(**given: float) -> torch.Tensor:
        return train_briefly(steps=2, **given).layers[1].mlp.gate.weight.detach()

    assert not torch.equal(router(router_alone=1.0, evenness=3.0), router(router_alone=1.0, evenness=0.0))
    assert torch.equal(router(router_alone=0.0, evenness=3.0), router(router_alone=0.0, evenness=0.0))


def test_tempering_helps_an_overconfident_model_and_keeps_its_order(
    decoder: Any, scripts: dict[str, ModuleType]
) -> None:
    batches = [torch.randint(0, SMALL["vocab_size"], (1, 100), generator=torch.Generator().manual_seed(2))]
    with torch.no_grad():
        before = decoder(batches[0])[0]
        temperature = scripts["train"].temper(decoder, batches)
        after = decoder(batches[0])[0]
    assert temperature > 1.5
    torch.testing.assert_close(after * temperature, before, atol=1e-3, rtol=1e-4)


def test_an_epoch_s_windows_hold_every_document_whole_and_in_order(scripts: dict[str, ModuleType]) -> None:
    rng = np.random.default_rng(0)
    documents = [np.arange(first, first + 50) for first in range(0, 5000, 50)]
    data = {
        "plain_tokens": np.concatenate(documents[:60]).astype(np.uint16),
        "plain_starts": np.arange(0, 3000, 50),
        "chat_tokens": np.concatenate(documents[60:]).astype(np.uint16),
        "chat_starts": np.arange(0, 2000, 50),
    }
    windows = scripts["train"].windows(data, 100, 7, rng)
    rows = np.concatenate([next(windows) for _ in range(7)])  # one epoch: 49 windows of 100, seven at a time
    assert rows.shape == (49, 101)
    seen = set(rows[:, :-1].flatten().tolist())
    assert len(seen) == rows[:, :-1].size  # nothing twice, and all but a window's rest of 5,000
    steps = np.diff(rows, axis=1)
    inside = rows[:, 1:] % 50 != 0
    assert (steps[inside] == 1).all()


def test_the_rate_rises_stays_and_falls_to_nothing(scripts: dict[str, ModuleType]) -> None:
    rates = [scripts["train"].learning_rate(step, 2000, 1.0) for step in range(2000)]
    assert rates[0] < rates[100] < rates[199] == rates[999] == 1.0
    assert rates[999] > rates[1500] > rates[1999] > 0


def test_what_is_held_out_appears_nowhere_in_training(scripts: dict[str, ModuleType]) -> None:
    corpus = scripts["corpus"]
    documents = []
    for index in range(400):
        documents.append(corpus.Document("jargon", f"group {index}", f"text {index}."))
        documents += corpus.questions("jargon", f"group {index}", corpus.MEANING, f"word{index}", f"answer {index}.")
    chats = {split: corpus.conversations(documents, split, seed=1) for split in ("train", "validation", "test")}
    said = {split: {m["content"] for chat in found for m in chat} for split, found in chats.items()}
    answers = {split: {text for text in texts if text.startswith("answer")} for split, texts in said.items()}
    assert sum(map(len, answers.values())) == 400
    assert not answers["train"] & (answers["validation"] | answers["test"])
    assert 4 <= len(answers["test"]) <= 40
    held_out = {document.group for document in documents if document.split != "train"}
    assert all(document.split != "train" for document in documents if document.group in held_out)


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("See :func:`os.getcwd` and :class:`~a.B`.", "See `os.getcwd()` and `a.B`."),
        (
            "The *path* is ``None``.  Then it ends.\n\n.. versionadded:: 3.2\n   More.",
            "The path is `None`. Then it ends.",
        ),
        (":noindex:\n\nText that says something.", "Text that says something."),
        ("Takes *\\*paths* only::\n\n   code", "Takes *paths only:\n\n   code"),
    ],
)
def test_restructured_text_becomes_prose(raw: str, plain: str, scripts: dict[str, ModuleType]) -> None:
    assert scripts["corpus"].prose(raw) == plain


def test_an_answer_ends_where_a_sentence_does(scripts: dict[str, ModuleType]) -> None:
    first_sentences = scripts["corpus"].first_sentences
    rng = random.Random(0)
    words = ["cruft", "esp.", "e.g.", "5.", "foo.", "bar!", "baz", "qux?"]
    for _ in range(200):
        text = " ".join(rng.choice(words) for _ in range(60))
        found = first_sentences(text, 200)
        assert text.startswith(found)
        assert len(found) <= 200
        assert not found or found.split()[-1] in ("foo.", "bar!", "qux?")
    assert first_sentences("Short and whole") == "Short and whole"
