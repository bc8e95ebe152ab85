"""Small vocabularies, built here: one of each kind that the loaders read."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from pellucid.tokenizer.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('<think>' if thinking else '') }}"
    "{% endif %}"
)
KIMI_TEMPLATE = """\
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>
{%- endif -%}
<|im_{{ message.role }}|>{{ message.name or message.role }}<|im_middle|>
{%- if message.content is string -%}
{{ message.content }}
{%- elif message.content is not none -%}
{%- for part in message.content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments }}<|tool_call_end|>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
KIMI_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    22: "<think>",
    23: "</think>",
}
CORPUS = [
    "the quick brown fox jumps over the lazy dog, then the hen and the other hens",
    "def f(x):\n    return x ** 2 + 10  # 12345 squares\n\n\nfor i in range(100):\n    f(i)",
    "naïve café, 日本語のテキスト と 中文字符, emoji 👍🏽 and 👩‍👩‍👧",
]
KIMI_MERGED = [
    "th",
    "he",
    "in",
    "er",
    "the",
    "ing",
    "ther",
    " the",
    "aa",
    "aaa",
    "你",
    "你好",
    "好",
    "  ",
    "    ",
    "\n\n",
]


@pytest.fixture(scope="session")
def hf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE as Hugging Face stores it: ChatML, digits one by one, BOS added by the post-processor."""
    from tokenizers import AddedToken, decoders, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<\uff5cUser\uff5c>", normalized=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("hf")
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<s>"}, "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    return path


@pytest.fixture(scope="session")
def hf_tokenizer(hf_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(hf_directory)


@pytest.fixture(scope="session")
def gguf_metadata(hf_directory: Path) -> dict[str, Any]:
    """The same vocabulary as GGUF stores it."""
    model = json.loads((hf_directory / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """SentencePiece BPE with byte fallback: no letter but these few, so most characters are spelled in bytes."""
    longer = ["▁t", "he", "▁the", "in", "▁▁", "lo", "▁he", "llo", "▁hello", "世界", "▁w", "s>", "</"]
    pieces = [*longer, *dict.fromkeys("▁thelowinsr<>/世界")]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, "<usr>", *pieces],
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def kimi_ranks() -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in KIMI_MERGED]
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture(scope="session")
def kimi_directory(tmp_path_factory: pytest.TempPathFactory, kimi_ranks: dict[bytes, int]) -> Path:
    """Kimi's layout, with its reserved ids at the same offsets after a vocabulary of 272 ranks."""
    path, base = tmp_path_factory.mktemp("kimi"), len(kimi_ranks)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in kimi_ranks.items()]
    (path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    flagged = {offset: not name.startswith(("<think", "</think", "<|tool")) for offset, name in KIMI_NAMES.items()}
    declared = {str(base + i): {"content": name, "special": flagged[i]} for i, name in KIMI_NAMES.items()}
    config = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": declared}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": base + 1}}))
    (path / "chat_template.jinja").write_text(KIMI_TEMPLATE)
    return path


@pytest.fixture(scope="session")
def kimi_tokenizer(kimi_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(kimi_directory)


@pytest.fixture(scope="session")
def every_tokenizer(
    hf_tokenizer: Tokenizer, sentencepiece_metadata: dict[str, Any], kimi_tokenizer: Tokenizer
) -> dict[str, Tokenizer]:
    """One of each way of spelling bytes."""
    return {
        "byte-level": hf_tokenizer,
        "sentencepiece": Tokenizer.from_gguf(sentencepiece_metadata),
        "tiktoken": kimi_tokenizer,
    }
