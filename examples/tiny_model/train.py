"""Trains demo-mla in one go: corpus, tokenizer, some minutes on one GPU, a checkpoint in DeepSeek-V3's format.

    python examples/tiny_model/train.py --out OUT                      # everything
    python examples/tiny_model/train.py --out OUT --stop-after prepare # what needs the corpora and no GPU
    python examples/tiny_model/train.py --out OUT                      # goes on from what is already in OUT

OUT/data holds tokens and tokenizer, OUT/model the checkpoint and training.json: arguments, hashes, curve, card.

Routing has two phases. In the first steps (--router-alone) the correction bias keeps the spread that it starts with,
and a loss (--evenness) teaches the routers to balance the experts in spite of it. After that the bias itself balances
them, without a loss, as in DeepSeek-V3. The first phase is there so that a decoder which forgets the bias is seen: with
a bias that began at zero, dropping it never raised the loss (docs/log/2026-11-30-tiny-model.md, runs 1 to 3).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EOT, USER, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Words keep a leading space, digits go in threes at most, runs of spaces (indentation) and newlines are pieces.
PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n[\n ]*(?= )|\n+|\s+(?!\S)|\s+"""


# --- prepare: corpora to tokens -------------------------------------------------------------------------------------


def prepare(folder: Path, stdlib: Path, *, vocab: int, seed: int) -> None:
    """Writes tokenizer.json, one .npz a split (documents end to end, and where each starts), sources.json (hashes and
    sizes), and held_out.json with the excerpts that the model card's figures are taken on.
    """
    from corpus import REPEATED, conversations, held_out_excerpts, read_corpus, source_hashes

    documents = read_corpus(stdlib)
    texts: dict[str, dict[str, list[str]]] = {}
    for split in ("train", "validation", "test"):
        plain = [EOT + d.text for d in documents if not d.turns and d.split == split]
        if split == "train":
            plain += [EOT + d.text for d in documents if d.source in REPEATED and not d.turns and d.split == split]
        chats = [render(chat) for chat in conversations(documents, split, seed=seed)]
        texts[split] = {"plain": plain, "chat": chats}
    tokenizer = train_tokenizer(texts["train"]["plain"] + texts["train"]["chat"], vocab)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    record: dict[str, Any] = {"source_sha256": source_hashes(documents), "sizes": {}}
    for split, kinds in texts.items():
        arrays = {}
        for kind, items in kinds.items():
            encoded = [e.ids for e in tokenizer.encode_batch(items, add_special_tokens=False)]
            arrays[f"{kind}_tokens"] = np.concatenate([np.array(ids, np.uint16) for ids in encoded])
            arrays[f"{kind}_starts"] = np.cumsum([0] + [len(ids) for ids in encoded[:-1]])
            record["sizes"][f"{split} {kind}"] = {
                "texts": len(items),
                "bytes": sum(len(text.encode()) for text in items),
                "tokens": len(arrays[f"{kind}_tokens"]),
            }
        np.savez(folder / f"{split}.npz", **arrays)
    (folder / "sources.json").write_text(json.dumps(record, indent=1))
    (folder / "held_out.json").write_text(json.dumps(held_out_excerpts(documents), indent=1, ensure_ascii=False))
    print(json.dumps(record["sizes"], indent=1))


def render(chat: list[dict[str, str]]) -> str:
    """What CHAT_TEMPLATE makes of a whole conversation."""
    return EOT + "".join(f"{USER}{message['role']}\n{message['content']}{END}\n" for message in chat)


def train_tokenizer(texts: list[str], vocab: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [EOT, USER, END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOT} $A", special_tokens=[(EOT, tokenizer.token_to_id(EOT))]
    )
    return tokenizer


# --- train ----------------------------------------------------------------------------------------------------------


