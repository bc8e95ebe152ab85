"""The engines that the tracer knows, by name: for `main` in the child, and for the parent that reads their sources."""

from __future__ import annotations

from types import MappingProxyType

from .engine import Engine
from .sglang import SGLang
from .vllm import VLLM

ENGINES: MappingProxyType[str, type[Engine]] = MappingProxyType({"sglang": SGLang, "vllm": VLLM})
