"""From tokens to embeddings and from logits to tokens: values, ties, noise and state, on tiny vocabularies."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is for Linux")

from pellucid.kernels.triton import head  # noqa: E402
from pellucid.kernels.triton.head import begin_step, finish_step, head_programs, partial_best, small_head  # noqa: E402
from pellucid.kernels.triton.linear import LinearTile  # noqa: E402
from pellucid.kernels.triton.sampling import SlotSampling  # noqa: E402

TILES = {
    "fma": LinearTile(block_n=4, block_k=128, warps=1),
    "dot": LinearTile(block_n=16, block_k=64, warps=4, dot=True, split=4, stages=2),
}


def ints(values: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def partials(rows: int, programs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned best_value and best_index."""
    value = torch.full((rows, programs), float("nan"), device=device)
    return value, torch.full((rows, programs), -9, dtype=torch.int32, device=device)


def best_tokens(value: torch.Tensor, index: torch.Tensor) -> list[int]:
    return index.gather(1, value.argmax(1, keepdim=True)).flatten().tolist()


def draw(
    logits: torch.Tensor, heat: float, seeds: list[int], positions: list[int], device: torch.device, dtype: torch.dtype
) -> list[int]:
    """A token for each seed and position, all from logits [vocab]. 16 draws a program: the interpreter is slow."""
    x, weight = torch.zeros(16, 64), torch.zeros(logits.numel(), 64)
    x[:, 0], weight[:, 0] = 1, logits
    out = torch.zeros(16, logits.numel(), device=device)
    tokens = []
    for start in range(0, len(seeds), 16):
        rows = len(seeds[start : start + 16])
        value, index = partials(rows, head_programs(logits.numel(), rows, TILES["dot"]), device)
        small_head(
            x[:rows].to(device, dtype), None, 0.0, weight.to(device, dtype), out, value, index, tile=TILES["dot"],
            sampling=SlotSampling(
                torch.full((rows,), heat, device=device), ints(seeds[start : start + 16], device, torch.int64)
            ),
            state_positions=ints(positions[start : start + 16], device), row_slots=ints(list(range(rows)), device),
        )  # fmt: skip
        tokens += best_tokens(value, index)
    return tokens


def test_a_step_begins_with_each_slots_embedding_and_context(device: torch.device, dtype: torch.dtype) -> None:
    tokens, positions = ints([4, 0, 2, 6], device), ints([7, 0, 30, 99], device)
    embedding = torch.randn(7, 40).to(device, dtype)
    wide = torch.full((3, 48), float("nan"), dtype=dtype, device=device)
    context = ints([-5] * 3, device)
    begin_step(tokens, positions, ints([2, 1, 0], device), 1, embedding, wide[:, :40], context)
    assert torch.equal(wide[:, :40], embedding[[2, 0, 4]])
    assert wide[:, 40:].isnan().all()
    assert context.tolist() == [31, 0, 8]


@pytest.mark.parametrize(("kind", "rows"), [("fma", 1), ("fma", 3), ("dot", 3), ("dot", 9)])
@pytest.mark.parametrize("vocab", [32, 45])
def test_logits_and_best_tokens_are_those_of_the_normalized_row(
    kind: str, rows: int, vocab: int, device: torch.device, dtype: torch.dtype
) -> None:
    x, norm, weight = torch.randn(rows, 136), torch.randn(136), torch.randn(vocab, 136)
    x, norm, weight = (t.to(device, dtype) for t in (x, norm, weight))
    logits = torch.full((rows, vocab + 3), float("nan"), device=device)
    value, index = partials(rows, head_programs(vocab, rows, TILES[kind]), device)
    small_head(x, norm, 1e-6, weight, logits[:, :vocab], value, index, tile=TILES[kind])
    wide = x.double().cpu()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double().cpu()
    reference = wide @ weight.double().cpu().T
    got = logits[:, :vocab]
    assert (got.double().cpu() - reference).norm() / reference.norm() < (1e-2 if dtype == torch.bfloat16 else 3e-3)
    assert logits[:, vocab:].isnan().all()
    assert best_tokens(value, index) == got.argmax(1).tolist()
    assert torch.equal(value.amax(1), got.amax(1))


