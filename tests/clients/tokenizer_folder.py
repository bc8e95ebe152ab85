"""The default model's tokenizer as a Hugging Face folder, which load clients count tokens with. Called by `run`."""

from __future__ import annotations

import json
from pathlib import Path

from pellucid.models.gguf_header import read_gguf_header
from pellucid.models.hub import default_model
from pellucid.tokenizer.from_gguf import read_gguf_metadata


def write_tokenizer_folder(folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json, which `AutoTokenizer.from_pretrained(folder)` reads."""
    from tokenizers.decoders import ByteLevel

    vocabulary = read_gguf_metadata(read_gguf_header(default_model()).metadata)
    # The engine decodes bytes itself, so the loader sets no decoder.
    vocabulary.backend.decoder = ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": vocabulary.chat_template,
        **vocabulary.named_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
