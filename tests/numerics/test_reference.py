"""Guards the oracle: the fp64 reference against transformers, at every position of every shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests import checkpoints
from tests.reference import Reference

Array = npt.NDArray[np.float64]

TOLERANCE = 2e-4
HF_INNER_EPS = 1e-6
"""transformers builds MLA's inner norms with this, whatever the config says."""


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_the_reference_equals_transformers_at_every_position(
    name: str, checkpoint: Callable[[str], Path], transformers_logits: Callable[[str], Array]
) -> None:
    ours = Reference.open(checkpoint(name), inner_eps=HF_INNER_EPS).logits(checkpoints.prompts(name)[0])
    assert np.abs(ours - transformers_logits(name)).max() <= TOLERANCE


@pytest.mark.parametrize("name", checkpoints.MLA_SHAPES)
def test_absorbed_mla_equals_naive_mla(
    name: str, checkpoint: Callable[[str], Path], expected: Callable[[str], dict[int, Array]]
) -> None:
    absorbed = Reference.open(checkpoint(name), absorbed=True).logits(checkpoints.prompts(name)[2])
    np.testing.assert_allclose(absorbed, expected(name)[2], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_logits_are_of_order_one_and_no_routing_decision_is_close(
    name: str, reference: Callable[[str], Reference], expected: Callable[[str], dict[int, Array]]
) -> None:
    """Or a comparison in fp32 would measure luck: a near tie in the router may fall either way."""
    assert 3 < max(np.abs(rows).max() for rows in expected(name).values()) < 12
    assert reference(name).margin > 2e-5
