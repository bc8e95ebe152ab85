"""The interface of an attention backend. Implemented one per file here, called by `layers.mla` and `layers.gqa`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

T = TypeVar("T")


class Span(NamedTuple):
    """The query rows [start, stop) of one sequence and how many keys its last row sees.

    A padded row has `context == 0`: its output is zeros and it reads no page.

        positions   0 ................ context - (stop - start) ........ context
                    |---- in the cache before this step ----|-- these rows --|
    """

    start: int
    stop: int
    context: int


@dataclass(frozen=True, slots=True)
class PromptTables:
    """What a backend of ours would derive from `spans` in prefill, from a captured step: in tensors of fixed shapes.

    `tiles` int32 [tiles, 5], as `prefill_tiles.tile_rows` makes them. `key_slots` int64 [keys]: rows of the pool that
    hold the keys of all sequences, for MLA on expanded keys.
    """

    tiles: torch.Tensor
    key_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each query row of one call looks. Tensors for kernels, `spans` for plain torch."""

    page_table: torch.Tensor
    """int32 [sequences, pages]; short rows are padded with the scratch page 0."""
    sequence: torch.Tensor
    """int32 [tokens]: row of `page_table`."""
    context: torch.Tensor
    """int32 [tokens]: keys this row sees, itself included; 0 for a padded row."""
    spans: tuple[Span, ...]
    tables: PromptTables | None = None
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def derive(self, key: Hashable, compute: Callable[[], T]) -> T:
        """`compute()`, called by the first layer of the step for all of them. It lives as long as this does: a graph
        that was captured with it needs it at every replay."""
        if key not in self._derived:
            self._derived[key] = compute()
        value: T = self._derived[key]
        return value


class AttentionBackend(Protocol):
    """K and V of the step are in the cache before the call. Equal backends are one kernel.

    `expands_latent`: for MLA, call `mla_expanded` (per-head K and V rebuilt from the latent) instead of `mla`
    (absorbed: queries in latent space, the latent row is key and value of every head).
    """

    @property
    def expands_latent(self) -> bool: ...

    def gqa(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        num_kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        """q [tokens, heads, d]; keys, values [pages, page, kv_heads * d] -> [tokens, heads, d]."""
        ...

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        """q [tokens, heads, kv_lora_rank + rope]; latent [pages, page, same] -> [tokens, heads, kv_lora_rank]."""
        ...

    def mla_expanded(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        kv_lora_rank: int,
        scale: float,
        expand: Expand,
    ) -> torch.Tensor:
        """q [tokens, heads, nope + rope] -> [tokens, heads, v]; expand: [keys, kv_lora_rank] -> K_nope, V per head."""
        ...


class PartialAttention:
    """What most backends leave out: another kind of attention, or the other form of MLA. A plan never asks for it.

    Subclasses implement `AttentionBackend` by what they have.
    """

    def gqa(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no grouped-query attention")

    def mla(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no MLA in latent space")

    def mla_expanded(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no MLA on expanded keys")
