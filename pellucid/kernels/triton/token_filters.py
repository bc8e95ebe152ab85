# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Min-p, top-k and top-p on the device: what is kept of a row, and the best token of it. Called by `head` and decoders.

What is kept is what `runner.sampler` keeps, in its order; of equal logits the lower token id counts as the likelier
one. No row is sorted: a token's bin, by its depth below the row's best, leaves few that the cut may fall among.

    bins     programs of a row   count and mass of each bin                                  [0 | 1 | 2 ... BINS)
             the last of them    the bin of the k-th token, and those where top-p may end
    choose   programs of a row   the best token of the bins above; a list of the tokens in those bins
             the last of them    the cut, by bisection of the list, and the best token of all

Masses are integers, so that sums do not depend on the order in which programs add to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import wait_for_input
from pellucid.kernels.triton.sampling import SlotSampling, filters, gumbel

BINS = 2048
"""By depth, the nats below the row's best token: 256 bins to each doubling of 1 + depth, 255 nats in all."""

LISTED = 4096
"""Tokens of the bins of a cut that are listed; of more, which are ties, the whole row is read again and again."""

BLOCK = 1024
PROGRAMS = 512
"""Of all rows together: a few for each multiprocessor."""

_ONE = tl.constexpr(float(1 << 40))
"""Mass of the best token. Those of a vocabulary of 2^22 add up to less than 2^63."""
_LOWEST, _HIGHEST = tl.constexpr(-(1 << 62)), tl.constexpr((1 << 62) - 1)
_LAST_ID = tl.constexpr((1 << 31) - 1)


class FilterSpace(NamedTuple):
    """What the programs of a row tell each other: all zeros before a step and after it, but for `words` and `kept_*`.

    `words`: the first and last bin that top-p may cut, the bin that top-k cuts, the tokens it keeps there, the mass
    above that bin and above the first, the best logit's bits, and at last the key of the last token kept.
    """

    masses: torch.Tensor  # int64 [rows, BINS]
    counts: torch.Tensor  # int32 [rows, BINS]
    words: torch.Tensor  # int64 [rows, 8]
    arrived: torch.Tensor  # int32 [rows]
    length: torch.Tensor  # int32 [rows]
    listed: torch.Tensor  # int32 [rows, LISTED]
    kept_value: torch.Tensor  # fp32 [rows, programs]
    kept_token: torch.Tensor  # int32 [rows, programs]

    @classmethod
    def of(cls, rows: int, vocab: int, zeros: Callable[..., torch.Tensor]) -> FilterSpace:
        """Made by `zeros(name, *shape, dtype=)`."""
        programs, _ = filter_grid(rows, vocab)
        return cls(
            zeros("filter_masses", rows, BINS, dtype=torch.int64),
            zeros("filter_counts", rows, BINS, dtype=torch.int32),
            zeros("filter_words", rows, 8, dtype=torch.int64),
            zeros("filter_arrived", rows, dtype=torch.int32),
            zeros("filter_length", rows, dtype=torch.int32),
            zeros("filter_listed", rows, LISTED, dtype=torch.int32),
            zeros("filter_kept_value", rows, programs, dtype=torch.float32),
            zeros("filter_kept_token", rows, programs, dtype=torch.int32),
        )