def windows(data: dict[str, np.ndarray], length: int, batch: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Batches [batch, length + 1] for ever: every epoch all documents in a new order, end to end, cut into windows."""
    documents = []
    for kind in ("plain", "chat"):
        documents += np.split(data[f"{kind}_tokens"], data[f"{kind}_starts"][1:])
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))]).astype(np.int64)
        offset = rng.integers(length)  # else a document that opens an epoch's window would always open one
        count = (len(stream) - offset - 1) // length
        cut = np.lib.stride_tricks.sliding_window_view(stream[offset:], length + 1)[::length][:count]
        order = rng.permutation(count)
        for first in range(0, count - batch + 1, batch):
            yield cut[order[first : first + batch]]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short rise, a plateau, and a straight line to zero over the last half."""
    return peak * min(1.0, (step + 1) / 200, (steps - step) / (0.5 * steps))


def optimizers(model: Any, arguments: argparse.Namespace) -> list[Any]:
    """AdamW for embeddings, head, norms and routers, Muon (or AdamW) for the layers' matrices.

    A group's `factor` is what its rate is of the schedule's. The routers', once the bias balances, is a tenth: else
    their weights follow every change of popularity and the bias has nothing to do. Before, they learn at full rate.
    """
    import torch

    named = list(model.named_parameters())
    routers = [p for name, p in named if name.endswith("gate.weight")]
    inner = [p for name, p in named if p.dim() == 2 and "layers" in name and not name.endswith("gate.weight")]
    outer = [p for name, p in named if p.dim() == 2 and "layers" not in name]
    scalars = [p for _, p in named if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": outer, "weight_decay": arguments.weight_decay, "factor": 1.0},
        {"params": scalars, "weight_decay": 0.0, "factor": 1.0},
        {"params": routers, "weight_decay": 0.0, "factor": 0.1},
    ]
    matrices = {"params": inner, "weight_decay": arguments.weight_decay, "factor": 1.0}
    if arguments.optimizer == "adamw":
        return [torch.optim.AdamW([*groups, matrices], lr=arguments.lr, betas=(0.9, 0.95), fused=True)]
    muon = torch.optim.Muon([matrices], lr=arguments.lr, adjust_lr_fn="match_rms_adamw")
    return [torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=True), muon]


def unevenness(loads: Any, scores: Any) -> Any:
    """How unevenly the routers' own scores load the experts; its gradient lowers the scores of the overloaded.

    `loads` (1 is the mean) and mean `scores`, [MoE layers, experts]. The auxiliary loss of Switch Transformers,
    arXiv 2101.03961, equation 4, less the mean score: evenly loaded experts cost nothing, whatever their scores.
    """
    return ((loads - 1) * scores).mean(1).sum()


