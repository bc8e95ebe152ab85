"""Top-k, top-p and min-p on the device keep what the host's sampler keeps, and draw from it with the usual noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is for Linux")

from pellucid.kernels.triton import token_filters  # noqa: E402
from pellucid.kernels.triton.head import finish_step, head_programs, partial_best  # noqa: E402
from pellucid.kernels.triton.sampling import SlotSampling  # noqa: E402
from pellucid.kernels.triton.token_filters import FilterSpace, sampling_bins  # noqa: E402
from pellucid.runner.sampler import _nucleus  # noqa: E402


class Ask(NamedTuple):
    """What one row asks for."""

    heat: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1


class Chosen(NamedTuple):
    """Of each row: the token, the key of the last one kept, and the token in the ring."""

    tokens: list[int]
    cuts: list[int]
    ring: list[int]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a row, of several tiles each, in a vocabulary that the interpreter can walk through."""
    monkeypatch.setattr(token_filters, "BLOCK", 256)


def choose(logits: torch.Tensor, asks: Sequence[Ask], position: int = 5) -> Chosen:
    """A step's last three kernels, on as many slots as rows, in another order."""
    device, (rows, vocab) = logits.device, logits.shape
    slots = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=device)
    kinds = (torch.float32, torch.int64, torch.int32, torch.float32, torch.float32)
    fields = zip(*((a.heat, a.seed, a.top_k, a.top_p, a.min_p) for a in reversed(asks)), strict=True)
    sampling = SlotSampling(
        *(torch.tensor(values, dtype=kind, device=device) for values, kind in zip(fields, kinds, strict=True))
    )
    positions = torch.full((rows,), position, dtype=torch.int32, device=device)
    value = torch.full((rows, head_programs(vocab, 17)), float("nan"), device=device)
    index = torch.full(value.shape, -9, dtype=torch.int32, device=device)
    space = FilterSpace.of(rows, vocab, lambda _, *shape, dtype: torch.zeros(shape, dtype=dtype, device=device))
    for poisoned in (space.kept_value, space.kept_token, space.listed):
        poisoned.fill_(-7)
    partial_best(logits, value, index, sampling=sampling, state_positions=positions, row_slots=slots)
    sampling_bins(logits, value, slots, sampling, space)
    tokens, ring = (torch.full(shape, -8, dtype=torch.int32, device=device) for shape in ((rows,), (2, rows)))
    step = torch.zeros(1, dtype=torch.int64, device=device)
    finish_step(
        value, index, slots, rows, tokens, positions, ring, step, logits=logits, sampling=sampling, space=space
    )  # fmt: skip
    assert int(step) == 1
    assert positions.tolist() == [position + 1] * rows
    assert not any(left.any() for left in (space.masses, space.counts, space.arrived, space.length)), "not as before"
    return Chosen(tokens.flip(0).tolist(), space.words[:, 7].tolist(), ring[0].tolist())


def host_kept(logits: torch.Tensor, ask: Ask) -> set[int]:
    """The tokens that `runner.sampler` keeps of logits [vocab]; of equal logits, which it takes in any order, the lower
    ids."""
    values = logits.double().cpu()
    chances = ((values - values.max()) / ask.heat).softmax(-1)
    chances = chances.where(chances >= ask.min_p * chances.max(), 0.0)
    if ask.top_k == 0 and ask.top_p >= 1:
        return set(chances.nonzero().flatten().tolist())
    kept, tokens = _nucleus(chances, ask.top_k or len(chances), ask.top_p)
    number = int((kept > 0).sum())
    ranked = sorted(range(len(values)), key=lambda token: (-float(values[token]), token))[:number]
    assert sorted(values[ranked].tolist()) == sorted(values[tokens[:number]].tolist())
    return set(ranked)


def device_kept(logits: torch.Tensor, cut: int) -> set[int]:
    """Tokens whose logit, and then id, is not below the cut."""
    bits = logits.float().cpu().numpy().view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered << 31) + (2**31 - 1) - np.arange(len(bits))
    return set(np.flatnonzero(keys >= cut).tolist())


