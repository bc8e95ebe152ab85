"""Tokens sorted by expert, and the grouped products over them, against fp64 on fresh random inputs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is for Linux")

from pellucid.kernels.triton import moe_grouped  # noqa: E402
from pellucid.kernels.triton.moe_grouped import (  # noqa: E402
    ExpertBlocks,
    GroupedTile,
    grouped_down,
    grouped_tiles,
    grouped_up,
    max_blocks,
    reduce_pairs,
    sort_by_expert,
)

SMALL = GroupedTile(block_n=16, block_k=32, group_m=2, warps=4, stages=3)


def random_experts(rows: int, num_experts: int, top_k: int, seed: int, skew: float = 0.0) -> torch.Tensor:
    """int32 [rows, top_k], distinct in a row; with `skew`, some experts are taken far more often."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, num_experts, generator=generator) + skew * torch.rand(num_experts, generator=generator)
    return scores.topk(top_k, dim=-1).indices.to(torch.int32)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double().cpu() - reference).norm() / reference.norm())


def tolerance(dtype: torch.dtype) -> float:
    return 1e-2 if dtype == torch.bfloat16 else 3e-3


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def sorted_blocks(experts: torch.Tensor, num_experts: int, block_m: int, device: torch.device) -> ExpertBlocks:
    blocks = ExpertBlocks.allocate(experts.numel(), num_experts, block_m, device)
    for tensor in (blocks.sorted_pairs, blocks.block_experts, blocks.count, blocks.chunk_counts):
        tensor.fill_(-7)
    sort_by_expert(experts.to(device), blocks)
    return blocks


def expected_blocks(experts: torch.Tensor, num_experts: int, block_m: int) -> list[tuple[int, list[int]]]:
    """(expert, its pairs in ascending order with filler) per block."""
    flat = experts.flatten().tolist()
    blocks = []
    for expert in range(num_experts):
        pairs = [pair for pair, taken in enumerate(flat) if taken == expert]
        pairs += [len(flat)] * (-len(pairs) % block_m)
        blocks += [(expert, pairs[start : start + block_m]) for start in range(0, len(pairs), block_m)]
    return blocks


@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "block_m", "skew", "ids"),
    [
        (1, 8, 1, 16, 0.0, torch.int32),
        (17, 5, 3, 16, 0.0, torch.int64),
        (40, 40, 4, 16, 3.0, torch.int32),
        (33, 6, 6, 32, 0.0, torch.int32),
    ],
)
def test_sorting_makes_blocks_of_one_expert_with_pairs_in_order(device, rows, num_experts, top_k, block_m, skew, ids):
    experts = random_experts(rows, num_experts, top_k, seed=rows, skew=skew).to(ids)
    blocks = sorted_blocks(experts, num_experts, block_m, device)
    wanted = expected_blocks(experts, num_experts, block_m)
    count = int(blocks.count)
    assert count == len(wanted) <= blocks.max_blocks
    assert blocks.block_experts[:count].tolist() == [expert for expert, _ in wanted]
    assert blocks.sorted_pairs.view(-1, block_m)[:count].tolist() == [pairs for _, pairs in wanted]


def test_sorting_many_pairs_in_chunks_gives_the_same_as_in_one(device, monkeypatch):
    experts = random_experts(50, 7, 3, seed=3, skew=1.0)
    whole = sorted_blocks(experts, 7, 16, device)
    monkeypatch.setattr(moe_grouped, "SORT_CHUNK", 32)
    chunked = sorted_blocks(experts, 7, 16, device)
    assert chunked.chunk_counts.shape == (5, 7)
    assert chunked.count.equal(whole.count)
    assert chunked.sorted_pairs.equal(whole.sorted_pairs)
    assert chunked.block_experts.equal(whole.block_experts)


