"""Tiny engines for the tests of this folder. After each test, an engine made here must hold no request and no page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pellucid import LLM
from tests import checkpoints
from tests.engine.tiny import MakeLLM, assert_idle, engine_arguments, write_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a shape's fp32 checkpoint with a tokenizer, written once."""
    root = tmp_path_factory.mktemp("engine")
    return cache(lambda name: write_tokenizer(checkpoints.write(name, root / name)))


@pytest.fixture(autouse=True)
def same_torch_threads() -> Iterator[None]:
    """An engine sets the threads of the process."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_llm(checkpoint: Callable[[str], Path]) -> Iterator[MakeLLM]:
    """Makes an `LLM` on a shape; `backend` is used for every family, other arguments are those of `LLM`."""
    made: list[LLM] = []

    def make(name: str = "v3", backend: str = "cpu_native", **arguments: Any) -> LLM:
        made.append(LLM(checkpoint(name), **engine_arguments(name, backend), **arguments))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)
