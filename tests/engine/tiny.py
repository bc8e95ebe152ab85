"""What the tests on tiny engines share: a tokenizer of the tiny checkpoints, quick arguments, the idle check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pellucid import LLM
from tests import checkpoints

MakeLLM = Callable[..., LLM]

CHATML = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\\n' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)

PANGRAMS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs and judge my vow"]


def write_tokenizer(directory: Path, *, adds_bos: bool = False, chat_template: str | None = CHATML) -> Path:
    """A byte-level BPE of at most the 320 tokens that the tiny checkpoints have rows for: <s> is 0 and </s> is 1."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(PANGRAMS * 3, trainer)
    assert 300 < backend.get_vocab_size() <= 320
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def engine_arguments(name: str, backend: str = "cpu_native") -> dict[str, Any]:
    """One thread: on tiny products on a busy machine, threads that wait for each other take most of the time."""
    has_moe = "num_experts_per_tok" in checkpoints.text_config(checkpoints.CONFIGS[name])
    families = ("attention", "linear", "moe") if has_moe else ("attention", "linear")
    return {"threads": 1, **{f"{family}_backend": backend for family in families}}


def assert_idle(llm: LLM) -> None:
    llm.engine.check_conservation()
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.held_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages
