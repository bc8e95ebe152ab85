"""The FlashInfer backends against the reference, over a stand-in for FlashInfer that attends in plain torch from what
it is given, and refuses what version 0.6.14 refuses."""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pellucid.attention.base import AttentionMetadata, Span
from pellucid.attention.flashinfer_steps import HostPlan
from pellucid.attention.reference import ReferenceAttention
from pellucid.core import PlanError
from pellucid.kernels.context import KernelContext
from pellucid.layers.fused_step import CalledAttention

RANK, ROPE = 512, 64
POISON = 1000.0
"""Stands wherever no key is: reading beyond a context ruins the sums."""


def attend(q, keys, values, scale, causal):
    """q [rows, heads, d], keys and values [keys, heads, .]: the last row sees all, earlier ones fewer if causal."""
    assert 0 < q.shape[0] <= keys.shape[0], "no key for a row"
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys.double()) * scale
    if causal:
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(keys.shape[0] - q.shape[0] + 1)
        scores = scores.masked_fill(ahead, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.double()).to(q.dtype)


def paged(cache, pages, length):
    """The first `length` rows of a sequence."""
    return cache[pages.long()].flatten(0, 1)[:length]


class Planned:
    """What the planned wrappers share: `plans` counts calls of `plan`, of all wrappers."""

    made: list[Planned]

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False, backend="auto"):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype is torch.uint8
        self.tensor_cores, self.backend, self.plans = use_tensor_cores, backend, 0
        self.made.append(self)

    def keep(self, starts, page_starts, pages, lengths, heads, scale, causal, dtypes):
        assert {t.dtype for t in (starts, page_starts, pages, lengths)} == {torch.int32}
        assert len(starts) == len(page_starts) == len(lengths) + 1 and len(pages) == page_starts[-1]
        self.plans += 1
        self.starts, self.page_starts, self.pages, self.lengths = starts, page_starts, pages, lengths
        self.heads, self.scale, self.causal, self.dtypes = heads, scale, causal, dtypes

    def attended(self, q, keys, values):
        assert (q.dtype, keys.dtype) == self.dtypes and q.shape[:2] == (self.starts[-1], self.heads)
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        for i, length in enumerate(self.lengths.tolist()):
            pages = self.pages[self.page_starts[i] : self.page_starts[i + 1]]
            rows = slice(self.starts[i], self.starts[i + 1])
            k, v = (paged(c, pages, length).repeat_interleave(self.heads // c.shape[2], 1) for c in (keys, values))
            out[rows] = attend(q[rows], k, v, self.scale, self.causal)
        return out


class Prefill(Planned):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, causal=False, sm_scale=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert head_dim_qk in (64, 128, 256)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        self.shape, scale = (page_size, num_kv_heads, head_dim_qk), sm_scale or head_dim_qk**-0.5
        dtypes = q_data_type, kv_data_type or q_data_type
        self.keep(qo_indptr, paged_kv_indptr, paged_kv_indices, lengths, num_qo_heads, scale, causal, dtypes)

    def run(self, q, paged_kv_cache):
        assert all(cache.shape[1:] == self.shape for cache in paged_kv_cache)
        return self.attended(q, *paged_kv_cache)


class Decode(Prefill):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        assert self.tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        rows = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(
            rows, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, False, sm_scale,
            q_data_type, kv_data_type,
        )  # fmt: skip


class MLA(Planned):
    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (head_dim_ckv, head_dim_kpe) == (RANK, ROPE) and torch.equal(
            kv_indptr.diff(), -(-kv_len_arr // page_size)
        )
        dtypes = q_data_type, kv_data_type
        self.keep(qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, sm_scale, causal, dtypes)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, kv_len=None, page_table=None):
        q, latent = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
        if self.backend != "cutlass":
            assert kpe_cache.data_ptr() - ckv_cache.data_ptr() == RANK * latent.element_size(), "copied"
            return self.attended(q, latent.unsqueeze(2), ckv_cache.unsqueeze(2))
        assert q.shape[1] == 128 and 128 % latent.shape[1] == 0
        return absorbed(q, latent, page_table, kv_len, RANK, 192**-0.5)


def absorbed(q, latent, tables, lengths, rank, scale):
    """q [rows, heads, .], one row a sequence, as the calls without a plan take it."""
    assert tables.dtype == lengths.dtype == torch.int32 and tables.is_contiguous()
    assert tables.shape[0] == lengths.shape[0] == q.shape[0] and tables.shape[1] * latent.shape[1] % 128 == 0
    out = q.new_empty(*q.shape[:2], rank)
    for row, length in enumerate(lengths.tolist()):
        keys = paged(latent, tables[row], length).unsqueeze(1).expand(-1, q.shape[1], -1)
        out[row] = attend(q[row : row + 1], keys, keys[..., :rank], scale, False)[0]
    return out


def trtllm(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, backend="auto",
):  # fmt: skip
    assert kv_cache.shape[1] in (32, 64) and backend == "trtllm-gen" and not workspace_buffer.any()
    assert (kv_lora_rank, qk_rope_head_dim) in ((512, 64), (256, 64)) and query.shape[1] == 1
    assert int(seq_lens.max()) <= max_seq_len
    return absorbed(query[:, 0], kv_cache, block_tables, seq_lens, kv_lora_rank, bmm1_scale)[:, None] * bmm2_scale


def xqa(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, out=None, bmm1_scale=1.0, bmm2_scale=1.0,
):  # fmt: skip
    assert query.shape[1:] == (1, 128, RANK + ROPE) and query.is_contiguous() and not workspace_buffer.any()
    # bmm2_scale multiplies the scores as well: it is the cache's scale.
    return absorbed(query[:, 0], kv_cache, block_tables, seq_lens, kv_lora_rank, bmm1_scale * bmm2_scale)[:, None]


@pytest.fixture(autouse=True)
def wrappers(monkeypatch):
    """FlashInfer's stand-in is installed; the wrappers that were made."""
    package, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    package.BatchPrefillWithPagedKVCacheWrapper, package.BatchDecodeWithPagedKVCacheWrapper = Prefill, Decode
    package.mla, mla.BatchMLAPagedAttentionWrapper = mla, MLA
    mla.trtllm_batch_decode_with_kv_cache_mla, mla.xqa_batch_decode_with_kv_cache_mla = trtllm, xqa
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr(Planned, "made", [], raising=False)
    return Planned.made


class Step:
    """Sequences whose pages lie in any order: `queries[i]` rows, the last of which sees `contexts[i]` keys."""

    def __init__(self, queries, contexts, page, seed=0):
        torch.manual_seed(seed)
        counts = [-(-max(context, 1) // page) for context in contexts]
        order = torch.randperm(sum(counts)).add_(1)
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for line, pages in zip(self.table, order.split(counts), strict=True):
            line[: len(pages)] = pages
        self.page, self.contexts, self.tokens = page, contexts, sum(queries)
        spans, sequence, seen = [], [], []
        for i, (count, context) in enumerate(zip(queries, contexts, strict=True)):
            spans.append(Span(len(sequence), len(sequence) + count, context))
            sequence += [i] * count
            seen += [max(0, context - count + 1 + row) if context else 0 for row in range(count)]
        self.metadata = AttentionMetadata(self.table, tensor(sequence), tensor(seen), tuple(spans))

    def cache(self, width):
        found = torch.full((int(self.table.max()) + 1, self.page, width), POISON)
        for line, context in zip(self.table, self.contexts, strict=True):
            position = torch.arange(context)
            found[line[position // self.page].long(), position % self.page] = torch.randn(context, width)
        return found


def tensor(values):
    return torch.tensor(values, dtype=torch.int32)


def create(name, phase):
    context = KernelContext(torch.device("cpu"), torch.float32)
    return importlib.import_module(f"pellucid.attention.{name}").create(context, phase)


def decode_step(page, seed=0):
    """Lengths at and past a page's end, padded rows between others and at the end."""
    contexts = [page, page + 1, 0, 1, 3 * page - 1, 2 * page, 0]
    return Step([1] * len(contexts), contexts, page, seed)


def prefill_step(page, seed=0):
    """A prompt, one whose beginning is cached, a single row, a padded span, and one that ends with its page."""
    return Step([5, 7, 1, 2, page], [5, page + 9, 2 * page + 1, 0, 2 * page], page, seed)


def close(found, wanted):
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-4), float((found - wanted).abs().max())


def check_gqa(backend, step, heads, kv_heads):
    keys, values = step.cache(kv_heads * 64), step.cache(kv_heads * 64)
    q = torch.randn(step.tokens, heads + 3, 64)[:, :heads]  # rows apart, as in the projection that they come from
    call = {"num_kv_heads": kv_heads, "scale": 0.2}
    wanted = ReferenceAttention().gqa(q, keys, values, step.metadata, **call)
    close(backend.gqa(q, keys, values, step.metadata, **call), wanted)


def check_mla(backend, step, heads, scale, metadata=None):
    latent, q = step.cache(RANK + ROPE), torch.randn(step.tokens, heads, RANK + ROPE)
    call = {"kv_lora_rank": RANK, "scale": scale}
    wanted = ReferenceAttention().mla(q, latent, step.metadata, **call)
    close(backend.mla(q, latent, metadata or step.metadata, **call), wanted)


STEPS = {"decode": decode_step, "prefill": prefill_step}


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 1)])
def test_gqa_is_the_reference_s(phase, heads, kv_heads, page):
    check_gqa(create("flashinfer_gqa", phase), STEPS[phase](page), heads, kv_heads)


def test_gqa_decode_of_several_rows_of_a_sequence_is_the_reference_s():
    check_gqa(create("flashinfer_gqa", "decode"), Step([3, 1, 2, 1], [18, 0, 33, 16], 16), 4, 2)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_mla_is_the_reference_s(phase, page):
    check_mla(create("flashinfer_mla", phase), STEPS[phase](page), 3, 0.1)


@pytest.mark.parametrize(("page", "scale"), [(1, 0.1), (16, 192**-0.5), (128, 0.1)])
def test_cutlass_mla_is_the_reference_s_under_the_model_s_scale(page, scale):
    check_mla(create("cutlass_mla", "decode"), decode_step(page), 128, scale)


@pytest.mark.parametrize(
    ("name", "heads", "page"),
    [("trtllm_mla", 5, 32), ("trtllm_mla", 8, 64), ("xqa_mla", 128, 16), ("xqa_mla", 128, 128)],
)
def test_decode_without_a_plan_is_the_reference_s_in_layers_and_in_fused_steps(name, heads, page):
    backend = create(name, "decode")
    step = Step([1, 3, 1, 1, 1], [page, page + 2, 0, 3 * page - 1, 0], page)
    check_mla(backend, step, heads, 0.1)
    called = CalledAttention(backend, step.table, step.metadata.sequence)
    for _ in range(2):
        called.begin(step.metadata.context)
        check_mla(backend, step, heads, 0.1, called.metadata)


@pytest.mark.parametrize("name", ["flashinfer_gqa", "flashinfer_mla"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_is_planned_once_for_its_layers_and_the_next_one_anew(name, phase, wrappers):
    backend = create(name, phase)
    for number in range(1, 4):
        step = STEPS[phase](16, seed=number)
        for _ in range(3):
            check_gqa(backend, step, 4, 2) if name == "flashinfer_gqa" else check_mla(backend, step, 3, 0.1)
        assert [wrapper.plans for wrapper in wrappers] == [number]


@pytest.mark.parametrize("name", ["flashinfer_gqa", "flashinfer_mla", "cutlass_mla", "trtllm_mla", "xqa_mla"])
def test_a_step_of_padded_rows_alone_gives_zeros_without_a_plan(name, wrappers):
    backend, step = create(name, "decode"), Step([1, 1], [0, 0], 32)
    check_gqa(backend, step, 4, 2) if name == "flashinfer_gqa" else check_mla(backend, step, 128, 0.1)
    assert not any(wrapper.plans for wrapper in wrappers)


def test_a_prompt_with_more_tiles_than_a_plan_has_room_for_is_refused(wrappers):
    backend, rows = create("flashinfer_mla", "prefill"), 16_300
    q, page = torch.empty(1, 1, 1).expand(rows, 128, RANK + ROPE), torch.arange(255, dtype=torch.int32)[None]
    metadata = AttentionMetadata(page, tensor([0]), tensor([1]), (Span(0, rows, rows),))
    with pytest.raises(PlanError, match=r"16300 tiles .* --max-num-batched-tokens"):
        backend.mla(q, torch.empty(1, 64, RANK + ROPE), metadata, kv_lora_rank=RANK, scale=0.1)


def test_a_plan_is_not_written_before_the_last_one_was_sent_nor_into_a_graph(monkeypatch):
    seen, capturing = [], False
    event = SimpleNamespace(synchronize=lambda: seen.append("wait"), record=lambda: seen.append("send"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    plan, first, second = HostPlan(), *(SimpleNamespace(page_table=SimpleNamespace(is_cuda=True)) for _ in range(2))
    for metadata in (first, first, second):
        plan.get(metadata, lambda: seen.append("plan"))
    assert seen == ["wait", "plan", "send"] * 2
    capturing = True
    with pytest.raises(RuntimeError, match="CUDA graph"):
        plan.get(second, lambda: seen.append("plan"))