def train(data: Path, arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    import torch
    import torch.nn.functional as F
    from model import CONFIG, Decoder

    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = CONFIG
    model = Decoder(config, arguments.dropout).to(device)
    length, batch = arguments.length, arguments.batch
    train_set, held_out = dict(np.load(data / "train.npz")), dict(np.load(data / "validation.npz"))
    epoch_tokens = len(train_set["plain_tokens"]) + len(train_set["chat_tokens"])
    steps = arguments.steps or int(arguments.epochs * epoch_tokens / (batch * length))

    def forward(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss of the text, the routers' unevenness, and the experts' loads."""
        with torch.autocast(device, torch.bfloat16):
            logits, loads, scores = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        return loss, unevenness(loads, scores), loads

    compiled = torch.compile(forward) if device == "cuda" else forward

    @torch.no_grad()
    def validate() -> dict[str, float]:
        model.eval()
        found = {}
        for kind in ("plain", "chat"):
            stream = held_out[f"{kind}_tokens"].astype(np.int64)
            cut = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length][: 4 * batch]
            parts = [torch.from_numpy(cut[i : i + batch].copy()).to(device) for i in range(0, len(cut), batch)]
            sums = [compiled(part)[0].item() * len(part) for part in parts]
            found[kind] = sum(sums) / len(cut)
        model.train()
        return found

    found = optimizers(model, arguments)
    batches = windows(train_set, length, batch, np.random.default_rng(arguments.seed))
    curve, started, running = [], time.perf_counter(), []
    for step in range(steps):
        tokens = torch.from_numpy(next(batches)).to(device, non_blocking=True)
        router_alone = step < arguments.router_alone * steps
        for optimizer in found:
            for group in optimizer.param_groups:
                factor = 1.0 if router_alone else group["factor"]  # the bias does not move yet: the routers must
                group["lr"] = factor * learning_rate(step, steps, arguments.lr)
        loss, uneven, loads = compiled(tokens)
        (loss + arguments.evenness * router_alone * uneven).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in found:
            optimizer.step()
            optimizer.zero_grad()
        if not router_alone:
            model.balance(loads, 1e-3)
        running.append(loss.detach())
        if step % arguments.report == arguments.report - 1 or step == steps - 1:
            seconds = time.perf_counter() - started
            curve.append(
                {
                    "step": step + 1,
                    "epoch": round((step + 1) * batch * length / epoch_tokens, 2),
                    "seconds": round(seconds, 1),
                    "train": round(torch.stack(running).mean().item(), 4),
                    "validation": {k: round(v, 4) for k, v in validate().items()},
                    "busiest_expert_over_mean": round(loads.max().item(), 2),
                }
            )
            running = []
            print(json.dumps(curve[-1]), flush=True)
            if arguments.seconds and seconds > arguments.seconds:
                break
    card = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    record = {
        "arguments": {k: v for k, v in vars(arguments).items() if isinstance(v, int | float | str)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "tokens": steps * batch * length,
        "tokens_per_epoch": epoch_tokens,
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "device": card,
        "torch": torch.__version__,
        "temperature": temper(model, [torch.from_numpy(cut).to(device) for cut in held_out_windows(held_out, length)]),
        "curve": curve,
    }
    return model, record


def held_out_windows(held_out: dict[str, np.ndarray], length: int) -> list[np.ndarray]:
    streams = [held_out[f"{kind}_tokens"].astype(np.int64) for kind in ("plain", "chat")]
    return [
        stream[start : start + length + 1][None]
        for stream in streams
        for start in range(0, len(stream) - length, length)
    ]


def temper(model: Any, batches: list[Any]) -> float:
    """Divides the logits, for good, by the temperature that suits validation text best; arXiv 1706.04599, section 4.2.

    A model that saw its text several times is too sure of itself on other text. The order of tokens stays as it was.
    """
    import torch
    import torch.nn.functional as F

    model.eval()
    candidates = [1 + step / 20 for step in range(41)]
    losses = torch.zeros(len(candidates))
    with torch.no_grad():
        for tokens in batches:
            logits, targets = model(tokens[:, :-1])[0].float().flatten(0, 1), tokens[:, 1:].flatten()
            losses += torch.stack([F.cross_entropy(logits / t, targets, reduction="sum") for t in candidates]).cpu()
        best = candidates[int(losses.argmin())]
        model.lm_head.weight /= best
    return best


# --- export ---------------------------------------------------------------------------------------------------------


def export(model: Any, data: Path, folder: Path, shard_size: str) -> None:
    """A directory that `transformers` and the engine load as it is."""
    from huggingface_hub import save_torch_state_dict
    from tokenizers import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(model.checkpoint(), folder, max_shard_size=shard_size)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    end, bos = tokenizer.token_to_id(END), tokenizer.token_to_id(EOT)
    stops = {"bos_token_id": bos, "eos_token_id": [end, bos], "pad_token_id": bos}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOT,
        "eos_token": END,
        "pad_token": EOT,
        "model_max_length": model.config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (
        ("config.json", model.config | stops),
        ("generation_config.json", stops),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(data / "held_out.json", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data, checkpoint and record")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a standard library")
    parser.add_argument("--stop-after", choices=("prepare", "train"), default="train")
    parser.add_argument("--data", type=Path, help="a prepared data folder (default OUT/data)")
    parser.add_argument("--vocab", type=int, default=6144)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=0, help="instead of --epochs")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop early after this time (a trial)")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--router-alone", type=float, default=0.15, help="share of steps with a fixed correction bias")
    parser.add_argument("--evenness", type=float, default=3.0, help="weight of the evenness loss in those steps")
    parser.add_argument("--report", type=int, default=130, help="steps between two lines of the curve")
    parser.add_argument("--shard-size", default="15MB")
    arguments = parser.parse_args()

    data = arguments.data or arguments.out / "data"
    if not (data / "tokenizer.json").exists():
        prepare(data, arguments.stdlib, vocab=arguments.vocab, seed=arguments.seed)
    if arguments.stop_after == "prepare":
        return
    model, record = train(data, arguments)
    record["data"] = json.loads((data / "sources.json").read_text())
    record["data_sha256"] = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(data.glob("*.npz"))
    }
    final = record["curve"][-1]
    if not math.isfinite(final["train"]):
        raise SystemExit(f"training diverged: loss {final['train']}; lower --lr")
    export(model, data, arguments.out / "model", arguments.shard_size)
    (arguments.out / "model" / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