def noise(seed: int, position: int, vocab: int) -> npt.NDArray[np.float64]:
    """The device's noise, written out a second time."""

    def mix(h: Any) -> Any:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = (h ^ (h >> shift)) * factor & 0xFFFFFFFF
        return h ^ (h >> 16)

    key = mix(mix((seed + 0x9E3779B9) & 0xFFFFFFFF) ^ (seed >> 32 & 0xFFFFFFFF))
    key = mix(key ^ position)
    h = mix((mix(np.arange(vocab, dtype=np.uint64) ^ np.uint64(key)) + np.uint64(key)) & 0xFFFFFFFF)
    return -np.log(-np.log1p(-np.minimum((h + 0.5) / 2**32, 1 - 2**-24)))  # type: ignore[no-any-return]


KEPT = {
    "k": Ask(top_k=20),
    "k of 1": Ask(top_k=1, heat=3.0),
    "k beyond the vocabulary": Ask(top_k=2**31 - 1, top_p=0.8),
    "p": Ask(top_p=0.9),
    "p of almost nothing": Ask(top_p=1e-6),
    "p of almost all": Ask(top_p=0.9999, heat=0.7),
    "k, p": Ask(top_k=20, top_p=0.95, heat=0.6),
    "large k, p": Ask(top_k=200, top_p=0.5, heat=5.0),
    "k, p, min-p": Ask(top_k=150, top_p=0.97, min_p=0.001, heat=1.7),
}


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_what_is_kept_is_what_the_host_keeps(kind: str, device: torch.device) -> None:
    """All filters in one batch. The bf16 logits are whole numbers and halves, with ties at every cut."""
    generator = torch.Generator().manual_seed(len(kind))
    wide = torch.full((len(KEPT), 560), float("nan"))
    wide[:, :540] = torch.randn(len(KEPT), 540, generator=generator) * 2.5
    logits = (wide if kind == "fp32" else (2 * wide).round().bfloat16() / 2).to(device)[:, :540]
    found = choose(logits, list(KEPT.values()))
    for row, (name, ask) in enumerate(KEPT.items()):
        expected = host_kept(logits[row], ask)
        assert device_kept(logits[row], found.cuts[row]) == expected, name
        assert found.tokens[row] in expected, name
    assert found.ring == found.tokens


def test_a_draw_is_the_best_of_the_kept_with_the_noise_of_an_unfiltered_one(device: torch.device) -> None:
    """In rows of all kinds side by side, unfiltered and greedy ones too: none disturbs another's draw."""
    generator = torch.Generator().manual_seed(5)
    asks = [
        Ask(heat=1.3, min_p=0.05, seed=2**40 + 5), Ask(heat=0.0, top_k=3, top_p=0.2), Ask(heat=0.9, seed=-3),
        Ask(heat=2.0, top_k=9, seed=4), Ask(heat=1.0, top_p=0.7, seed=5), Ask(heat=4.0, top_k=50, top_p=0.9, seed=6),
        *(Ask(top_k=200, top_p=0.8, seed=seed) for seed in range(7, 11)),
    ]  # fmt: skip
    logits = (torch.randn(len(asks), 300, generator=generator) * 2).to(device)
    # Any of the tokens is likely here, so that none may be missed.
    logits[6:] /= 20
    found = choose(logits, asks, position=77)
    for row, ask in enumerate(asks):
        values = logits[row].double().cpu().numpy()
        if ask.heat > 0:
            values = values / ask.heat + noise(ask.seed, 77, 300)
            kept = host_kept(logits[row], ask)
            values[[token for token in range(300) if token not in kept]] = -np.inf
        assert found.tokens[row] == int(values.argmax())


def test_draws_follow_the_filtered_distribution(device: torch.device) -> None:
    """Chi-square over the 4 tokens that k, p and min-p leave of 9; 3 degrees of freedom, above 21.1 once in 10,000.

    The device draws some of the seeds, and each like the noise written out here, which then draws many.
    """
    row = torch.tensor([0.5, 2.0, -1.0, 1.5, 1.25, 1.0, 0.75, -3.0, 0.875])
    ask = Ask(heat=1.2, top_k=6, top_p=0.85, min_p=0.4)
    kept = sorted(host_kept(row, ask))
    assert len(kept) == 4
    wanted = torch.softmax(row[kept] / ask.heat, 0).numpy()
    values = row.numpy() / ask.heat
    drawn = [kept[int((values + noise(seed, 5, 9))[kept].argmax())] for seed in range(4000)]
    counts = np.array([drawn.count(token) for token in kept])
    assert float(((counts - 4000 * wanted) ** 2 / (4000 * wanted)).sum()) < 21.1
    found = choose(row.repeat(16, 1).to(device), [ask._replace(seed=seed) for seed in range(16)])
    assert found.tokens == drawn[:16]
    assert set(found.tokens) == set(kept)


