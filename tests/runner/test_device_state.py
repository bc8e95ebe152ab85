"""The device's copy of every sequence: what a step reads is true, and only what has changed is sent."""

from __future__ import annotations

import random

import pytest
import torch

from pellucid.core import SamplingParams
from pellucid.runner.device_state import STAGES, DeviceState
from pellucid.step_plan import UNKNOWN_TOKEN, ScheduledSequence

GREEDY, WARM = SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
SLOTS, PAGES = 4, 6


class WatchedState(DeviceState):
    """Counts the values that are sent, in `sent`, one entry a copy."""

    def __init__(self, slots: int = SLOTS, rows: int = SLOTS, pages: int = PAGES) -> None:
        self.sent: list[int] = []
        super().__init__(slots, rows, pages, torch.device("cpu"))

    def _send(self, delta) -> None:
        if delta.indices:
            assert len(set(delta.indices)) == len(delta.indices) == len(delta.values), "a scatter has no order"
            self.sent.append(len(delta.indices))
        super()._send(delta)

    def decode(self, *rows: ScheduledSequence, size: int | None = None, params: SamplingParams = GREEDY) -> int:
        """Prepare a step, check that it computes these rows, do what its kernels do, and return how much was sent."""
        size = size or len(rows)
        self.sent.clear()
        self.prepare(rows, size, [(params, 7)] * len(rows))
        slots = self.row_slots.tolist()
        for row, slot in zip(rows, slots, strict=False):
            assert slot == self.slot(row.request_id)
            assert int(self.positions[slot]) == row.start
            assert row.token_ids[0] in (UNKNOWN_TOKEN, int(self.tokens[slot]))
            assert tuple(self.page_table[slot, : len(row.pages)].tolist()) == row.pages
            self.sample(row.request_id, following(int(self.tokens[slot])), row.start + 1)
        assert slots[len(rows) : size] == [self.scratch_slot] * (size - len(rows))
        return sum(self.sent)

    def sample(self, name: str, token: int, position: int) -> None:
        """As a kernel does."""
        self.tokens[self.slot(name)], self.positions[self.slot(name)] = token, position


def following(token: int) -> int:
    """What the model says after `token`."""
    return (31 * token + 7) % 997


def row(name: str, start: int, token: int = UNKNOWN_TOKEN, pages: tuple[int, ...] = (1,)) -> ScheduledSequence:
    return ScheduledSequence(name, start, (token,), pages, sample=True, is_prefill=False)


def test_a_steady_step_sends_nothing_and_a_page_sends_itself() -> None:
    state = WatchedState()
    # Token, position, temperature and three filters, two halves of the seed, page, row.
    assert state.decode(row("a", 5, 9)) == 10
    assert state.decode(row("a", 6)) == 0
    assert state.decode(row("a", 7, pages=(1, 4))) == 1
    assert state.decode(row("a", 8, pages=(1, 4))) == 0


def test_a_token_that_the_host_knows_is_not_sent_where_the_device_has_it() -> None:
    state = WatchedState()
    state.decode(row("a", 5, 9))
    assert state.decode(row("a", 6, following(9))) == 0


def test_whoever_comes_or_goes_sends_its_own_rows_alone() -> None:
    state = WatchedState()
    state.decode(row("a", 5, 9), size=4)
    assert state.decode(row("a", 6), row("b", 3, 8, (2,)), size=4) == 10
    state.release("a")
    assert state.decode(row("b", 4, pages=(2,)), size=4) == 2, "its row, and one of padding"
    assert state.decode(row("b", 5, pages=(2,)), size=1) == 0, "a smaller bucket reads the same first row"
    assert state.decode(row("b", 6, pages=(2,)), row("c", 0, 4, (5,)), size=2) == 10


def test_a_slot_is_used_again_with_the_settings_of_its_new_owner() -> None:
    state = WatchedState(slots=1, rows=1)
    state.decode(row("a", 5, 9, (1, 2, 3)), params=WARM)
    slot = state.slot("a")
    settings = state.temperatures, state.top_k, state.top_p, state.min_p
    assert [float(one[slot]) for one in settings] == pytest.approx([0.7, 20, 0.9, 0.05])
    state.release("a")
    state.release("a")
    state.decode(row("b", 2, 1, (3,)))
    assert state.slot("b") == slot
    assert [float(one[slot]) for one in settings] == [0, 0, 1, 0]
    state.release("b")
    # By the same name as before: nothing of the first is taken for known.
    assert state.decode(row("a", 5, 9, (1, 2, 3)), params=WARM) == 11


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 5, 2**64 - 1, -3, 1_000_003 * 2**50])
def test_seeds_keep_64_bits(seed: int) -> None:
    state = DeviceState(SLOTS, SLOTS, PAGES, torch.device("cpu"))
    state.prepare([row("a", 0, 1)], 1, [(WARM, seed)])
    assert int(state.seeds[state.slot("a")]) & (2**64 - 1) == seed & (2**64 - 1)


def test_a_top_k_of_more_than_32_bits_is_as_large_as_they_hold() -> None:
    state = DeviceState(SLOTS, SLOTS, PAGES, torch.device("cpu"))
    state.prepare([row("a", 0, 1)], 1, [(SamplingParams(top_k=2**40), 7)])
    assert int(state.top_k[state.slot("a")]) == 2**31 - 1


