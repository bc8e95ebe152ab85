"""Runs a decoder on batches written out by hand, below the scheduler. Used by the tests of numerics.

A step is a list of rows to compute; sequences are named by any integer, `PAD` is a padded row. Chunked prefill,
decode and mixed batches are all lists of steps:

    [[(0, prompt)]]                                  one prefill
    [[(0, prompt[:7])], [(0, prompt[7:])]]           the same in two chunks
    [[(0, prompt), (1, other)], [(0, token), PAD]]   two prefills, then a decode row beside a padded one
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pellucid.attention.base import AttentionBackend, AttentionMetadata, Span
from pellucid.attention.cpu_native import CpuNativeAttention
from pellucid.attention.reference import ReferenceAttention
from pellucid.kernels.cpu_library import CpuLibrary
from pellucid.kernels.torch_ops import TorchOps
from pellucid.kvcache.pool import KVPool
from pellucid.layers.backends import LayerBackends
from pellucid.layers.batch import AttentionSegment, ForwardBatch
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.decoder import Decoder
from pellucid.models.loading import load_decoder
from pellucid.moe.cpu_native import CpuNativeMoE
from pellucid.moe.reference import ReferenceMoE
from pellucid.quantization.cpu_native import CpuNativeLinear
from pellucid.quantization.reference import ReferenceLinear

if TYPE_CHECKING:
    import torch

Entry = tuple[int, Sequence[int]]
Step = Sequence[Entry]
Array = npt.NDArray[np.float64]

PAD: Entry = (-1, (0,))
POISON = 1000.0
"""What every row of the pool holds before it is written: reading beyond a context ruins the logits."""

MAX_POSITION = 256

BACKENDS = ("reference", "reference-expanded", "cpu_native")


@lru_cache(maxsize=1)
def cpu_library() -> CpuLibrary:
    return CpuLibrary()


def layer_backends(backend: str, dtype: torch.dtype) -> LayerBackends:
    """The CPU layers of one of `BACKENDS`; `cpu_native` knows fp32 alone."""
    import torch

    if backend == "cpu_native":
        library = cpu_library()
        return LayerBackends(library, CpuNativeLinear(library), CpuNativeMoE(library), expands_latent=False)
    cpu = torch.device("cpu")
    return LayerBackends(
        TorchOps(),
        ReferenceLinear(dtype, cpu),
        ReferenceMoE(dtype, cpu),
        expands_latent=backend == "reference-expanded",
    )


def attention_backend(backend: str) -> AttentionBackend:
    if backend == "cpu_native":
        return CpuNativeAttention(cpu_library())
    return ReferenceAttention(expands_latent=backend == "reference-expanded")


def load(path: Path, backend: str, dtype: str = "float32") -> Decoder:
    """The decoder of a checkpoint (a directory or a .gguf file), computing in `dtype` (a torch name)."""
    import torch

    checkpoint = Checkpoint.open(path)
    backends = layer_backends(backend, getattr(torch, dtype))
    return load_decoder(checkpoint.report().traits, checkpoint.tensors, backends, MAX_POSITION)


def logits(path: Path, steps: Iterable[Step], backend: str, page_size: int = 64) -> dict[int, Array]:
    """The logits of every token of every sequence, in order: sequence -> [tokens, vocab]."""
    return Session(load(path, backend), attention_backend(backend), page_size).run(steps)


@dataclass(slots=True)
class Session:
    """A decoder, a pool of poisoned pages in shuffled order, and the sequences that live in it.

    `decode_attention`: another backend for rows of one token, as plans have it; None uses `attention` for all.
    """

    decoder: Decoder
    attention: AttentionBackend
    page_size: int = 64
    decode_attention: AttentionBackend | None = None
    num_pages: int = 0
    pool: KVPool = field(init=False)
    free: list[int] = field(init=False)
    pages: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch

        traits = self.decoder.traits
        self.num_pages = self.num_pages or 640 // self.page_size + 8
        self.pool = KVPool(
            traits.attention,
            traits.num_layers,
            self.num_pages,
            self.page_size,
            self.decoder.norm.weight.dtype,
            torch.device("cpu"),
        )
        for layer in range(traits.num_layers):
            self.pool.keys(layer).fill_(POISON)
            self.pool.values(layer).fill_(POISON)
        # Page 0 is never handed out: padded rows point to it.
        self.free = (np.random.default_rng(3).permutation(self.num_pages) + 1).tolist()

    def run(self, steps: Iterable[Step]) -> dict[int, Array]:
        """Every step in turn; sequence -> logits [its tokens, vocab] as fp64, padded rows left out."""
        found: dict[int, list[Array]] = {}
        for step in steps:
            for sequence, rows in self.step(step):
                found.setdefault(sequence, []).append(rows)
        return {sequence: np.concatenate(rows) for sequence, rows in found.items()}

    def step(self, step: Step) -> list[tuple[int, Array]]:
        """One forward pass: decode rows and padded rows first, then the longer chunks."""
        decodes = [entry for entry in step if len(entry[1]) == 1]
        chunks = [entry for entry in step if len(entry[1]) > 1]
        batch = self.batch([part for part in (decodes, chunks) if part])
        rows = self.decoder.forward(batch).logits.double().numpy()
        assert np.isfinite(rows).all(), "logits that are not finite, in a padded row or a real one"
        split = np.split(rows, np.cumsum([len(tokens) for _, tokens in (*decodes, *chunks)])[:-1])
        return [
            (sequence, part) for (sequence, _), part in zip((*decodes, *chunks), split, strict=True) if sequence >= 0
        ]

    def batch(self, parts: Sequence[Step]) -> ForwardBatch:
        """The tensors of one step, one attention segment per part."""
        import torch

        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments = []
        for part in parts:
            start, spans = len(token_ids), []
            for sequence, tokens in part:
                first = self.lengths.get(sequence, 0) if sequence >= 0 else 0
                here = range(first, first + len(tokens))
                row = len(token_ids) - start
                spans.append(Span(row, row + len(tokens), 0 if sequence < 0 else here.stop))
                token_ids.extend(int(token) for token in tokens)
                positions.extend(here)
                slots.extend(self._slot(sequence, position) for position in here)
                if sequence >= 0:
                    self.lengths[sequence] = here.stop
            metadata = self._metadata(part, spans)
            chunk = any(len(tokens) > 1 for _, tokens in part)
            attention = self.attention if chunk else self.decode_attention or self.attention
            segments.append(AttentionSegment(start, len(token_ids), attention, metadata))
        return ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            segments=tuple(segments),
            pool=self.pool,
            logit_rows=torch.arange(len(token_ids)),
        )

    def _slot(self, sequence: int, position: int) -> int:
        if sequence < 0:
            return -1
        pages = self.pages.setdefault(sequence, [])
        if position == len(pages) * self.page_size:
            pages.append(self.free.pop())
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def _metadata(self, part: Step, spans: Sequence[Span]) -> AttentionMetadata:
        import torch

        tables = [self.pages.get(sequence, []) for sequence, _ in part]
        width = max(map(len, tables)) + 1
        table = torch.zeros(len(tables), width, dtype=torch.int32)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        sequence = [index for index, span in enumerate(spans) for _ in range(span.start, span.stop)]
        context = [span.context and span.context - (span.stop - 1 - row) for span in spans for row in range(*span[:2])]
        return AttentionMetadata(
            page_table=table,
            sequence=torch.tensor(sequence, dtype=torch.int32),
            context=torch.tensor(context, dtype=torch.int32),
            spans=tuple(spans),
        )
