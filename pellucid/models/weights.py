"""Reads tensors out of a checkpoint's files by memory map. Used by `models.loading` while it builds a decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.core import CheckpointError
from pellucid.quantization.weight import DENSE_SCHEMES, StoredWeight, dtype_of, stack_experts
from pellucid.traits.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

SAFETENSORS_SCHEMES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes read so far of all that will be, and the seconds since loading began."""

    done: int
    total: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.done / max(self.seconds, 1e-9)

    @property
    def eta_s(self) -> float:
        return (self.total - self.done) / max(self.bytes_per_second, 1e-9)

    def __str__(self) -> str:
        gigabytes = f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB"
        return f"{gigabytes}, {self.bytes_per_second / 1e9:.2f} GB/s, {self.eta_s:.0f} s left"


ProgressCallback = Callable[[LoadProgress], None]


class Weights:
    """Tensors by canonical name. A matrix comes as stored, a vector as fp32."""

    def __init__(
        self, infos: Mapping[str, TensorInfo], names: Iterable[str], on_progress: ProgressCallback | None
    ) -> None:
        self._infos = infos
        self._total = sum(infos[name].nbytes for name in names)
        self._done = 0
        self._begin = time.monotonic()
        self._on_progress = on_progress
        self._maps: dict[Path, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def matrix(self, name: str) -> StoredWeight:
        """[rows, columns], or [experts, rows, columns] where experts are stored as one tensor.

        Raises:
            CheckpointError: a stored format that this version can't load, or a value that is not finite.
        """
        info = self._infos[name]
        scheme = SAFETENSORS_SCHEMES.get(info.dtype, info.dtype.lower())
        weight = StoredWeight(scheme, info.shape, self._read(info, scheme))
        if not weight.is_finite():
            raise CheckpointError(f"{name} in {info.file.name} holds NaN or infinity; download the file again")
        self._advance(info.nbytes)
        return weight

    def vector(self, name: str) -> torch.Tensor:
        """A norm, bias or correction bias in fp32 [n]."""
        import torch

        return self.matrix(name).dequantize(torch.float32)

    def experts(self, prefix: str, projection: str, count: int) -> StoredWeight:
        """[experts, rows, columns] of one projection of one layer's experts."""
        stacked = f"{prefix}.{projection}.weight"
        if stacked in self:
            return self.matrix(stacked)
        return stack_experts([self.matrix(f"{prefix}.{expert}.{projection}.weight") for expert in range(count)])

    def _read(self, info: TensorInfo, scheme: str) -> torch.Tensor:

        whole = self._map(info.file)[info.offset : info.offset + info.nbytes]
        if scheme not in DENSE_SCHEMES:
            return whole.view(*info.shape[:-1], -1)
        dtype = dtype_of(scheme)
        if info.offset % dtype.itemsize:
            # safetensors does not align tensors; a view needs aligned memory.
            whole = whole.clone()
        return whole.view(dtype).view(info.shape)

    def _map(self, file: Path) -> torch.Tensor:
        import torch

        if file not in self._maps:
            # Private: pages are shared with the page cache until written, and nothing here writes.
            self._maps[file] = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        return self._maps[file]

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._on_progress is not None:
            self._on_progress(LoadProgress(self._done, self._total, time.monotonic() - self._begin))
