"""`EngineArgs`: what the user asked for. Every field but the model is None when not asked; names as in vLLM.

The CLI makes its options from these fields; `resolve` turns the values into decisions and never edits them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pellucid.core import PlanError

DTYPES = {
    **{"bf16": "bf16", "bfloat16": "bf16"},
    **{"fp16": "fp16", "float16": "fp16", "half": "fp16"},
    **{"fp32": "fp32", "float32": "fp32", "float": "fp32"},
    **{"fp8": "fp8", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"},
}
"""Spellings of dtypes, to the one used in traits and plans."""

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per element of a dtype."""


SYNTHETIC = "synthetic"
"""The load format that reads no weights."""


MEASURE_MODES = ("off", "cached", "full")
"""`cached` measures once and reads what it found from then on, as a start with a GPU does without the flag."""


def short_dtype(name: str) -> str:
    """`bfloat16` and `torch.bfloat16` as `bf16`. Raises PlanError for a name that is no dtype."""
    short = DTYPES.get(name.removeprefix("torch."))
    if short is None:
        raise PlanError(f"unknown dtype {name!r}; known: {', '.join(sorted(DTYPES))}")
    return short


def _flag(kind: type, text: str, *choices: str) -> Any:
    return field(default=None, metadata={"type": kind, "help": text, "choices": choices})


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """One engine as asked for. `None` means "not asked": the plan decides and says why.

    Raises:
        PlanError: a value that no model and no machine could make right, such as a negative size.
    """

    model: str
    served_model_name: str | None = _flag(str, "Name of the model in the API; its path when not given.")
    chat_template: str | None = _flag(str, "Jinja file to use instead of the model's own chat template.")
    load_format: str | None = _flag(
        str, "Where weights come from: the model's files, or drawn for a config.json alone.", "auto", "synthetic"
    )
    device: str | None = _flag(str, "Where to run.", "cpu", "cuda")
    dtype: str | None = _flag(str, "Type of the arithmetic: bfloat16, float16 or float32.")
    kv_cache_dtype: str | None = _flag(str, "Type of the KV cache: as --dtype, or fp8.")
    tensor_parallel_size: int | None = _flag(int, "GPUs that share each layer.")
    max_model_len: int | None = _flag(int, "Longest sequence, prompt and output, in tokens.")
    max_num_seqs: int | None = _flag(int, "Most sequences in one step.")
    max_num_batched_tokens: int | None = _flag(int, "Most tokens in one step.")
    gpu_memory_utilization: float | None = _flag(float, "Share of the device's memory the engine may take, up to 1.")
    block_size: int | None = _flag(int, "Tokens in one page of the KV cache.")
    num_kv_pages: int | None = _flag(int, "Pages of the KV cache, instead of as many as fit.")
    attention_backend: str | None = _flag(str, "Attention kernels to use, or the start fails.")
    moe_backend: str | None = _flag(str, "Mixture-of-experts kernels to use, or the start fails.")
    linear_backend: str | None = _flag(str, "Linear kernels to use, or the start fails.")
    enable_prefix_caching: bool | None = _flag(bool, "Reuse the KV of equal prefixes.")
    enable_chunked_prefill: bool | None = _flag(bool, "Split long prompts over several steps.")
    decode_path: str | None = _flag(str, "How decode steps are computed, or the start fails.", "fused", "layered")
    enforce_eager: bool | None = _flag(bool, "Launch every kernel of a step; no CUDA graphs.")
    batch_invariant: bool | None = _flag(bool, "Results that do not depend on what a request is batched with.")
    threads: int | None = _flag(int, "CPU threads of the kernels.")
    seed: int | None = _flag(int, "Seed of requests that bring none.")
    measure: str | None = _flag(
        str,
        "Choose by speed measured on this machine: never, once (the default with a GPU), or anew.",
        *MEASURE_MODES,
    )
    measure_seconds: int | None = _flag(
        int, "Most seconds that measuring may take: 10 at a start, 600 of `tune` and `doctor --kernels` if not given."
    )

    def __post_init__(self) -> None:
        for flag in fields(self):
            value, kind = getattr(self, flag.name), flag.metadata.get("type", str)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number if kind is float else isinstance(value, kind)):
                raise PlanError(f"{flag_name(flag.name)} takes {_NOUNS[kind]}, got {value!r}")
            if kind is int and isinstance(value, bool):
                raise PlanError(f"{flag_name(flag.name)} takes {_NOUNS[kind]}, got {value!r}")
        if self.device not in (None, "cpu", "cuda"):
            raise PlanError(f"--device {self.device}: known are cpu and cuda")
        if self.decode_path not in (None, "fused", "layered"):
            raise PlanError(f"--decode-path {self.decode_path}: known are fused and layered")
        if self.measure not in (None, *MEASURE_MODES):
            raise PlanError(f"--measure {self.measure}: known are {', '.join(MEASURE_MODES)}")
        if self.load_format not in (None, "auto", SYNTHETIC):
            raise PlanError(f"--load-format {self.load_format}: known are auto and {SYNTHETIC}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{flag_name(name)} must be at least 1, got {value}")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise PlanError(f"--gpu-memory-utilization must be above 0 and at most 1, got {share}")
        for name in ("dtype", "kv_cache_dtype"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, None if value == "auto" else short_dtype(value))

    def asked(self) -> tuple[str, ...]:
        """Names of the fields that were asked for, the model aside."""
        return tuple(f.name for f in fields(self) if f.name != "model" and getattr(self, f.name) is not None)

    def command_line(self) -> tuple[str, ...]:
        """What was asked for as flags, for another process that takes them."""
        words: list[str] = []
        for name in self.asked():
            value = getattr(self, name)
            if isinstance(value, bool):
                words.append(flag_name(name if value else f"no_{name}"))
            else:
                words += [flag_name(name), str(value)]
        return tuple(words)


_NOUNS = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}

_POSITIVE = (
    *("tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
    *("num_kv_pages", "threads", "measure_seconds"),
)


def flag_name(field_name: str) -> str:
    """`kv_cache_dtype` as `--kv-cache-dtype`."""
    return "--" + field_name.replace("_", "-")
