"""Checked access to the keys of a config.json under all their spellings. Used by every reader of `traits`."""

from __future__ import annotations

import fnmatch
import math
import sys
from collections.abc import Mapping
from typing import Any

from pellucid.core import CheckpointError
from pellucid.traits.findings import Findings

REMEDY = "take config.json from the model's original repository"

_LARGEST = 2**40
_INHERITED = (
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)
_WRAPPER_KEYS = ("text_config", "llm_config", "language_config")

# Keys that change training, generation defaults or bookkeeping, never what a forward pass computes.
_IGNORABLE = (
    "_*",
    "*aux_loss*",
    "*dropout*",
    "*_loss_*",
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_*_token_id",
    "id2label",
    "initializer_*",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_*",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict*",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
)


def unwrap_text_config(config: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """The language model's own keys: `text_config` (or its older spellings) with what it inherits from outside.

    Raises:
        CheckpointError: the config or its text part is not an object.
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"the config is a {type(config).__name__}, not a JSON object: {REMEDY}")
    wrapper = next((key for key in _WRAPPER_KEYS if config.get(key)), None)
    if wrapper is None:
        return dict(config)
    inner = config[wrapper]
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"config key '{wrapper}' is a {type(inner).__name__}, not a JSON object: {REMEDY}")
    text = {key: value for key, value in inner.items() if value is not None}
    for key in _INHERITED:
        outside = config.get(key)
        if outside is None:
            continue
        if key in text and text[key] != outside:
            findings.conflict(f"{key} differs between the top level and {wrapper}: {wrapper} is followed")
        text.setdefault(key, outside)
    for key in sorted((config.keys() & text.keys()) - set(_INHERITED)):
        outside = config[key]
        if isinstance(outside, int | float) and isinstance(text[key], int | float) and outside != text[key]:
            findings.conflict(
                f"{key} is {outside} at the top level and {text[key]} in {wrapper}: {wrapper} is followed"
            )
    others = sorted(key for key in config if key.endswith("_config") and key not in (wrapper, *_INHERITED))
    findings.note(f"{wrapper} is read" + (f"; {', '.join(others)} skipped (text only)" if others else ""))
    return text


class ConfigKeys:
    """Reads a flat config. Every getter takes all spellings of one thing, the usual one first.

    A null is an absent key. Getters remember what was read (`unread` lists the rest), report spellings that disagree
    as conflicts, and raise `CheckpointError` for a value of the wrong type or outside its range.
    """

    def __init__(self, values: Mapping[str, Any], findings: Findings) -> None:
        self.values = values
        self.findings = findings
        self._read: set[str] = set()

    def has(self, *names: str) -> bool:
        return any(self.values.get(name) is not None for name in names)

    def find(self, *names: str) -> tuple[str, Any] | None:
        """The first spelling that is present, and its value."""
        self._read.update(names)
        present = [name for name in names if self.values.get(name) is not None]
        if not present:
            return None
        first = present[0]
        for other in present[1:]:
            if self.values[other] != self.values[first]:
                one, two = shown(self.values[first]), shown(self.values[other])
                self.findings.conflict(f"{first} = {one} but {other} = {two}: {first} is followed")
        return first, self.values[first]

    def value(self, *names: str) -> Any:
        found = self.find(*names)
        return None if found is None else found[1]

    def integer(self, *names: str, low: int = 0) -> int | None:
        found = self.find(*names)
        return None if found is None else checked_integer(found[1], found[0], low)

    def required_integer(self, *names: str, low: int = 1) -> int:
        value = self.integer(*names, low=low)
        if value is None:
            raise CheckpointError(_absent(names))
        return value

    def number(self, *names: str, low: float = -math.inf) -> float | None:
        found = self.find(*names)
        return None if found is None else checked_number(found[1], found[0], low)

    def required_number(self, *names: str, low: float = -math.inf) -> float:
        value = self.number(*names, low=low)
        if value is None:
            raise CheckpointError(_absent(names))
        return value

    def flag(self, *names: str) -> bool | None:
        found = self.find(*names)
        if found is None:
            return None
        if not isinstance(found[1], bool):
            raise CheckpointError(f"config key '{found[0]}' is {shown(found[1])}, not true or false: {REMEDY}")
        return found[1]

    def text(self, *names: str) -> str | None:
        found = self.find(*names)
        if found is None:
            return None
        if not isinstance(found[1], str):
            raise CheckpointError(f"config key '{found[0]}' is {shown(found[1])}, not a string: {REMEDY}")
        return found[1]

    def mapping(self, *names: str) -> Mapping[str, Any] | None:
        found = self.find(*names)
        if found is None:
            return None
        if not isinstance(found[1], Mapping):
            raise CheckpointError(f"config key '{found[0]}' is {shown(found[1])}, not a JSON object: {REMEDY}")
        return found[1]

    def sequence(self, *names: str) -> list[Any] | None:
        found = self.find(*names)
        if found is None:
            return None
        if not isinstance(found[1], list | tuple):
            raise CheckpointError(f"config key '{found[0]}' is {shown(found[1])}, not a list: {REMEDY}")
        return list(found[1])

    def unread(self) -> list[str]:
        """Present keys that no reader asked for and that are not known to be irrelevant."""
        return sorted(
            key
            for key, value in self.values.items()
            if value is not None
            and key not in self._read
            and not any(fnmatch.fnmatchcase(key, pattern) for pattern in _IGNORABLE)
        )


def checked_integer(value: Any, name: str, low: int = 0) -> int:
    """`value` as an int of at least `low`; whole floats pass. Raises CheckpointError naming the key."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _LARGEST:
        raise CheckpointError(f"config key '{name}' is {shown(value)}, not a whole number of at least {low}: {REMEDY}")
    return value


def checked_number(value: Any, name: str, low: float = -math.inf) -> float:
    """`value` as a finite float of at least `low`. Raises CheckpointError naming the key."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not usable or value < low:
        bound = "" if low == -math.inf else f" of at least {low:g}"
        raise CheckpointError(f"config key '{name}' is {shown(value)}, not a finite number{bound}: {REMEDY}")
    return float(value)


def shown(value: Any) -> str:
    """A value as a message shows it: its repr, cut where it would fill the line."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of many digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _absent(names: tuple[str, ...]) -> str:
    others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
    return f"config key '{names[0]}' is missing{others}: {REMEDY}"
