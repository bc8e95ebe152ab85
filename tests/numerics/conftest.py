"""What the tests of numerics share within a session: checkpoints on disk, expected logits, loaded decoders."""

from __future__ import annotations

from collections.abc import Callable
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


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[[str], Path]) -> Callable[[str], dict[int, Array]]:
    """The fp64 logits of a shape's three prompts: sequence -> [tokens, vocab]."""

    @cache
    def computed(name: str) -> dict[int, Array]:
        reference = Reference.open(checkpoint(name))
        return {sequence: reference.logits(ids) for sequence, ids in checkpoints.prompts(name).items()}

    return computed