def test_min_p_keeps_to_the_share_of_the_best_alone(device: torch.device) -> None:
    """Chances of 1, 0.6, 0.5, 0.4 of the best's, in turn above and below the bound."""
    row = torch.tensor([0.4, 1.0, 0.5, 0.6, 1e-9]).log()
    asks = [Ask(min_p=bound, seed=seed) for bound in (0.39, 0.41, 0.51, 1.0) for seed in range(4)]
    found = choose(row.repeat(len(asks), 1).to(device), asks)
    for ask, token in zip(asks, found.tokens, strict=True):
        kept = [t for t in range(5) if float(row[t].exp()) >= ask.min_p]
        assert token == kept[int((row.numpy() + noise(ask.seed, 5, 5))[kept].argmax())]


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_of_a_row_of_equal_logits_the_first_k_are_kept(
    value: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ties than the list takes."""
    monkeypatch.setattr(token_filters, "LISTED", 64)
    logits = torch.full((3, 300), value, device=device)
    logits[2, ::2] = -0.0 if value == 0 else float("-inf")
    found = choose(logits, [Ask(top_k=7), Ask(top_p=0.5), Ask(top_k=40, top_p=0.25)])
    first = range(10) if value == 0 else range(1, 20, 2)
    kept = [set(range(7)), set(range(150)), set(first)]
    assert [device_kept(logits[row] + 0.0, found.cuts[row]) for row in range(3)] == kept
    assert all(token in tokens for token, tokens in zip(found.tokens, kept, strict=True))


def test_the_course_of_programs_and_their_number_change_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (torch.randn(3, 500, generator=torch.Generator().manual_seed(9)) * 2).to(device)
    asks = [Ask(top_k=30, top_p=0.9), Ask(top_p=0.8), Ask(top_k=4)]
    expected = choose(logits, asks)
    monkeypatch.setattr(token_filters, "PROGRAMS", 3)
    assert choose(logits, asks) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_told_of_a_filtering_row_too(bad: float, device: torch.device) -> None:
    logits = torch.full((2, 150), float("-inf"), device=device)
    logits[0, 5] = bad
    logits[1, 6] = 1.0
    found = choose(logits, [Ask(top_k=3, top_p=0.5), Ask(top_k=3, top_p=0.5)])
    assert found.ring == [-1, 6]
    assert 0 <= found.tokens[0] < 150


@pytest.mark.parametrize("rows", [1, 32, 128])
def test_rows_as_long_as_real_vocabularies_keep_what_the_host_keeps(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat rows and steep ones. Rounding may move the end of top-p by tokens of no more than 3e-6 in all."""
    if device.type != "cuda":
        pytest.skip("minutes in the interpreter")
    monkeypatch.setattr(token_filters, "BLOCK", 1024)
    generator = torch.Generator().manual_seed(rows)
    for kind in (torch.float32, torch.bfloat16):
        for name, ask in KEPT.items():
            logits = torch.randn(rows, 151_936, generator=generator) * torch.linspace(1, 4, rows)[:, None]
            logits = logits.to(device, kind)
            asks = [ask._replace(seed=seed) for seed in range(rows)]
            found = choose(logits, asks)
            assert choose(logits, asks) == found, name
            for row in range(0, rows, 64):
                expected = host_kept(logits[row], ask)
                moved = sorted(expected ^ device_kept(logits[row], found.cuts[row]))
                chances = (logits[row].double().cpu() / ask.heat).softmax(-1)
                assert float(chances[moved].sum()) < (3e-6 if ask.top_p < 1 else 1e-30), name
                assert found.tokens[row] in expected or found.tokens[row] in moved, name
