"""Token embedding, read row by row from its stored format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.quantization.weight import DENSE_SCHEMES, StoredWeight

if TYPE_CHECKING:
    import torch


class Embedding:
    """Rows are dequantized as they are looked up: a step touches a few of a large table."""

    def __init__(self, weight: StoredWeight, dtype: torch.dtype, device: torch.device) -> None:
        if weight.scheme not in DENSE_SCHEMES and device.type != "cpu":
            # GGUF blocks are decoded on the CPU only; elsewhere the table is dense.
            weight = weight.dense(dtype)
        self.scheme, self.columns, self.dtype = weight.scheme, weight.columns, dtype
        self.data = weight.data.to(device)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        rows = self.data[token_ids]
        return StoredWeight(self.scheme, (rows.shape[0], self.columns), rows).dequantize(self.dtype)
