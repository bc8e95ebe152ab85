"""Servers that the tests of this folder share: one on the demo model, one on a tiny MLA+MoE model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import checkpoints
from tests.engine.tiny import write_tokenizer
from tests.server.running import RunningServer, run_server


@pytest.fixture(scope="session")
def demo_server(smollm2_path: Path) -> Iterator[RunningServer]:
    """SmolLM2 as `demo`. Tests must leave it as they found it."""
    flags = ("--served-model-name", "demo", "--max-model-len", "1024", "--log-level", "warning")
    with run_server(smollm2_path, *flags) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random MLA + MoE model of DeepSeek-V3's shape with 320 tokens, and a chat template."""
    return write_tokenizer(checkpoints.write("v3", tmp_path_factory.mktemp("server") / "v3"))


TINY_FLAGS = ("--served-model-name", "tiny", "--threads", "1", "--log-level", "warning")


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[RunningServer]:
    with run_server(tiny_model, *TINY_FLAGS) as server:
        yield server
        assert server.stop() == 0
