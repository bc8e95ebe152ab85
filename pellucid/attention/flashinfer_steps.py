"""A step as FlashInfer asks for it: lists of pages for what plans on the host, padded tables for what does not.

Used by `flashinfer_gqa`, `flashinfer_mla` and `cutlass_mla`, and by `trtllm_mla` and `xqa_mla`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pellucid.attention.base import Span
from pellucid.kernels.device import to_device

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata

T = TypeVar("T")

TABLE_TOKENS = 128
"""FlashInfer's calls for MLA take page tables in whole groups of so many tokens."""

MULTIPROCESSORS = 192
"""More than any card has: what plans and split sums take is sized by their number."""

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends."""


def kernel_form(device: torch.device) -> str:
    """fa3 on SM 9.0, for which alone it is written, else fa2. What FlashInfer takes by itself changed with versions."""
    import torch

    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return "fa3" if hopper else "fa2"


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The sequences of a step that have keys; on the host, where plans are made, but for `pages` and `kept`."""

    query_starts: torch.Tensor
    """int32 [sequences + 1]: where the query rows of each begin, padded rows left out."""
    page_starts: torch.Tensor
    """int32 [sequences + 1]: where the pages of each begin in `pages`."""
    lengths: torch.Tensor
    """int32 [sequences]: keys that the last row of each sees."""
    pages: torch.Tensor
    kept: torch.Tensor | None
    """int64: the rows that are not padded; None where none is."""

    def last_page_lengths(self, page: int) -> torch.Tensor:
        """int32 [sequences]: keys in the last page of each, from 1 to `page`."""
        return (self.lengths - 1) % page + 1

    def attend(self, q: torch.Tensor, width: int, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[tokens, heads, width]: `run` of the rows of q [tokens, heads, ...] that are not padded, zeros of others."""
        if self.kept is None:
            return run(q)
        out = q.new_zeros(*q.shape[:2], width)
        if self.kept.numel():
            out[self.kept] = run(q[self.kept])
        return out


def paged_rows(metadata: AttentionMetadata, page: int, *, each_row: bool = False) -> PagedRows:
    """`each_row`: every query row is a sequence of its own, for kernels that know one row a sequence."""
    import torch

    spans = [(line, span) for line, span in enumerate(metadata.spans) if span.context]
    if each_row:
        spans = [
            (line, Span(row, row + 1, span.context - (span.stop - 1 - row)))
            for line, span in spans
            for row in range(span.start, span.stop)
        ]
    query_counts = [span.stop - span.start for _, span in spans]
    page_counts = [-(-span.context // page) for _, span in spans]
    query_starts, page_starts = (
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (query_counts, page_counts)
    )
    # Taken from the table by their places in it: a mask would make the host wait for the device.
    table = metadata.page_table
    lines = torch.tensor([line for line, _ in spans], dtype=torch.int64)
    begins = lines * table.shape[1] - page_starts[:-1]
    places = torch.repeat_interleave(begins, torch.tensor(page_counts, dtype=torch.int64))
    places += torch.arange(len(places))
    kept = None
    if sum(query_counts) < sum(span.stop - span.start for span in metadata.spans):
        rows = [row for _, span in spans for row in range(span.start, span.stop)]
        kept = to_device(rows, torch.int64, table.device)
    lengths = torch.tensor([span.context for _, span in spans], dtype=torch.int32)
    pages = table.flatten()[places.to(table.device, non_blocking=True)]
    return PagedRows(query_starts, page_starts, lengths, pages, kept)


class HostPlan:
    """What the first layer of a step works out on the host, for all its layers.

    FlashInfer sends a plan to the device out of one buffer, and a step may be launched while others run: the buffer is
    not written again before the plan in it has been sent.
    """

    def __init__(self) -> None:
        self._planned: tuple[AttentionMetadata, Any] | None = None
        self._sent: torch.cuda.Event | None = None

    def get(self, metadata: AttentionMetadata, make: Callable[[], T]) -> T:
        """`make()`, called once as long as `metadata` is the same object. Raises RuntimeError in a graph's capture."""
        import torch

        if metadata.page_table.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("planned on the host: a CUDA graph would replay one step's plan in every other")
        if self._planned is None or self._planned[0] is not metadata:
            self._planned = metadata, self._made(metadata.page_table, make)
        made: T = self._planned[1]
        return made

    def _made(self, table: torch.Tensor, make: Callable[[], T]) -> T:
        import torch

        if not table.is_cuda:
            return make()
        if self._sent is None:
            self._sent = torch.cuda.Event()
        self._sent.synchronize()
        made = make()
        self._sent.record()
        return made


class DecodeRows(NamedTuple):
    """The query rows of a decode step, each a sequence of one token. All on the device, without a look at its values.

    A padded row has one key, as these kernels expect at least one; what comes of it is overwritten.
    """

    table: torch.Tensor
    """int32 [rows, pages]: pages up to a multiple of `TABLE_TOKENS`, those added are the scratch page."""
    lengths: torch.Tensor
    """int32 [rows]."""
    padded: torch.Tensor
    """bool [rows, 1, 1]."""


def decode_rows(metadata: AttentionMetadata, page: int) -> DecodeRows:
    import torch

    table = metadata.page_table.index_select(0, metadata.sequence)
    missing = -table.shape[1] % max(1, TABLE_TOKENS // page)
    if missing:
        table = torch.nn.functional.pad(table, (0, missing))
    return DecodeRows(table, metadata.context.clamp(min=1), (metadata.context == 0)[:, None, None])
