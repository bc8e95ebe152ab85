"""Sequences in groups whose keys fit in memory at once, and where the cache holds them. Used by backends that expand
MLA's latent rows to keys and values of every head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from pellucid.attention.base import Span
from pellucid.kernels.device import to_device

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata

MAX_EXPANDED = 1 << 29
"""Values of K and V held at once, 1 GiB in 16 bits: as many sequences as they suffice for are one group."""


def groups_of(spans: Sequence[Span], max_keys: int) -> Iterator[tuple[int, Sequence[Span]]]:
    """Runs of spans with at most `max_keys` keys together, or one span with more; with the index of their first."""
    start, keys = 0, 0
    for index, span in enumerate(spans):
        if index > start and keys + span.context > max_keys:
            yield start, spans[start:index]
            start, keys = index, 0
        keys += span.context
    yield start, spans[start:]


def key_starts(spans: Sequence[Span]) -> list[int]:
    """Where the keys of each span begin when those of all lie one after another."""
    return [0, *accumulate(span.context for span in spans)][: len(spans)]


def key_slots(metadata: AttentionMetadata, latent: torch.Tensor, first: int, spans: Sequence[Span]) -> torch.Tensor:
    """int64 [keys]: rows of the pool that hold the keys of `spans`, the first of which is number `first`."""
    import torch

    page, device = latent.shape[1], latent.device
    # Known here, so that the device need not be asked for it.
    total = sum(span.context for span in spans)
    starts, counts = to_device([key_starts(spans), [span.context for span in spans]], torch.int64, device)
    sequence = torch.repeat_interleave(counts, output_size=total)
    position = torch.arange(total, device=device) - starts[sequence]
    slots: torch.Tensor = metadata.page_table[first + sequence, position // page].long() * page + position % page
    return slots
