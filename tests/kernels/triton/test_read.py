"""The kernel that `bench` measures the bandwidth with reads every value once."""

from __future__ import annotations

import torch


def test_every_value_is_read_once(device: torch.device) -> None:
    from pellucid.kernels.triton.read import BLOCK, read

    source = torch.randint(-1000, 1000, (7 * BLOCK + 5,), dtype=torch.int32, device=device)
    sums = torch.full((3,), 12345, dtype=torch.int32, device=device)
    read(source, sums)
    assert int(sums.sum()) == int(source.sum())
