"""What the tests of numerics share within a session: checkpoints on disk, expected logits, loaded decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests import checkpoints
from tests.reference import Reference

Array = npt.NDArray[np.float64]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a shape's fp32 checkpoint, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def written(name: str) -> Path:
        return checkpoints.write(name, root / name)

    return written


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny products on a busy machine: threads that wait for each other would take most of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """The fp64 reference of a shape's checkpoint."""
    return cache(lambda name: Reference.open(checkpoint(name)))


@pytest.fixture(scope="session")
def expected(reference: Callable[[str], Reference]) -> Callable[[str], dict[int, Array]]:
    """The fp64 logits of a shape's three prompts: sequence -> [tokens, vocab]."""

    @cache
    def computed(name: str) -> dict[int, Array]:
        return {sequence: reference(name).logits(ids) for sequence, ids in checkpoints.prompts(name).items()}

    return computed


@pytest.fixture(scope="session")
def transformers_logits(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Array]:
    """What transformers computes for a shape's first prompt, fp32 and eager: [tokens, vocab]."""
    pytest.importorskip("transformers", minversion="5.15", reason="earlier DeepSeek-V2 has a wrong softmax scale")
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    @cache
    def computed(name: str) -> Array:
        config = checkpoints.CONFIGS[name]
        if config["model_type"] not in CONFIG_MAPPING:
            pytest.skip(f"this transformers has no {config['model_type']}")
        path = checkpoint(name)
        AutoConfig.from_pretrained(path)
        if "text_config" in config:
            path = checkpoints.write_text_only(name, tmp_path_factory.mktemp(name))
        model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            rows = model(torch.tensor([checkpoints.prompts(name)[0]])).logits[0]
        logits: Array = rows.double().numpy()
        return logits

    return computed
