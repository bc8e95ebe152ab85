"""FlashAttention 3 for prompts of MLA, on keys and values of every head, from the wheel `fa3-fwd`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pellucid.attention.base import PartialAttention
from pellucid.attention.gathered_keys import MAX_EXPANDED, groups_of, key_slots, key_starts
from pellucid.kernels.device import to_device
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, MLADims, Package, Phase, Priority

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pellucid.attention.base import AttentionMetadata, Expand, Span
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="fa3_mla",
    op="attention",
    summary="FlashAttention 3: ragged prefill on expanded keys",
    priority=Priority.THIRD_PARTY + 40,
    source="fa3-fwd 0.0.3: its fa3_fwd_config.py has width 192 with values of 128, no pages, no fp16",
    built_in=True,
    phases=frozenset({"prefill"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({90}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, 128)}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"bf16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16"}),
    packages=(Package("fa3-fwd"),),
    notes="Its absorbed decode wants pages, which no wheel has together with the widths of MLA (tokenspeed-fa3 has "
    "pages, fa3-fwd the widths).",
)


def create(context: KernelContext, phase: Phase) -> FA3MLA:
    return FA3MLA(phase)


@dataclass(frozen=True, slots=True)
class FA3MLA(PartialAttention):
    """Implements `AttentionBackend`."""

    phase: Phase
    expands_latent: bool = True

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
        import torch
        from fa3_fwd_interface import flash_attn_varlen_func

        heads, qk_dim = q.shape[1:]
        pool, parts = latent.flatten(0, 1), []
        for first, spans in groups_of(metadata.spans, MAX_EXPANDED // (2 * heads * qk_dim)):
            slots = metadata.derive(first, partial(key_slots, metadata, latent, first, spans))
            starts, ends = metadata.derive((first, "starts"), partial(_starts, spans, q.device))
            rows = pool[slots]  # [keys, kv_lora_rank + rope]
            k_nope, v = expand(rows[:, :kv_lora_rank])
            rope = rows[:, None, kv_lora_rank:].expand(-1, heads, -1)
            longest = max(span.stop - span.start for span in spans)
            parts.append(
                flash_attn_varlen_func(
                    q[spans[0].start : spans[-1].stop], torch.cat([k_nope, rope], -1), v, starts, ends, longest,
                    max(span.context for span in spans), softmax_scale=scale, causal=True,
                )
            )  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _starts(spans: Sequence[Span], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows, and the keys, of each sequence begin, from those of the first on: int32 [sequences + 1] each."""
    import torch

    first = spans[0].start
    rows = [*(span.start - first for span in spans), spans[-1].stop - first]
    begins = key_starts(spans)
    keys = [*begins, begins[-1] + spans[-1].context]
    return tuple(to_device(values, torch.int32, device) for values in (rows, keys))  # type: ignore[return-value]