def test_a_preempted_sequence_gets_its_new_pages_and_goes_on_from_its_recomputed_prompt() -> None:
    state = WatchedState()
    state.decode(row("a", 5, 9, (1, 2, 3)))
    state.sent.clear()
    again = ScheduledSequence("a", 0, (4, 4, 4, 4, 4, 9, following(9)), (4, 2), sample=True, is_prefill=True)
    slots = state.place_sampled([again], [(GREEDY, 7)])
    assert state.sent == [3], "its position and both pages"
    assert slots.tolist() == [state.slot("a")]
    assert int(state.positions[state.slot("a")]) == 6
    state.sample("a", 33, 7)
    assert state.decode(row("a", 7, pages=(4, 2))) == 0
    assert int(state.tokens[state.slot("a")]) == following(33)


def test_pages_that_only_look_alike_are_sent_whole() -> None:
    state = WatchedState()
    state.decode(row("a", 5, 9, (1, 2, 3)))
    assert state.decode(row("a", 6, pages=(1, 2))) == 2, "shorter"
    assert state.decode(row("a", 7, pages=(2, 1, 5))) == 3, "another first page"


def test_a_chunked_prompt_is_known_from_its_last_chunk_on() -> None:
    state = WatchedState()
    last = ScheduledSequence("a", 40, (3, 3), (1, 2, 3), sample=True, is_prefill=True)
    state.place_sampled([last], [(GREEDY, 7)])
    state.sample("a", 50, 42)
    assert state.decode(row("a", 42, pages=(1, 2, 3))) == 1, "its row"


def test_a_token_that_the_host_sampled_is_sent_again() -> None:
    state = WatchedState()
    state.decode(row("a", 5, 9), row("b", 2, 8, (2,)))
    state.forget_token("a")
    state.forget_token("nobody")
    assert state.decode(row("a", 6, 77), row("b", 3, pages=(2,))) == 2, "token and position of one"


def test_an_unknown_token_that_is_not_on_the_device_is_never_computed() -> None:
    state = WatchedState()
    with pytest.raises(AssertionError, match="neither here nor on the device"):
        state.decode(row("a", 5))
    state = WatchedState()
    state.decode(row("a", 5, 9))
    state.forget_token("a")
    with pytest.raises(AssertionError, match="neither here nor on the device"):
        state.decode(row("a", 6))


def test_more_than_a_staging_buffer_holds_is_sent_in_one_copy() -> None:
    slots, pages = 8, 700
    state = WatchedState(slots, slots, pages)
    rows = [row(f"r{i}", 1, 9, tuple(range(1 + i * pages, 1 + (i + 1) * pages))) for i in range(slots)]
    state.decode(*rows)
    assert state.sent == [slots * (9 + pages)]
    for _ in range(STAGES + 1):
        for one in rows:
            state.release(one.request_id)
        rows = [one._replace(pages=one.pages[::-1]) for one in rows]
        state.decode(*rows)


def test_any_course_of_sequences_leaves_the_device_with_the_truth() -> None:
    """Arrivals, ends, preemptions, growth and host sampling, in any bucket; the truth is kept beside it."""
    draw = random.Random(4)
    state = WatchedState()
    live: dict[str, tuple[int, int, tuple[int, ...]]] = {}  # position, newest token, pages
    by_host: set[str] = set()
    for step in range(300):
        if len(live) < SLOTS and draw.random() < 0.4:
            name, length, pages = f"r{step}", draw.randrange(1, 9), tuple(draw.sample(range(1, 50), 3))
            live[name] = (length, step, pages)
            if draw.random() < 0.5:
                prompt = ScheduledSequence(name, 0, (5,) * length, pages, sample=True, is_prefill=True)
                state.place_sampled([prompt], [(GREEDY, step)])
                state.sample(name, step, length)
            else:
                by_host.add(name)
        for name in [name for name in live if draw.random() < 0.15]:
            position, token, pages = live[name]
            what = draw.choice(["ends", "grows", "is preempted", "is sampled by the host"])
            if what == "ends":
                del live[name]
                by_host.discard(name)
                state.release(name)
            elif what == "grows" and len(pages) < PAGES:
                live[name] = (position, token, (*pages, draw.randrange(1, 50)))
            elif what == "is preempted":
                live[name] = (position + 1, step, tuple(draw.sample(range(1, 50), len(pages))))
                by_host.add(name)
            elif what == "is sampled by the host":
                live[name] = (position, step, pages)
                by_host.add(name)
                state.forget_token(name)
        names = draw.sample(list(live), len(live))
        rows = []
        for name in names:
            position, token, pages = live[name]
            rows.append(row(name, position, token if name in by_host else UNKNOWN_TOKEN, pages))
        if rows:
            state.decode(*rows, size=1 << (len(rows) - 1).bit_length())
        by_host.clear()
        live = {name: (position + 1, following(token), pages) for name, (position, token, pages) in live.items()}
        assert all(int(state.tokens[state.slot(name)]) == token for name, (_, token, _) in live.items())


def test_after_a_broken_launch_everything_is_sent_again() -> None:
    state = WatchedState()
    state.decode(row("a", 4, 7, (1,)), row("b", 9, 8, (2,)))
    for view in (state.row_slots, state.tokens, state.positions, state.page_table):
        view.fill_(-5)
    state.distrust()
    state.decode(row("a", 5, 70, (1,)), row("b", 10, 80, (2,)))
