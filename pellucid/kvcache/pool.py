"""The paged KV memory of one model on one rank. Made by `runner.model_runner`, read by attention layers.

Which request owns which page is `scheduler.page_allocator`'s business; here are only tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pellucid.traits.model import GQATraits, MLATraits

if TYPE_CHECKING:
    import torch


class KVPool:
    """`num_pages` usable pages per layer, and page 0, the scratch page that padded rows point to.

    MLA: one row [kv_lora_rank + rope] per token, latent first, rope last: FlashMLA, TensorRT-LLM, XQA and our
    kernels read it as it is, FlashInfer by slicing. GQA: keys and values [kv_heads * head_dim] per token.
    Memory starts as zeros, so that a page that was never written holds no NaN.
    """

    def __init__(
        self,
        attention: MLATraits | GQATraits,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:

        self.num_pages, self.page_size = num_pages, page_size
        if attention.kind == "mla":
            self.width, planes = attention.latent_head_size, 1
        else:
            self.width, planes = attention.num_kv_heads * attention.head_dim, 2
        shape = (planes, num_pages + 1, page_size, self.width)
        self._layers = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    def keys(self, layer: int) -> torch.Tensor:
        """[pages, page_size, width]: K of a GQA layer, or the latent rows of an MLA layer."""
        return self._layers[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """[pages, page_size, width]: V of a GQA layer. An MLA layer's values are the head of its latent rows."""
        return self._layers[layer][-1]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU their memory is taken page by page as it is written: torch would touch all of it now."""
    import numpy as np
    import torch

    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)
