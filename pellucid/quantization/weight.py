"""`StoredWeight`: one weight matrix as the checkpoint holds it. Made by `models.weights`, taken by linear backends.

Keeping the stored form until a backend has been chosen lets one backend pack it (half a byte a weight) and
another dequantize it, from the same loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

FP16_PARTS = {
    "q4_0": (18, 0, 2), "q4_1": (20, 0, 4), "q5_0": (22, 0, 2), "q5_1": (24, 0, 4), "q8_0": (34, 0, 2),
    "q2_k": (84, 80, 84), "q3_k": (110, 108, 110), "q4_k": (144, 0, 4), "q5_k": (176, 0, 4), "q6_k": (210, 208, 210),
}  # fmt: skip
"""GGUF block types: bytes per block, and where in it the fp16 scale and minimum begin and end. All else is integers."""

EXPONENTS = {"fp32": ("u4", 0x7F800000), "bf16": ("u2", 0x7F80), "fp16": ("u2", 0x7C00)}
"""Word and exponent bits of the dense formats: all of them set is an infinity or a NaN."""

FINITE_PIECE = 1 << 24


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

    @property
    def count(self) -> int:
        """Matrices in the stack; 1 for a matrix."""
        return self.shape[0] if len(self.shape) == 3 else 1

    def matrices(self) -> Iterator[StoredWeight]:
        """Each matrix of the stack, or this one; sharing memory."""
        for data in self.data if len(self.shape) == 3 else (self.data,):
            yield StoredWeight(self.scheme, self.shape[-2:], data)

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
        """Whether every value is finite; of GGUF blocks, every scale and minimum.

        On the bits, with numpy: torch would share this out over its threads and wait for each of them, which on a busy
        machine takes longer than everything else a load does.
        """
        import numpy as np
        import torch

        if self.scheme not in DENSE_SCHEMES and self.scheme not in FP16_PARTS:
            return bool(self.dequantize(torch.float32).sum().isfinite())
        data = self.data.contiguous().view(torch.uint8).numpy().reshape(-1)
        if self.scheme in FP16_PARTS:
            block_bytes, begin, end = FP16_PARTS[self.scheme]
            data = np.ascontiguousarray(data.reshape(-1, block_bytes)[:, begin:end]).reshape(-1)
        word, exponent = EXPONENTS.get(self.scheme, EXPONENTS["fp16"])
        bits = data.view(word)
        # In pieces: a weight may be large beside the memory, and each makes a copy of itself.
        pieces = (bits[i : i + FINITE_PIECE] for i in range(0, bits.size, FINITE_PIECE))
        return not any(bool(((piece & exponent) == exponent).any()) for piece in pieces)

    def dense(self, dtype: torch.dtype) -> StoredWeight:
        """The same values, stored densely in `dtype`."""
        return StoredWeight(scheme_of(dtype), self.shape, self.dequantize(dtype))


def scheme_of(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16, and so on for the three dense dtypes."""
    import torch

    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def dtype_of(scheme: str) -> torch.dtype:
    """torch.bfloat16 for `bf16`, and so on: the inverse of `scheme_of`."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[scheme]


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one below the other, along the last dim but one; on the CPU with numpy, for the reason of `is_finite`."""
    import numpy as np
    import torch

    if parts[0].device.type != "cpu":
        return torch.cat(list(parts), dim=-2)
    # As bytes: numpy has no bfloat16.
    joined = np.concatenate([part.contiguous().view(torch.uint8).numpy() for part in parts], axis=-2)
    return torch.from_numpy(joined).view(parts[0].dtype)


def concatenate_rows(parts: Sequence[StoredWeight]) -> StoredWeight | None:
    """One matrix of all rows in order, or None when the parts are stored in different formats."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(
        (part.scheme, part.columns, part.shape[:-2]) != (first.scheme, first.columns, first.shape[:-2])
        for part in parts
    ):
        return None
    rows = sum(part.rows for part in parts)
    data = join_rows([part.data for part in parts])
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
