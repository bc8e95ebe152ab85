"""FlashInfer's paged prefill and decode wrappers for grouped-query attention, from `flashinfer-python`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pellucid.attention.base import PartialAttention
from pellucid.attention.flashinfer_steps import MULTIPROCESSORS, HostPlan, PagedRows, kernel_form, paged_rows
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Package, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="flashinfer_gqa",
    op="attention",
    summary="FlashInfer paged wrappers, compiled with nvcc on first use",
    priority=Priority.THIRD_PARTY + 30,
    source="flashinfer-python 0.6.14: decode.py, prefill.py; head widths by include/flashinfer/utils.cuh",
    built_in=True,
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({80, 86, 87, 89, 90, 100, 103, 110, 120, 121}),
    attention=frozenset({"gqa"}),
    head_dims=frozenset({64, 128, 256}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"nhd"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="Planned on the host in every step, so that no CUDA graph holds its decode. Compiling it at first use takes "
    "minutes.",
    unverified=frozenset({"sm"}),
)

TENSOR_CORE_GROUP = 4
"""From so many query heads of a key head on, decode takes tensor cores. Without them there is no group of 5, 6 or 7."""

SPLIT_TILE = {"prefill": 128, "decode": 64}
"""Most rows (query rows times heads of a group) whose parts over the keys are summed by a second kernel."""


def create(context: KernelContext, phase: Phase) -> FlashInferGQA:
    return FlashInferGQA(phase, HostPlan())


@dataclass(slots=True, eq=False)
class FlashInferGQA(PartialAttention):
    """Implements `AttentionBackend`. `wrapper` is the phase's, made at the first call."""

    phase: Phase
    plan: HostPlan
    wrapper: Any = None
    expands_latent: bool = False

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
        shape = (*keys.shape[:2], num_kv_heads, q.shape[-1])
        caches = keys.view(shape), values.view(shape)
        rows = self.plan.get(metadata, partial(self._planned, q, caches[0], metadata, scale))
        return rows.attend(q, q.shape[-1], lambda kept: self.wrapper.run(kept, caches))

    def _planned(self, q: torch.Tensor, keys: torch.Tensor, metadata: AttentionMetadata, scale: float) -> PagedRows:
        (heads, dim), (page, kv_heads) = q.shape[1:], keys.shape[1:3]
        decoding = self.phase == "decode"
        rows = paged_rows(metadata, page, each_row=decoding)
        if not len(rows.lengths):
            return rows
        if self.wrapper is None:
            self.wrapper = self._made(q, heads // kv_heads)
        shared = {
            "num_qo_heads": heads, "num_kv_heads": kv_heads, "page_size": page, "sm_scale": scale,
            "q_data_type": q.dtype, "kv_data_type": keys.dtype,
        }  # fmt: skip
        last = rows.last_page_lengths(page)
        if decoding:
            self.wrapper.plan(
                indptr=rows.page_starts, indices=rows.pages, last_page_len=last, head_dim=dim, **shared
            )  # fmt: skip
        else:
            self.wrapper.plan(
                qo_indptr=rows.query_starts, paged_kv_indptr=rows.page_starts, paged_kv_indices=rows.pages,
                paged_kv_last_page_len=last, head_dim_qk=dim, causal=True, **shared,
            )  # fmt: skip
        return rows

    def _made(self, q: torch.Tensor, group: int) -> Any:
        import flashinfer
        import torch

        # Two blocks a multiprocessor have a tile each, of every head of a group: sums and their logarithm, fp32.
        tiles = 2 * MULTIPROCESSORS * group * SPLIT_TILE[self.phase]
        workspace = torch.empty(4 * tiles * (q.shape[-1] + 1), dtype=torch.uint8, device=q.device)
        if self.phase == "prefill":
            form = kernel_form(q.device)
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD", backend=form)
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="NHD", use_tensor_cores=group >= TENSOR_CORE_GROUP, backend="fa2"
        )  # fmt: skip
