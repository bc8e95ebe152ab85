"""`StoredWeight`: one weight matrix as the checkpoint holds it. Made by `models.weights`, taken by linear backends.

Keeping the stored form until a backend has been chosen lets one backend pack it (half a byte a weight) and
another dequantize it, from the same loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.core import CheckpointError

if TYPE_CHECKING:
    import torch

DENSE_SCHEMES = frozenset({"fp32", "bf16", "fp16"})

READABLE_SCHEMES = DENSE_SCHEMES | {
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
}  # fmt: skip
"""What `StoredWeight.dequantize` decodes, so what the backends built on it can be given."""

FP16_HEADERS = {"q4_0": (18, 2), "q4_1": (20, 4), "q8_0": (34, 2)}
"""GGUF block types that begin with fp16 scale (and minimum): bytes per block, bytes of the header."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix [rows, columns] (or [experts, rows, columns]) in its stored format.

    `data` is that shape for dense schemes; for GGUF schemes it is uint8 [..., rows, bytes per row].
    """

    scheme: str
    shape: tuple[int, ...]
    data: torch.Tensor

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def row_range(self, start: int, stop: int) -> StoredWeight:
        """Rows [start, stop), sharing memory."""
        data = self.data[..., start:stop, :]
        return StoredWeight(self.scheme, (*self.shape[:-2], stop - start, self.columns), data)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense values in `dtype`, shape `shape`. GGUF blocks are decoded in fp32 by the `gguf` package."""
        import torch

        if self.scheme in DENSE_SCHEMES:
            return self.data.to(dtype)
        import gguf

        try:
            quantization = gguf.GGMLQuantizationType[self.scheme.upper()]
            values = gguf.dequantize(self.data.numpy(), quantization)
        except (KeyError, NotImplementedError) as error:
            raise CheckpointError(
                f"weights of GGUF type {self.scheme} can't be read: {error}; requantize them"
            ) from None
        return torch.from_numpy(values).reshape(self.shape).to(dtype)

    def is_finite(self) -> bool:
        """Whether every value is finite; of GGUF blocks with fp16 headers, every scale and minimum."""
        import torch

        if self.scheme in DENSE_SCHEMES:
            return bool(self.data.sum(dtype=torch.float32).isfinite())
        layout = FP16_HEADERS.get(self.scheme)
        if layout is None:
            return bool(self.dequantize(torch.float32).sum().isfinite())
        block_bytes, header_bytes = layout
        headers = self.data.reshape(-1, block_bytes)[:, :header_bytes].contiguous().view(torch.float16)
        return bool(headers.sum(dtype=torch.float32).isfinite())

    def dense(self, dtype: torch.dtype) -> StoredWeight:
        """The same values, stored densely in `dtype`."""
        return StoredWeight(scheme_of(dtype), self.shape, self.dequantize(dtype))


def scheme_of(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16, and so on for the three dense dtypes."""
    import torch

    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def concatenate_rows(parts: Sequence[StoredWeight]) -> StoredWeight | None:
    """One matrix of all rows in order, or None when the parts are stored in different formats."""
    import torch

    first = parts[0]
    if len(parts) == 1:
        return first
    if any(
        (part.scheme, part.columns, part.shape[:-2]) != (first.scheme, first.columns, first.shape[:-2])
        for part in parts
    ):
        return None
    rows = sum(part.rows for part in parts)
    data = torch.cat([part.data for part in parts], dim=-2)
    return StoredWeight(first.scheme, (*first.shape[:-2], rows, first.columns), data)


def stack_experts(parts: Sequence[StoredWeight]) -> StoredWeight:
    """[experts, rows, columns] from one matrix per expert.

    Raises:
        CheckpointError: the experts are not all stored alike.
    """
    import torch

    first = parts[0]
    if any((part.scheme, part.shape) != (first.scheme, first.shape) for part in parts):
        raise CheckpointError("the experts of one layer are stored in different formats or shapes")
    return StoredWeight(first.scheme, (len(parts), *first.shape), torch.stack([part.data for part in parts]))
