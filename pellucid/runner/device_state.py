"""The state of every sequence on the device, and the deltas that keep it true. Owned by `runner.gpu_runner`.

A decode step reads its tokens, positions, page tables and sampling parameters here, and writes the next token and
position back: as long as nothing but that changes, the host sends nothing. All of it is one int32 buffer, so that
whatever did change is one copy and one scatter:

    [ seeds, 64 bits each | tokens | positions | temperatures | top-k | top-p | min-p | row slots | page table by row )
      2 x slots             slots     slots       slots          slots   slots   slots   rows        slots x pages

The last slot is the scratch slot: padded rows point to it, and its pages are all the scratch page 0.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from pellucid.core import SamplingParams
from pellucid.kernels.device import to_device
from pellucid.step_plan import UNKNOWN_TOKEN, ScheduledSequence

if TYPE_CHECKING:
    import torch

STAGES = 8
"""Pinned buffers in turn: a copy that the device has not made yet must not be overwritten. Up to three steps, of which
one is deserted, are not computed yet, and each sends twice at most."""


LEAST_TEMPERATURE = 1e-6
MAX_TOP_K = 2**31 - 1


@dataclass(slots=True)
class SlotMirror:
    """What the host knows of one slot. `next_position` is where the device's newest token of it belongs."""

    slot: int
    next_position: int = -1
    pages: tuple[int, ...] = ()


@dataclass(slots=True)
class _Delta:
    indices: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def put(self, start: int, values: Sequence[int]) -> None:
        self.indices.extend(range(start, start + len(values)))
        self.values.extend(values)


