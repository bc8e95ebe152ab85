"""When a step's logits are not those of the default tiles."""

from __future__ import annotations

import torch

from pellucid.tuning.steps import unlike


def logits(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 320, generator=torch.Generator().manual_seed(4))


def test_rounding_and_a_turned_near_tie_are_alike() -> None:
    wanted = logits()
    found = wanted.bfloat16().float()
    found[3] += 0.3 * torch.randn(320, generator=torch.Generator().manual_seed(5))
    assert unlike(found, wanted) == ""


def test_one_row_left_out_among_many_is_found_wherever_it_is() -> None:
    wanted = logits(128)
    for row in (0, 77, 127):
        found = wanted.clone()
        found[row] = wanted[row - 1]
        assert unlike(found, wanted).startswith(f"has logits in row {row} that differ by 1.")


def test_a_small_error_everywhere_is_found_where_rows_are_many() -> None:
    wanted = logits()
    found = wanted * 1.08
    assert unlike(found, wanted) == "has logits that differ by 0.08 of the default's in half of the rows"
    assert unlike(found[:2], wanted[:2]) == ""