def filter_grid(rows: int, vocab: int) -> tuple[int, int]:
    """Programs that share a row, and the tokens of each."""
    programs = max(1, min(triton.cdiv(vocab, BLOCK), PROGRAMS // rows))
    span = triton.cdiv(triton.cdiv(vocab, programs), BLOCK) * BLOCK
    return triton.cdiv(vocab, span), span


SPACE = ("words", "arrived", "length", "listed", "kept_value", "kept_token")
"""Fields of `FilterSpace` that `filter_and_choose` needs."""


@triton.jit
def _bin(depth_plus_1, BINS: tl.constexpr):
    """256 bins to each exponent: the upper bits of the number."""
    return tl.minimum((depth_plus_1.to(tl.int32, bitcast=True) - 0x3F800000) >> 15, BINS - 1)


@triton.jit
def _weigh(values, best, heat, least, BINS: tl.constexpr):
    """(bin, mass, whether min-p `least` lets it pass) of each logit. Bins go down with the logits."""
    below, scale = tl.maximum(best - values, 0.0), 1.0 / heat
    weight = tl.exp(-(below * scale))
    # Fused by name, not as the compiler likes: two kernels must find the same bin.
    return _bin(tl.fma(below, scale, 1.0), BINS), (weight * _ONE).to(tl.int64), weight >= least


@triton.jit
def _weigh_tile(logits, start, stop, best, heat, least, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """(bin, mass, logit, whether it passes) of a row's tokens from `start`, as far as `stop`."""
    token = start + tl.arange(0, BLOCK)
    values = tl.load(logits + token, mask=token < stop, other=float("-inf")).to(tl.float32)
    place, mass, passes = _weigh(values, best, heat, least, BINS)
    return place, mass, values, passes & (token < stop)


@triton.jit
def _share(p, mass):
    """The least integer that is `p` of `mass` or more."""
    part = p.to(tl.float64) * mass.to(tl.float64)
    whole = part.to(tl.int64)
    return tl.minimum(tl.where(whole.to(tl.float64) < part, whole + 1, whole), mass)


@triton.jit
def _keys(values, token):
    """One int64 a token, in order of logits, and of equal logits the lower id above the higher. Logits are not NaN."""
    values = tl.where(values == 0, 0.0, values)  # -0.0 too
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 31) | (token ^ _LAST_ID).to(tl.int64)


@triton.jit
def _sampling_bins_kernel(
    logits, logits_stride, vocab, row_best, columns, row_slots, temperature, top_k, top_p, min_p,
    masses, counts, words, arrived, span,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_input(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(row_slots + row)
    heat = tl.load(temperature + slot)
    if filters(slot, True, heat, top_k, top_p, min_p):
        k, p, least = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
        bests = tl.full([WIDTH], float("-inf"), tl.float32)
        for start in range(0, columns, WIDTH):
            i = start + tl.arange(0, WIDTH)
            found = tl.load(row_best + row * columns + i, mask=i < columns, other=float("-inf"))
            bests = tl.maximum(bests, found)
        best = tl.max(bests, 0)
        logits += row * logits_stride
        masses += row * BINS
        counts += row * BINS
        # Of logits that are not finite nothing is kept: `finish_step` says so.
        start = part * span
        stop = tl.where(tl.abs(best) < float("inf"), tl.minimum(start + span, vocab), start)
        # Below this depth the whole vocabulary has not the mass that top-p leaves out.
        reach = _bin(1.0 + tl.log(vocab / tl.maximum(1.0 - p, 1e-9)), BINS) + 1
        if k > 0:
            # What is not among the best k of this part is not among those of the row: atomics are for few tokens.
            count = tl.zeros([BINS // 16], tl.int32)
            for first in range(start, stop, BLOCK):
                place, _, _, passes = _weigh_tile(logits, first, stop, best, heat, least, BLOCK, BINS)
                count += tl.histogram(place // 16, BINS // 16, mask=passes)
            reach = tl.sum((tl.cumsum(count, 0) < k).to(tl.int32), 0) * 16 + 15
        rest = tl.full([], 0, tl.int64)
        for first in range(start, stop, BLOCK):
            place, mass, _, passes = _weigh_tile(logits, first, stop, best, heat, least, BLOCK, BINS)
            near = passes & (place <= reach)
            if k > 0:
                tl.atomic_add(counts + place, 1, mask=near, sem="relaxed")
            if p < 1:
                tl.atomic_add(masses + place, mass, mask=near & (mass > 0), sem="relaxed")
            if k == 0:
                rest += tl.sum(tl.where(passes & (near == 0), mass, 0), 0)
        if rest > 0:
            tl.atomic_add(masses + BINS - 1, rest, sem="relaxed")

        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
            tl.store(arrived + row, 0)
            i = tl.arange(0, BINS)
            # Past L1: atomics are made in the L2.
            count = tl.load(counts + i, cache_modifier=".cg")
            mass = tl.load(masses + i, cache_modifier=".cg")
            tl.store(counts + i, tl.zeros([BINS], tl.int32))
            tl.store(masses + i, tl.zeros([BINS], tl.int64))
            edge, left = tl.full([], BINS, tl.int32), k
            if k > 0:
                edge = tl.sum((tl.cumsum(count, 0) < k).to(tl.int32), 0)
                left = k - tl.sum(tl.where(i < edge, count, 0), 0)
            first, last = edge, edge
            above_edge = tl.sum(tl.where(i < edge, mass, 0), 0)
            above_first = above_edge
            if p < 1:
                # What top-p is a share of is between these two, and known when the k-th token is.
                through_edge = tl.sum(tl.where(i <= edge, mass, 0), 0)
                through = tl.cumsum(mass, 0)
                first = tl.sum((through < _share(p, above_edge)).to(tl.int32), 0)
                last = tl.sum((through < _share(p, through_edge)).to(tl.int32), 0)
                above_first = tl.sum(tl.where(i < first, mass, 0), 0)
            words += row * 8
            tl.store(words, first)
            tl.store(words + 1, last)
            tl.store(words + 2, edge)
            tl.store(words + 3, left)
            tl.store(words + 4, above_edge)
            tl.store(words + 5, above_first)
            tl.store(words + 6, best.to(tl.int32, bitcast=True))


def sampling_bins(
    logits: torch.Tensor,
    row_best: torch.Tensor,
    row_slots: torch.Tensor,
    sampling: SlotSampling,
    space: FilterSpace,
    pdl: bool = False,
) -> None:
    """The first half of what filtering rows need; the second is in `head.finish_step`. Other rows leave at once.

    logits [rows, vocab] of any float dtype, and the best of their parts `row_best` fp32 [rows, parts], as `small_head`
    and `partial_best` leave them for such rows; row_slots int32 [rows].
    """
    rows, vocab = logits.shape
    programs, span = filter_grid(rows, vocab)
    _sampling_bins_kernel[(rows, programs)](
        logits, logits.stride(0), vocab, row_best, row_best.shape[1], row_slots, sampling.temperature, sampling.top_k,
        sampling.top_p, sampling.min_p, space.masses, space.counts, space.words, space.arrived, span,
        WIDTH=min(4096, triton.next_power_of_2(row_best.shape[1])), BLOCK=BLOCK, BINS=BINS, PDL=pdl,
        # Without a limit the compiler stops at 64 registers, and spills on some devices.
        num_warps=8, maxnreg=128, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _better(value, token, tokens, values, kept, heat, seed, position):
    """The better of a token with noise `value`, and of those `kept` among `tokens`; of equal ones the lower id."""
    noisy = tl.where(kept, values / heat + gumbel(seed, position, tokens), float("-inf"))
    top = tl.max(noisy, 0)
    first = tl.min(tl.where(noisy == top, tokens, _LAST_ID), 0)
    better = (top > value) | ((top == value) & (first < token))
    return tl.where(better, top, value), tl.where(better, first, token)


@triton.jit
def _listed_tile(start, count, whole, listed, logits, best, heat, least, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """(token, logit, key, bin, mass, whether it is there) of a tile of the list, or of the `whole` row instead."""
    i = start + tl.arange(0, BLOCK)
    token = tl.where(whole, i, tl.load(listed + i, mask=(i < count) & (whole == 0), other=0))
    values = tl.load(logits + token, mask=i < count, other=float("-inf")).to(tl.float32)
    place, mass, passes = _weigh(values, best, heat, least, BINS)
    return token, values, _keys(values, token), place, mass, passes & (i < count)


@triton.jit
def _lowest_kept(
    need, BY_MASS: tl.constexpr, first, last, count, whole, listed, logits, best, heat, least,
    BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The highest key that tokens of `need`, mass or number, are at or above, in bins first..last."""
    lower = tl.full([], _LOWEST, tl.int64)
    upper = tl.full([], _HIGHEST, tl.int64)
    while upper - lower > 1:
        # Both ends move to a token: about as many rounds as its place in the list has binary digits.
        middle = lower + ((upper - lower) >> 1)
        total = tl.full([], 0, tl.int64)
        above = tl.full([], _HIGHEST, tl.int64)
        below = tl.full([], _LOWEST, tl.int64)
        for start in range(0, count, BLOCK):
            _, _, key, place, mass, there = _listed_tile(
                start, count, whole, listed, logits, best, heat, least, BLOCK, BINS
            )
            there = there & (place >= first) & (place <= last)
            high = there & (key >= middle)
            amount = mass if BY_MASS else tl.full([BLOCK], 1, tl.int64)
            total += tl.sum(tl.where(high, amount, 0), 0)
            above = tl.minimum(above, tl.min(tl.where(high, key, _HIGHEST), 0))
            below = tl.maximum(below, tl.max(tl.where(there & (key < middle), key, _LOWEST), 0))
        enough = total >= need
        lower = tl.where(enough, above, lower)
        upper = tl.where(enough, upper, below + 1)
    return lower


@triton.jit
def filter_and_choose(
    logits, vocab, row, slot, best, position, temperature, seed, top_p, min_p,
    words, arrived, length, listed, kept_value, kept_token, span,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """(value, token, whether this is the last program of the row, which alone knows them). `best` is finite."""
    part = tl.program_id(1)
    heat, seed = tl.load(temperature + slot), tl.load(seed + slot)
    p, least = tl.load(top_p + slot), tl.load(min_p + slot)
    words += row * 8
    first, last, edge = tl.load(words), tl.load(words + 1), tl.load(words + 2)
    length += row
    listed += row * LISTED
    value = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], _LAST_ID, tl.int32)
    stop = tl.minimum((part + 1) * span, vocab)
    for start in range(part * span, stop, BLOCK):
        place, _, values, passes = _weigh_tile(logits, start, stop, best, heat, least, BLOCK, BINS)
        token = start + tl.arange(0, BLOCK)
        sure = passes & (place < first)
        if tl.max(sure.to(tl.int32), 0) > 0:
            value, chosen = _better(value, chosen, token, values, sure, heat, seed, position)
        at_cut = (passes & (((place >= first) & (place <= last)) | (place == edge))).to(tl.int32)
        found = tl.sum(at_cut, 0)
        if found > 0:
            at = tl.atomic_add(length, found, sem="relaxed") + tl.cumsum(at_cut, 0) - 1
            tl.store(listed + at, token, mask=(at_cut > 0) & (at < LISTED))
    tl.store(kept_value + row * tl.num_programs(1) + part, value)
    tl.store(kept_token + row * tl.num_programs(1) + part, chosen)

    tl.debug_barrier()
    done = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1
    if done:
        count = tl.load(length, cache_modifier=".cg")
        tl.store(arrived + row, 0)
        tl.store(length, 0)
        whole = count > LISTED
        count = tl.where(whole, vocab, count)
        cut = tl.full([], _LOWEST, tl.int64)
        mass_kept = tl.load(words + 4)
        if edge < BINS:
            left = tl.load(words + 3)
            cut = _lowest_kept(left, False, edge, edge, count, whole, listed, logits, best, heat, least, BLOCK, BINS)
            for start in range(0, count, BLOCK):
                _, _, key, place, mass, there = _listed_tile(
                    start, count, whole, listed, logits, best, heat, least, BLOCK, BINS
                )
                mass_kept += tl.sum(tl.where(there & (place == edge) & (key >= cut), mass, 0), 0)
        if p < 1:
            need = _share(p, mass_kept) - tl.load(words + 5)
            cut = _lowest_kept(need, True, first, last, count, whole, listed, logits, best, heat, least, BLOCK, BINS)
        tl.store(words + 7, cut)

        parts = tl.arange(0, PARTS)
        real = parts < tl.num_programs(1)
        parts += row * tl.num_programs(1)
        bests = tl.load(kept_value + parts, mask=real, other=float("-inf"), cache_modifier=".cg")
        tokens = tl.load(kept_token + parts, mask=real, other=_LAST_ID, cache_modifier=".cg")
        value = tl.max(bests, 0)
        chosen = tl.min(tl.where(bests == value, tokens, _LAST_ID), 0)
        for start in range(0, count, BLOCK):
            token, values, key, place, _, there = _listed_tile(
                start, count, whole, listed, logits, best, heat, least, BLOCK, BINS
            )
            kept = there & (key >= cut) & (place >= first)
            value, chosen = _better(value, chosen, token, values, kept, heat, seed, position)
    return value, chosen, done


def choice_arguments(
    logits: torch.Tensor | None, sampling: SlotSampling | None, space: FilterSpace | None
) -> tuple[int, dict[str, Any]]:
    """Programs a row, and arguments, of a kernel that calls `filter_and_choose`; without logits it never does."""
    if logits is None or sampling is None or space is None:
        names = ("logits", "temperature", "seed", "top_k", "top_p", "min_p", *SPACE)
        return 1, dict.fromkeys(names) | {
            "logits_stride": 0, "vocab": 0, "span": 0, "LISTED": LISTED, "BLOCK": BLOCK, "PARTS": 1, "BINS": BINS,
        }  # fmt: skip
    rows, vocab = logits.shape
    programs, span = filter_grid(rows, vocab)
    # As many for any number of rows: each is compiled apart.
    parts = triton.next_power_of_2(triton.cdiv(vocab, BLOCK))
    return programs, {
        "logits": logits, "logits_stride": logits.stride(0), "vocab": vocab, "span": span, **sampling._asdict(),
        **{name: getattr(space, name) for name in SPACE},
        "LISTED": LISTED, "BLOCK": BLOCK, "PARTS": parts, "BINS": BINS,
    }  # fmt: skip
