"""The figures of demo-mla's card, from the shipped files alone: evaluation.json beside the weights. Run by hand.

    python examples/tiny_model/evaluate.py                    # everything that needs no corpora
    python examples/tiny_model/evaluate.py --data OUT/data    # and the bigram model, counted on train.py's tokens
    python examples/tiny_model/evaluate.py --plot             # loss.png from training.json (needs matplotlib)

Bits per byte are those of held_out.json: the first 3,000 characters of each held-out document, each scored alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import model as definition
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid import LLM, SamplingParams

FOLDER = Path(__file__).parent / "package" / "pellucid_demo_mla"
SAMPLED = ("The module", "A hacker is", "def read(", "The following example", "[common] A program that", "Changed in")
ASKED = (
    "Hello",
    "Who are you?",
    "What is a hacker?",
    "What does grok mean?",
    "What does os.path.join do?",
    "What is the capital of France?",
    "What does foo mean?",
    "What does json.dumps do?",
    "Complete this function:\n\ndef fibonacci(n):",
)
Texts = dict[str, list[str]]


def load(folder: Path) -> definition.Decoder:
    """The plain decoder of model.py with the shipped weights, in fp32."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    config = json.loads((folder / "config.json").read_text())
    decoder = definition.Decoder(config)
    state = {}
    for name in decoder.state_dict():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if ".experts." in name:
            prefix, projection = full.split(".experts.")
            parts = [tensors[f"{prefix}.experts.{i}.{projection}"] for i in range(config["n_routed_experts"])]
            state[name] = torch.cat(parts, 1 if projection.startswith("down") else 0).float()
        else:
            state[name] = tensors[full].float()
    decoder.load_state_dict(state)
    return decoder.eval()


# --- bits per byte --------------------------------------------------------------------------------------------------


def by_source(texts: Texts, bits: Callable[[list[str]], float]) -> dict[str, float]:
    """Bits per byte of each source and of all; `bits` counts a list of texts."""
    found = {source: bits(items) for source, items in texts.items()}
    sizes = {source: sum(len(text.encode()) for text in items) for source, items in texts.items()}
    rates = {source: round(found[source] / sizes[source], 3) for source in texts}
    return rates | {"all": round(sum(found.values()) / sum(sizes.values()), 3)}


def gzip_bits(items: list[str]) -> float:
    return 8.0 * len(gzip.compress("\n\n".join(items).encode(), 9))


def engine_bits(llm: LLM) -> Callable[[list[str]], float]:
    """A model's own log-probabilities of each text's tokens, behind <|endoftext|>, which both models know."""
    start = llm.tokenizer.encode("<|endoftext|>", add_special_tokens=False)[0]

    def bits(items: list[str]) -> float:
        prompts = [[start, *llm.tokenizer.encode(text, add_special_tokens=False)] for text in items]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0))
        chosen = (one.chosen.logprob for output in outputs for one in (output.prompt_logprobs or ()) if one)
        return -sum(chosen) / math.log(2)

    return bits


def bigram_bits(data: Path) -> Callable[[list[str]], float]:
    """Token bigrams of the training split with Witten-Bell smoothing down to unigrams and those down to uniform."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    arrays = np.load(data / "train.npz")
    tokens = np.concatenate([arrays["plain_tokens"], arrays["chat_tokens"]]).astype(np.int64)
    size = tokenizer.get_vocab_size()
    pairs = np.bincount(tokens[:-1] * size + tokens[1:], minlength=size * size).reshape(size, size)
    unigram = np.bincount(tokens, minlength=size).astype(np.float64)
    unigram = (unigram + 1) / (unigram.sum() + size)
    seen, kinds = pairs.sum(1), (pairs > 0).sum(1)

    def bits(items: list[str]) -> float:
        total = 0.0
        for text in items:
            ids = np.array(tokenizer.encode(text).ids)
            before, after = ids[:-1], ids[1:]
            weight = kinds[before] / np.maximum(seen[before] + kinds[before], 1)
            weight[seen[before] == 0] = 1.0
            known = pairs[before, after] / np.maximum(seen[before], 1)
            total -= np.log2((1 - weight) * known + weight * unigram[after]).sum()
        return float(total)

    return bits


# --- what wrong mathematics costs -----------------------------------------------------------------------------------


@contextmanager
def wrong(name: str, decoder: definition.Decoder) -> Iterator[None]:
    """One planted error in the plain decoder, undone at the end. `name` is a key of WRONG."""
    saved = {key: value.clone() for key, value in decoder.state_dict().items()}
    tables = decoder.cos.clone(), decoder.sin.clone()
    attentions = [layer.self_attn for layer in decoder.layers]
    moes = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, definition.MoE)]
    scales = [attention.scale for attention in attentions]
    scalings = [moe.gate.scaling for moe in moes]
    try:
        with patch.object(
            definition, "rotate", rotate_halves if name == "rope pairs split in halves" else definition.rotate
        ):
            WRONG[name](decoder, attentions, moes)
            yield
    finally:
        decoder.load_state_dict(saved)
        decoder.cos.copy_(tables[0])
        decoder.sin.copy_(tables[1])
        for attention, scale in zip(attentions, scales, strict=True):
            attention.scale = scale
        for moe, scaling in zip(moes, scalings, strict=True):
            moe.gate.scaling = scaling


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


def _no_mscale(decoder: Any, attentions: list[Any], moes: list[Any]) -> None:
    for attention in attentions:
        attention.scale = (attention.nope + attention.rope) ** -0.5


def _no_yarn(decoder: Any, attentions: list[Any], moes: list[Any]) -> None:
    dim = decoder.config["qk_rope_head_dim"]
    plain = decoder.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(len(decoder.cos)).float(), plain)
    decoder.cos.copy_(angles.cos())
    decoder.sin.copy_(angles.sin())


def _no_bias(decoder: Any, attentions: list[Any], moes: list[Any]) -> None:
    for moe in moes:
        moe.gate.e_score_correction_bias.zero_()


def _no_shared(decoder: Any, attentions: list[Any], moes: list[Any]) -> None:
    for moe in moes:
        moe.shared_experts.down_proj.weight.data.zero_()


def _no_scaling(decoder: Any, attentions: list[Any], moes: list[Any]) -> None:
    for moe in moes:
        moe.gate.scaling = 1.0


def _no_latent_norm(decoder: Any, attentions: list[Any], moes: list[Any]) -> None:
    for attention in attentions:
        attention.kv_a_layernorm.weight.data.fill_(1.0)


WRONG: dict[str, Callable[[Any, list[Any], list[Any]], None]] = {
    "softmax scale without YaRN's mscale squared": _no_mscale,
    "rope pairs split in halves": lambda decoder, attentions, moes: None,
    "plain rope frequencies instead of YaRN's": _no_yarn,
    "router without its correction bias": _no_bias,
    "shared expert dropped": _no_shared,
    "routed_scaling_factor 1": _no_scaling,
    "kv_a_layernorm without its weight": _no_latent_norm,
}


@torch.inference_mode()
def score(decoder: definition.Decoder, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Of every token but a prompt's first, end to end: its loss in nats, and the token that would have been taken."""
    losses, taken = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        logits, _, _ = decoder(ids[:, :-1])
        losses.append(F.cross_entropy(logits[0], ids[0, 1:], reduction="none"))
        taken.append(logits[0].argmax(-1))
    return torch.cat(losses), torch.cat(taken)


