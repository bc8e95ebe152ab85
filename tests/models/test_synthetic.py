"""Synthetic weights: a config alone runs, at any depth, with tokens that spread over all experts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.bench.experts import count_experts
from pellucid.bench.idle import random_prompts
from pellucid.bench.roofline import expected_experts
from pellucid.core import CheckpointError, PellucidError, PlanError
from pellucid.hardware import load_hardware
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.registry import unsaid_traits
from pellucid.models.synthetic import SyntheticTensors, SyntheticWeights, settle
from pellucid.selection.args import EngineArgs
from pellucid.selection.resolve import resolve
from pellucid.traits.model import ModelTraits
from tests import checkpoints

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
CPU = torch.device("cpu")


def config_folder(path: Path, name: str, **changes: Any) -> Path:
    config = {**checkpoints.text_config(checkpoints.CONFIGS[name]), "torch_dtype": "bfloat16", **changes}
    (path / "config.json").write_text(json.dumps(config))
    return path


def make(path: Path, name: str, seqs: int = 32, length: int = 64, **changes: Any) -> LLM:
    folder = config_folder(path, name, **changes)
    return LLM(folder, load_format="synthetic", threads=1, measure="off", max_num_seqs=seqs, max_model_len=length,
               enable_prefix_caching=False)  # fmt: skip


def traits_of(path: Path) -> ModelTraits:
    return settle(Checkpoint.open(path / "config.json").report().traits)[0]


@pytest.mark.parametrize("name", ["v2", "v3", "qwen3-moe"])
@pytest.mark.parametrize("batch", [8, 24])
def test_a_decode_batch_chooses_as_many_experts_as_at_random(name: str, batch: int, tmp_path: Path) -> None:
    experts = {"num_experts": 64} if name == "qwen3-moe" else {"n_routed_experts": 64}
    llm = make(tmp_path, name, hidden_size=128, vocab_size=1000, num_hidden_layers=10, num_experts_per_tok=4, **experts)
    prompts = random_prompts(batch, 40, 1000, seed=5)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert len(set(outputs)) == batch
    sequences = [[*prompt, *ids] for prompt, ids in zip(prompts, outputs, strict=True)]
    counts = count_experts(llm.engine._worker._runner, sequences, (39, 43, 47, 51), llm.plan.num_kv_pages)  # type: ignore[arg-type]
    moe = llm.engine.traits.moe
    assert moe is not None and counts is not None
    for count in counts:
        assert count == pytest.approx(expected_experts(moe, batch), rel=0.1)


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen3", True), ("v3", True)])
def test_a_deep_model_stays_finite_and_does_not_repeat_itself(name: str, tied: bool, tmp_path: Path) -> None:
    llm = make(tmp_path, name, num_hidden_layers=110, tie_word_embeddings=tied, vocab_size=640)
    prompts = random_prompts(3, 6, 640, seed=0)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        ids = output.outputs[0].token_ids
        assert len(set(ids)) > 6
        assert ids[0] != prompt[-1]
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        # Neither sure of one answer, nor all 640 alike.
        assert all(math.log(1 / 640) + 1 < one.top[0].logprob < -0.5 for one in logprobs)


def test_a_seed_gives_the_same_tensors_in_any_order_and_another_seed_others(tmp_path: Path) -> None:
    traits = traits_of(config_folder(tmp_path, "v3"))

    def weights(seed: int) -> SyntheticWeights:
        return SyntheticWeights(traits, SyntheticTensors(traits, seed), CPU)

    first, second, other = weights(0), weights(0), weights(1)
    names = [name for name in SyntheticTensors(traits, 0) if not name.endswith("norm.weight")]
    drawn = {name: first.matrix(name).data for name in names}
    for name in reversed(names):
        assert torch.equal(drawn[name], second.matrix(name).data)
        assert not torch.equal(drawn[name], other.matrix(name).data)
        assert drawn[name].dtype == torch.bfloat16
        # Every value is random: none is left out, no two rows are alike.
        assert (drawn[name] == 0).float().mean() < 0.02
        rows = drawn[name].flatten(0, -2) if drawn[name].dim() > 1 else drawn[name][None]
        assert len(rows.unique(dim=0)) == len(rows)


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "qwen3", tie_word_embeddings=True)
    llm = LLM(folder, load_format="synthetic", dtype="bfloat16", linear_backend="reference")
    decoder = llm.engine._worker._runner.model  # type: ignore[attr-defined]
    assert decoder.lm_head.kernels[0].weight.data_ptr() == decoder.embedding.data.data_ptr()


def test_only_the_config_is_opened(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "v3")
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    from_folder = LLM(folder, load_format="synthetic", threads=1)
    from_file = LLM(folder / "config.json", load_format="synthetic", threads=1)
    assert from_folder.generate([[5, 6]], params)[0].outputs[0].token_ids == (
        from_file.generate([[5, 6]], params)[0].outputs[0].token_ids
    )
    with pytest.raises(CheckpointError):
        LLM(folder)


def test_the_plan_says_so(tmp_path: Path) -> None:
    decision = make(tmp_path, "llama").plan.decision("load_format")
    assert (decision.value, decision.how) == ("synthetic", "asked")
    assert "--load-format" in decision.because[0]


@pytest.mark.parametrize("name", ["DeepSeek-V3.json", "Kimi-K2.5.json", "qwen3-235b-fp8.json"])
def test_quantized_configs_are_refused_by_the_flag(name: str) -> None:
    traits = Checkpoint.open(CONFIGS / name).report().traits
    with pytest.raises(PlanError, match=r"--load-format synthetic draws bf16, fp16 and fp32 weights, .*stores"):
        resolve(EngineArgs("x", load_format="synthetic"), traits, load_hardware("h200"))


def test_a_gguf_file_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(PellucidError, match=r"--load-format synthetic: .* is GGUF"):
        LLM(tmp_path / "model.gguf", load_format="synthetic")
    with pytest.raises(PlanError, match="--load-format dummy"):
        EngineArgs("x", load_format="dummy")


@pytest.mark.parametrize(
    ("name", "norm", "notes"),
    [
        ("qwen3-30b-a3b-bf16.json", True, "qk_norm is not in the config: there"),
        ("llama-3.1-8b-bf16.json", False, "absent"),
    ],
)
def test_what_only_tensors_tell_is_decided_and_noted(name: str, norm: bool, notes: str) -> None:
    checkpoint = Checkpoint.open(CONFIGS / name)
    traits, said = settle(checkpoint.report().traits, unsaid_traits(checkpoint.config))
    assert traits.attention.kind == "gqa"
    assert traits.attention.qk_norm is norm
    assert any(notes in note for note in said)
    assert settle(traits) == (traits, ())
