"""Pellucid: an LLM serving engine you can see into.

    from pellucid import LLM, SamplingParams

Importing the package loads nothing heavy; torch comes with the first `LLM`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pellucid.core import InvalidRequestError, PellucidError, RequestOutput, SamplingParams
    from pellucid.engine.async_llm import AsyncLLM
    from pellucid.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "InvalidRequestError", "PellucidError", "RequestOutput", "SamplingParams"]

_HOME = {
    "LLM": "pellucid.engine.llm",
    "AsyncLLM": "pellucid.engine.async_llm",
    "InvalidRequestError": "pellucid.core",
    "PellucidError": "pellucid.core",
    "RequestOutput": "pellucid.core",
    "SamplingParams": "pellucid.core",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
