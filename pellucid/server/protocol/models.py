"""What GET /v1/models and /v1/models/{id} answer. Made by `server.endpoints.operations`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelCard(Struct, frozen=True):
    """`root` is the model's repository or directory name, `max_model_len` its context in tokens (both vLLM's)."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "pellucid"
    parent: None = None


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"
