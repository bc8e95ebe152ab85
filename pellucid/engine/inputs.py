"""What the engine needs beside weights, and what it warns of, before weights are read. Called by `engine.engine`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pellucid.core import InvalidRequestError, PellucidError
from pellucid.models.checkpoint import Checkpoint
from pellucid.selection.plan import ExecutionPlan
from pellucid.tokenizer.tokenizer import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")
PACKAGES = ("torch", "numpy", "gguf", "tokenizers", "jinja2")


def check_installed() -> None:
    """Raises PellucidError naming what the base install lacks, before anything is downloaded or read."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise PellucidError(f"running a model needs {', '.join(missing)}: pip install 'pellucid[engine]'")


def load_tokenizer(checkpoint: Checkpoint, chat_template: str | None = None) -> Tokenizer | None:
    """The checkpoint's tokenizer; None when it comes without one, and prompts must be token ids.

    `chat_template` is a Jinja file that replaces the model's own template.

    Raises:
        PellucidError: there is one, but it can't be read.
    """
    template = None
    if chat_template is not None:
        try:
            template = Path(chat_template).read_text()
        except OSError as error:
            raise PellucidError(f"--chat-template {chat_template}: {error.strerror}; give a readable file") from None
    if checkpoint.gguf_metadata is not None:
        if "tokenizer.ggml.model" not in checkpoint.gguf_metadata:
            return None
        return Tokenizer.from_gguf(checkpoint.gguf_metadata, template)
    if any((checkpoint.path / name).exists() for name in TOKENIZER_FILES):
        return Tokenizer.from_directory(checkpoint.path, template)
    return None


def check_tokenizer(tokenizer: Tokenizer | None, requires: str, model: str) -> None:
    """Refuse, before weights are read, a model that can't take the prompts that will come."""
    if requires != "ids" and tokenizer is None:
        raise InvalidRequestError(
            f"{model} came without a tokenizer (tokenizer.json, tiktoken.model, or in its GGUF): it takes token ids "
            "only, through the Python API"
        )
    if requires == "chat" and tokenizer is not None and tokenizer.chat_template is None:
        raise InvalidRequestError(
            f"{model} has no chat template; give one with --chat-template FILE, or use `pellucid generate`"
        )


def slow_path_reasons(plan: ExecutionPlan) -> tuple[str, ...]:
    """Why plain torch runs where faster kernels of ours could, but for something the user can change; a line each."""
    reasons = {}
    for decision in plan.decisions:
        if decision.value != "reference":
            continue
        for rejection in decision.rejected:
            kept_out = [m for m in rejection.misfits if m.kind in ("compiler", "dtype", "kv_dtype")]
            if rejection.candidate == "cpu_native" and kept_out and plan.device == "cpu":
                reasons[str(kept_out[0])] = f"slow: plain torch runs instead of cpu_native, which {kept_out[0]}"
    return tuple(reasons.values())