def sensitivity(folder: Path, texts: Texts) -> dict[str, dict[str, float]]:
    """What each error of WRONG does to held-out text: the loss's rise in nats per token with its standard error, and
    the share of positions at which greedy decoding would take another token.

    The standard error is over texts (of a ratio of sums): the tokens of one text are not independent.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for items in texts.values() for text in items]
    decoder = load(folder)
    sizes = [len(prompt) - 1 for prompt in prompts]
    losses, taken = score(decoder, prompts)
    found = {"right": {"loss": round(losses.mean().item(), 4)}}
    for name in WRONG:
        with wrong(name, decoder):
            wrong_losses, wrong_taken = score(decoder, prompts)
        rises = wrong_losses - losses
        rise = rises.mean()
        spread = torch.stack([text.sum() for text in (rises - rise).split(sizes)]).norm() / len(rises)
        found[name] = {
            "rise": round(rise.item(), 4),
            "standard_error": round(spread.item(), 4),
            "other_token": round((wrong_taken != taken).float().mean().item(), 4),
        }
    return found


# --- samples --------------------------------------------------------------------------------------------------------


def distinct_bigrams(llm: LLM, tokens: int = 512) -> list[float]:
    """Of each sample at temperature 0.8, with its stops ignored: different neighbouring pairs over all pairs."""
    params = SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=1)
    ratios = []
    for output in llm.generate(list(SAMPLED), params):
        ids = output.outputs[0].token_ids
        ratios.append(round(len(set(pairwise(ids))) / (len(ids) - 1), 3))
    return ratios


def answers(llm: LLM, tokens: int = 200) -> list[dict[str, str]]:
    """What the model says, greedily, to each of ASKED, and whether it ended by itself ("stop") or at the limit."""
    params = SamplingParams(temperature=0, max_tokens=tokens)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in ASKED], params)
    return [
        {"question": question, "answer": output.outputs[0].text, "ended": str(output.outputs[0].finish_reason)}
        for question, output in zip(ASKED, outputs, strict=True)
    ]


def plot(folder: Path) -> None:
    import matplotlib.pyplot as plt

    curve = json.loads((folder / "training.json").read_text())["curve"]
    epochs = [point["epoch"] for point in curve]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(epochs, [point["train"] for point in curve], label="training, all text (with dropout)")
    for kind in ("plain", "chat"):
        axes.plot(epochs, [point["validation"][kind] for point in curve], label=f"validation, {kind}")
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss, nats per token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "loss.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--data", type=Path, help="the data folder of train.py, for the bigram model")
    parser.add_argument("--plot", action="store_true", help="only draw loss.png")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.model)
        return
    texts: Texts = json.loads((arguments.model / "held_out.json").read_text())
    llm = LLM(str(arguments.model))
    rates = {"gzip -9": by_source(texts, gzip_bits)}
    if arguments.data:
        rates["token bigram, trained on the same text"] = by_source(texts, bigram_bits(arguments.data))
    rates["demo-mla"] = by_source(texts, engine_bits(llm))
    rates["SmolLM2-135M-Instruct, Q4_1"] = by_source(texts, engine_bits(LLM("smollm2")))
    found = {
        "bytes": {source: sum(len(text.encode()) for text in items) for source, items in texts.items()},
        "bits_per_byte": rates,
        "distinct_bigrams": distinct_bigrams(llm),
        "answers": answers(llm),
        "if_wrong": sensitivity(arguments.model, texts),
    }
    (arguments.model / "evaluation.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
