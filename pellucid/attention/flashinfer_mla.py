"""FlashInfer's paged MLA wrapper, in its fa2 and fa3 forms, for decode and for prompts, from `flashinfer-python`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pellucid.attention.base import PartialAttention
from pellucid.attention.flashinfer_steps import MULTIPROCESSORS, HostPlan, PagedRows, kernel_form, paged_rows
from pellucid.core import PlanError
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, MLADims, Package, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="flashinfer_mla",
    op="attention",
    summary="FlashInfer BatchMLAPagedAttentionWrapper, latent and rope parts as slices of our row",
    priority=Priority.THIRD_PARTY + 30,
    source="flashinfer-python 0.6.14: mla/_core.py, include/flashinfer/attention/mla.cuh and mla_hopper.cuh",
    built_in=True,
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({80, 86, 87, 89, 90, 100, 103, 110, 120, 121}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY)}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="Its form is fa3 on SM 9.0 and fa2 elsewhere. The fp8 form (SM 9.0) is not declared. Planned on "
    "the host in every step, so that no CUDA graph holds its decode. Compiling it at first use takes a minute a form.",
    unverified=frozenset({"sm"}),
)

TILE = 64
"""Rows (query rows times heads) of a block; two blocks share a tile where sequences have more on average."""

MAX_TILES = 16384 - MULTIPROCESSORS
"""A plan has room for 16384 and does not check it; splitting long contexts adds one a multiprocessor at most."""


def create(context: KernelContext, phase: Phase) -> FlashInferMLA:
    return FlashInferMLA(HostPlan())


@dataclass(slots=True, eq=False)
class FlashInferMLA(PartialAttention):
    """Implements `AttentionBackend`. `wrapper` is made at the first call."""

    plan: HostPlan
    wrapper: Any = None
    expands_latent: bool = False

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        rows = self.plan.get(metadata, partial(self._planned, q, latent, metadata, kv_lora_rank, scale))
        cache = {"ckv_cache": latent[..., :kv_lora_rank], "kpe_cache": latent[..., kv_lora_rank:]}

        def run(kept: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.wrapper.run(
                q_nope=kept[..., :kv_lora_rank], q_pe=kept[..., kv_lora_rank:], **cache
            )  # fmt: skip
            return found

        return rows.attend(q, kv_lora_rank, run)

    def _planned(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, kv_lora_rank: int, scale: float
    ) -> PagedRows:
        page, heads = latent.shape[1], q.shape[1]
        rows = paged_rows(metadata, page)
        if not len(rows.lengths):
            return rows
        counts = rows.query_starts.diff()
        _check_room(counts * heads)
        if self.wrapper is None:
            self.wrapper = _made(kv_lora_rank, q.device)
        self.wrapper.plan(
            qo_indptr=rows.query_starts, kv_indptr=rows.page_starts, kv_indices=rows.pages, kv_len_arr=rows.lengths,
            num_heads=heads, head_dim_ckv=kv_lora_rank, head_dim_kpe=q.shape[-1] - kv_lora_rank, page_size=page,
            causal=bool((counts > 1).any()), sm_scale=scale, q_data_type=q.dtype, kv_data_type=latent.dtype,
        )  # fmt: skip
        return rows


def _made(kv_lora_rank: int, device: torch.device) -> Any:
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    # Two tiles of sums in 16 bits and their fp32 logarithms a multiprocessor.
    size = 2 * MULTIPROCESSORS * TILE * (2 * kv_lora_rank + 4)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    return BatchMLAPagedAttentionWrapper(workspace, backend=kernel_form(device))


def _check_room(packed: torch.Tensor) -> None:
    """Raises PlanError where the tiles of sequences, which have `packed` rows times heads each, are too many."""
    tile = TILE if int(packed.sum()) // len(packed) <= TILE else 2 * TILE
    tiles = int(((packed + tile - 1) // tile).sum())
    if tiles > MAX_TILES:
        raise PlanError(
            f"flashinfer_mla: a step of {tiles} tiles of {tile} query rows and heads, its plan has room for "
            f"{MAX_TILES}; lower --max-num-batched-tokens"
        )