def test_the_static_grid_covers_the_worst_routing():
    for num_experts, block_m in ((3, 2), (8, 16)):
        for pairs in range(1, 70):
            # One pair for each expert but one, the rest for that one, and every split between two experts.
            worst = max(
                sum(-(-size // block_m) for size in (first, pairs - others - first, *[1] * others) if size > 0)
                for others in range(min(num_experts - 2, pairs) + 1)
                for first in range(pairs - others + 1)
            )
            assert worst <= max_blocks(pairs, num_experts, block_m)


def expert_products(x, gate_up, experts):
    """silu(gate) * up in fp64 per pair, [pairs, intermediate]."""
    rows = x.double().cpu().repeat_interleave(experts.shape[1], 0)
    both = torch.einsum("pnk,pk->pn", gate_up.double().cpu()[experts.flatten().long()], rows)
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("rows", "hidden", "intermediate", "block_m"), [(19, 64, 32, 16), (21, 80, 24, 16), (40, 32, 16, 32)]
)
def test_grouped_up_is_the_gated_product_of_each_pair(device, dtype, rows, hidden, intermediate, block_m):
    num_experts, top_k = 4, 2
    torch.manual_seed(rows)
    x = torch.randn(rows, hidden + 16).to(device, dtype)[:, :hidden]
    gate_up = (torch.randn(num_experts, 2 * intermediate, hidden) / hidden**0.5).to(device, dtype)
    experts = random_experts(rows, num_experts, top_k, seed=rows, skew=0.5)
    act = poisoned(rows * top_k, intermediate + 8, dtype=dtype, device=device)
    grouped_up(x, gate_up, sorted_blocks(experts, num_experts, block_m, device), act[:, :intermediate], tile=SMALL)
    assert relative_error(act[:, :intermediate], expert_products(x, gate_up, experts)) < tolerance(dtype)
    assert act[:, intermediate:].isnan().all()


@pytest.mark.parametrize(("hidden", "intermediate", "out"), [(32, 64, torch.float32), (40, 40, None)])
def test_grouped_down_is_the_weighted_product_of_each_pair(device, dtype, hidden, intermediate, out):
    rows, num_experts, top_k = 13, 4, 3
    torch.manual_seed(hidden)
    act = torch.randn(rows * top_k, intermediate + 8).to(device, dtype)[:, :intermediate]
    down = (torch.randn(num_experts, hidden, intermediate) / intermediate**0.5).to(device, dtype)
    experts = random_experts(rows, num_experts, top_k, seed=hidden)
    weights = torch.rand(rows, top_k).to(device)
    pair_out = poisoned(rows * top_k, hidden, dtype=out or dtype, device=device)
    grouped_down(act, down, sorted_blocks(experts, num_experts, 16, device), weights, pair_out, tile=SMALL)
    reference = torch.einsum("pnk,pk->pn", down.double().cpu()[experts.flatten().long()], act.double().cpu())
    assert relative_error(pair_out, reference * weights.double().cpu().flatten()[:, None]) < tolerance(dtype)


@pytest.mark.parametrize(("extra", "top_k", "hidden"), [(True, 3, 40), (False, 6, 64)])
def test_reducing_adds_each_rows_pairs_and_the_extra_to_the_residual(device, dtype, extra, top_k, hidden):
    rows = 5
    torch.manual_seed(top_k)
    pair_out = torch.randn(rows * top_k, hidden).to(device)
    residual = torch.randn(rows, hidden + 8).to(device, dtype)
    beside = residual[:, hidden:].clone()
    shared = torch.randn(rows, hidden + 8).to(device, dtype)[:, :hidden] if extra else None
    reference = residual[:, :hidden].double().cpu() + pair_out.double().cpu().view(rows, top_k, hidden).sum(1)
    if shared is not None:
        reference += shared.double().cpu()
    reduce_pairs(pair_out, residual[:, :hidden], extra=shared)
    assert relative_error(residual[:, :hidden], reference) < tolerance(dtype)
    assert residual[:, hidden:].equal(beside)


def test_one_expert_taken_by_every_token_is_right_too(device, dtype):
    rows, hidden, intermediate = 35, 32, 16
    torch.manual_seed(1)
    x = torch.randn(rows, hidden).to(device, dtype)
    gate_up = (torch.randn(3, 2 * intermediate, hidden) / hidden**0.5).to(device, dtype)
    experts = torch.full((rows, 1), 2, dtype=torch.int32)
    act = poisoned(rows, intermediate, dtype=dtype, device=device)
    grouped_up(x, gate_up, sorted_blocks(experts, 3, 16, device), act, tile=SMALL._replace(group_m=1))
    assert relative_error(act, expert_products(x, gate_up, experts)) < tolerance(dtype)


@pytest.mark.parametrize("shared_memory", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("model", [(64, 6, 2048, 1408), (384, 8, 7168, 2048)])
def test_default_tiles_fit_the_shared_memory_of_the_device(model, shared_memory):
    num_experts, top_k, hidden, intermediate = model
    for rows in (17, 32, 128, 512, 2048, 8192, 65536):
        tiles = grouped_tiles(rows * top_k, num_experts, hidden, intermediate, shared_memory)
        for tile, weight_rows in ((tiles.up, 2 * tiles.up.block_n), (tiles.down, tiles.down.block_n)):
            held = tile.stages - (tiles.block_m < 64)
            assert held * (tiles.block_m + weight_rows) * tile.block_k * 2 <= shared_memory