class DeviceState:
    """State for `max_num_seqs` sequences of at most `max_pages` pages. Views into one buffer are its attributes.

    `tokens`, `positions` int32 [slots + 1]: the token each sequence computes next, and where. By slot, as in
    `SamplingParams`: `temperatures` fp32 (0 is greedy), `seeds` int64, `top_k` int32, `top_p` and `min_p` fp32;
    `row_slots` int32 [rows] for the rows of the step; `page_table` int32 [slots + 1, max_pages].
    """

    def __init__(self, max_num_seqs: int, max_rows: int, max_pages: int, device: torch.device) -> None:
        import torch

        slots = max_num_seqs + 1
        self.scratch_slot, self._device = max_num_seqs, device
        sizes = {
            "seeds": 2 * slots, "tokens": slots, "positions": slots, "temperatures": slots, "top_k": slots,
            "top_p": slots, "min_p": slots, "row_slots": max_rows, "page_table": slots * max_pages,
        }  # fmt: skip
        starts = list(accumulate(sizes.values(), initial=0))
        self._start = dict(zip(sizes, starts, strict=False))
        self._buffer = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        views = {name: self._buffer[start : start + sizes[name]] for name, start in self._start.items()}
        self.tokens, self.positions, self.row_slots = views["tokens"], views["positions"], views["row_slots"]
        self.temperatures, self.top_p, self.min_p = (
            views[name].view(torch.float32) for name in ("temperatures", "top_p", "min_p")
        )
        self.top_k = views["top_k"]
        self.seeds = views["seeds"].view(torch.int64)
        self.page_table = views["page_table"].view(slots, max_pages)
        self.row_slots.fill_(self.scratch_slot)
        self._max_pages = max_pages
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._mirrors: dict[str, SlotMirror] = {}
        self._rows: list[int] = [self.scratch_slot] * max_rows
        self._staging = [self._new_staging(4096) for _ in range(STAGES)]
        self._stage = 0

    def slot(self, request_id: str) -> int:
        return self._mirrors[request_id].slot

    def release(self, request_id: str) -> None:
        """Forget a sequence. A step in flight may still compute it: deltas come after that step in stream order."""
        mirror = self._mirrors.pop(request_id, None)
        if mirror is not None:
            self._free.append(mirror.slot)

    def prepare(
        self, decode: Sequence[ScheduledSequence], rows: int, settings: Sequence[tuple[SamplingParams, int]]
    ) -> None:
        """Make the device's state that of `decode`, one token each, in a step of `rows` rows, padded.

        `settings`: sampling parameters and seed of each. Only what differs is sent.
        """
        delta = _Delta()
        slots = [self._update(row, *one, delta) for row, one in zip(decode, settings, strict=True)]
        self._place(slots, rows, delta)
        self._send(delta)

    def place_sampled(
        self, prefilled: Sequence[ScheduledSequence], settings: Sequence[tuple[SamplingParams, int]]
    ) -> torch.Tensor:
        """The slots, int32 [rows] on the device, of sequences whose prompts end with this step.

        Each is given the position of its last prompt token: sampling moves it on by one.
        """
        import torch

        delta = _Delta()
        slots = []
        for row, (params, seed) in zip(prefilled, settings, strict=True):
            mirror = self._mirror(row.request_id, params, seed, delta)
            end = row.start + len(row.token_ids)
            delta.put(self._start["positions"] + mirror.slot, [end - 1])
            mirror.next_position = end
            self._pages(mirror, row.pages, delta)
            slots.append(mirror.slot)
        self._send(delta)
        return to_device(slots, torch.int32, self._device)

    def forget_token(self, request_id: str) -> None:
        """The token that the host has sampled is not on the device: it is sent with the next step."""
        if request_id in self._mirrors:
            self._mirrors[request_id].next_position = -1

    def distrust(self) -> None:
        """Take nothing that was sent for granted, after a launch that was broken off: all is sent again when needed."""
        self._rows = [-1] * len(self._rows)
        for mirror in self._mirrors.values():
            mirror.next_position, mirror.pages = -1, ()

    def kept(self) -> Callable[[], None]:
        """Restores what the device has now, by a launch; the host's side of it stays as it is."""
        saved = self._buffer.clone()

        def restore() -> None:
            self._buffer.copy_(saved)

        return restore

    def _update(self, row: ScheduledSequence, params: SamplingParams, seed: int, delta: _Delta) -> int:
        mirror = self._mirror(row.request_id, params, seed, delta)
        (token,) = row.token_ids
        if mirror.next_position != row.start:
            assert token != UNKNOWN_TOKEN, f"{row.request_id}: its newest token is neither here nor on the device"
            delta.put(self._start["tokens"] + mirror.slot, [token])
            delta.put(self._start["positions"] + mirror.slot, [row.start])
        mirror.next_position = row.start + 1
        self._pages(mirror, row.pages, delta)
        return mirror.slot

    def _mirror(self, request_id: str, params: SamplingParams, seed: int, delta: _Delta) -> SlotMirror:
        mirror = self._mirrors.get(request_id)
        if mirror is None:
            mirror = self._mirrors[request_id] = SlotMirror(self._free.pop())
            # Below, logits over temperature would leave fp32's range, and the choice is greedy anyhow.
            temperature = params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0
            fields = {"temperatures": temperature, "top_p": params.top_p, "min_p": params.min_p}
            for name, value in fields.items():
                delta.put(self._start[name] + mirror.slot, struct.unpack("=i", struct.pack("=f", value)))
            # More than any vocabulary has is all of it, and may be more than 32 bits hold.
            delta.put(self._start["top_k"] + mirror.slot, [min(params.top_k, MAX_TOP_K)])
            halves = struct.unpack("=2i", struct.pack("=Q", seed & (1 << 64) - 1))
            delta.put(self._start["seeds"] + 2 * mirror.slot, halves)
        return mirror

    def _pages(self, mirror: SlotMirror, pages: tuple[int, ...], delta: _Delta) -> None:
        known = len(mirror.pages)
        if pages is mirror.pages or pages == mirror.pages:
            return
        same = known if pages[:known] == mirror.pages else 0
        start = self._start["page_table"] + mirror.slot * self._max_pages + same
        delta.put(start, pages[same:])
        mirror.pages = pages

    def _place(self, slots: list[int], rows: int, delta: _Delta) -> None:
        """Row r computes slot `slots[r]`; the rest of the first `rows` rows are padded."""
        wanted = slots + [self.scratch_slot] * (rows - len(slots))
        for row, (now, then) in enumerate(zip(wanted, self._rows, strict=False)):
            if now != then:
                delta.put(self._start["row_slots"] + row, [now])
        self._rows[:rows] = wanted

    def _send(self, delta: _Delta) -> None:
        """One copy of indices and values, one scatter; nothing when nothing changed."""
        import torch

        count = len(delta.indices)
        if not count:
            return
        self._stage = (self._stage + 1) % STAGES
        if len(self._staging[self._stage]) < 2 * count:
            self._staging[self._stage] = self._new_staging(4 * count)
        filled = self._staging[self._stage][: 2 * count]
        filled.numpy()[:] = delta.indices + delta.values
        moved = filled.to(self._device, non_blocking=True)
        self._buffer.scatter_(0, moved[:count].to(torch.int64), moved[count:])

    def _new_staging(self, width: int) -> torch.Tensor:
        import torch

        return torch.empty(width, dtype=torch.int32, pin_memory=self._device.type == "cuda")