@pytest.mark.parametrize("kind", TILES)
def test_sampling_in_the_head_equals_sampling_its_logits(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Tiles change no draw; slots of temperature 0 stay greedy; rows go by their slot."""
    rows, vocab = 4, 45
    x, weight = torch.randn(rows, 128).to(device, dtype), (torch.randn(vocab, 128) * 0.1).to(device, dtype)
    state = {
        "sampling": SlotSampling(
            torch.tensor([0.0, 0.7, 0.0, 1.5, 3.0], device=device), ints([1, 2**40 + 5, 3, -7, 9], device, torch.int64)
        ),
        "state_positions": ints([9, 8, 7, 6, 5], device),
        "row_slots": ints([3, 0, 1, 4], device),
    }
    logits = torch.full((rows, vocab), float("nan"), device=device)
    value, index = partials(rows, head_programs(vocab, rows, TILES[kind]), device)
    small_head(x, None, 0.0, weight, logits, value, index, tile=TILES[kind], **state)
    again = partials(rows, head_programs(vocab, 17), device)
    partial_best(logits, *again, **state)
    assert best_tokens(value, index) == best_tokens(*again)
    assert best_tokens(value, index)[1] == int(logits[1].argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_partial_maxima_cover_a_vocabulary_of_several_programs(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "PARTIAL_BLOCK", 32)
    wide = torch.full((5, 110), float("nan"), dtype=dtype, device=device)
    wide[:, :100] = torch.randn(5, 100).to(device, dtype)
    logits = wide[:, :100]
    logits[0, [40, 77]] = 50.0
    logits[1] = -3.0
    value, index = partials(5, head_programs(100, 17), device)
    partial_best(logits, value, index)
    assert value.shape == (5, 4)
    for part in range(4):
        chunk = logits[:, 32 * part : 32 * part + 32].float()
        assert torch.equal(value[:, part], chunk.amax(1))
        first = [32 * part + row.index(max(row)) for row in chunk.tolist()]
        assert index[:, part].tolist() == first


@pytest.mark.parametrize("heat", [0.5, 2.0])
def test_noise_draws_from_the_softmax_at_the_temperature(heat: float, device: torch.device, dtype: torch.dtype) -> None:
    """Chi-square over 7 tokens, 6 degrees of freedom: above 27.9 once in 10,000 (the seeds are fixed)."""
    draws, row = 960, torch.tensor([0.25, -1.0, 2.0, 1.125, 0.0, -0.5, 1.75])
    got = draw(row, heat, list(range(100, 100 + draws)), [3] * draws, device, dtype)
    wanted = torch.softmax(row / heat, 0) * draws
    counts = torch.bincount(torch.tensor(got), minlength=7)
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 27.9


def test_noise_differs_by_seed_position_and_both_halves_of_the_seed(device: torch.device, dtype: torch.dtype) -> None:
    """With 500 equal logits, two independent draws agree once in 500."""
    seeds, positions = [5, 6, 5 + (1 << 32), 5, 5], [3, 3, 3, 4, 3]
    *different, again = draw(torch.zeros(500), 1.0, seeds, positions, device, dtype)
    assert len(set(different)) == 4
    assert again == different[0]


def test_draws_of_successive_positions_are_independent(device: torch.device, dtype: torch.dtype) -> None:
    """Pairs of a fair coin at positions p and p + 1 of one seed: 3 degrees of freedom, above 21.1 once in 10,000."""
    draws = 800
    coin = draw(torch.zeros(2), 1.0, [11] * draws, list(range(draws)), device, dtype)
    pairs = torch.bincount(torch.tensor([2 * a + b for a, b in zip(coin[::2], coin[1::2], strict=True)]), minlength=4)
    assert float(((pairs - draws / 8) ** 2 / (draws / 8)).sum()) < 21.1


def finish(value, index, slots, device, step=5, length=4, scratch=0):  # type: ignore[no-untyped-def]
    """(tokens, positions, ring, step, finite) afterwards, of 4 slots whose tokens were 50.. and positions 10.."""
    tokens, positions = ints([50, 51, 52, 53], device), ints([10, 11, 12, 13], device)
    ring, counter = torch.full((length, 6), -8, dtype=torch.int32, device=device), ints([step], device, torch.int64)
    finite = ints([1], device)
    finish_step(value, index, ints(slots, device), scratch, tokens, positions, ring, counter, finite)
    return tokens.tolist(), positions.tolist(), ring, int(counter), int(finite)


def test_a_step_ends_with_tokens_in_state_and_ring(device: torch.device) -> None:
    value = torch.tensor([[1.0, 4.0, 2.0], [9.0, -1.0, 0.0], [0.0, 0.0, 5.0]], device=device)
    index = torch.tensor([[7, 17, 27], [8, 18, 28], [9, 19, 29]], dtype=torch.int32, device=device)
    tokens, positions, ring, step, finite = finish(value, index, [3, 0, 1], device)
    assert tokens == [50, 29, 52, 17], "the scratch slot 0 keeps its token"
    assert positions == [10, 12, 12, 14]
    assert ring[1].tolist() == [17, 8, 29, -8, -8, -8], "5 % 4, one column a row"
    assert (ring[[0, 2, 3]] == -8).all()
    assert (step, finite) == (6, 1)


def test_of_equal_partial_maxima_the_lowest_token_wins(device: torch.device) -> None:
    """5000 programs: also where the reduction goes round again."""
    value = torch.zeros(1, 5000, device=device)
    value[0, [300, 4100, 4999]] = 2.0
    index = torch.arange(0, 5000 * 3, 3, dtype=torch.int32, device=device)[None]
    tokens, *_ = finish(value, index, [2], device)
    assert tokens[2] == 900


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("slot", [0, 2])
def test_logits_that_are_not_finite_are_told_and_pick_a_real_token(bad: float, slot: int, device: torch.device) -> None:
    logits = torch.full((2, 40), float("-inf"), device=device)
    logits[0, 5] = bad
    logits[1, 6] = 1.0
    value, index = partials(2, 1, device)
    partial_best(logits, value, index)
    tokens, _, ring, _, finite = finish(value, index, [slot, 1], device)
    assert ring[1, :2].tolist() == [-1, 6]
    assert finite == (slot == 0), "padding raises no alarm"
    assert 0 <= index[0, 0] < 40
    assert tokens[1] == 6


def test_steps_count_up_and_walk_round_the_ring(device: torch.device) -> None:
    value, index = torch.ones(2, 1, device=device), ints([3, 4], device)[:, None]
    for step in range(6):
        _, _, ring, counter, _ = finish(value, index, [1, 2], device, step=step)
        assert counter == step + 1
        assert (ring != -8).any(1).nonzero().flatten().tolist() == [step % 4]
