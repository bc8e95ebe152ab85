"""Random workloads on a simulated model that reads its context only through the page tables of the plans.

Every request must produce what it produces alone. A page that is freed early, shared wrongly or not yet written
changes the context that is read, and with it every later token.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import Request, SamplingParams
from pellucid.scheduler.scheduler import Scheduler, SchedulerConfig
from pellucid.step_plan import SequenceUpdate, StepPlan

VOCAB = 13


def kv_of(salt: str, token_id: int, digest: int) -> int:
    """The "KV" of one position. As in a real model it depends on the whole prefix, and here on the salt."""
    return hash((zlib.crc32(salt.encode()), token_id, digest))


class SimulatedModel:
    """A KV pool by (page, offset). The next token is a hash of everything that the row can read."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool: dict[tuple[int, int], int] = {}

    def run(self, plan: StepPlan, requests: dict[str, Request]) -> dict[str, int]:
        written: dict[tuple[int, int], int] = {}
        sampled = {}
        for row in plan.scheduled:
            slots = [
                (row.pages[position // self.page_size], position % self.page_size)
                for position in range(row.start + len(row.token_ids))
            ]
            digest = 0
            for slot in slots[: row.start]:
                digest = hash((digest, self.pool[slot]))
            for slot, token_id in zip(slots[row.start :], row.token_ids, strict=True):
                assert slot[0] != 0, "a real row writes to the scratch page"
                assert slot not in written, "two rows write to one slot"
                written[slot] = kv_of(requests[row.request_id].cache_salt, token_id, digest)
                digest = hash((digest, written[slot]))
            if row.sample:
                sampled[row.request_id] = digest % VOCAB
        # Rows of a step run side by side, so what one writes is there for the others from the next step on.
        self.pool.update(written)
        return sampled


def run_alone(request: Request, limit: int) -> tuple[list[int], str]:
    """The output and finish reason of `request`, with no pages and no scheduler."""
    outputs: list[int] = []
    params, digest = request.params, 0
    room = limit - len(request.prompt_token_ids) if params.max_tokens is None else params.max_tokens
    for token_id in request.prompt_token_ids:
        digest = hash((digest, kv_of(request.cache_salt, token_id, digest)))
    while len(outputs) < room:
        token_id = digest % VOCAB
        outputs.append(token_id)
        ends = token_id in params.stop_token_ids or (token_id in request.eos_token_ids and not params.ignore_eos)
        if ends and len(outputs) >= params.min_tokens:
            return outputs, "stop"
        digest = hash((digest, kv_of(request.cache_salt, token_id, digest)))
    return outputs, "length"


@dataclass(frozen=True)
class Action:
    """At `step`, between plan and commit or after it: end the `index`-th live request, or reset the prefix cache."""

    step: int
    in_flight: bool
    kind: str
    index: int = 0


@dataclass
class Workload:
    config: SchedulerConfig
    arrivals: list[tuple[int, Request]]
    actions: list[Action] = field(default_factory=list)


class Run:
    """Runs a workload to its end and checks every promise in every step."""

    def __init__(self, workload: Workload) -> None:
        self.config = workload.config
        self.workload = workload
        self.scheduler = Scheduler(workload.config)
        self.model = SimulatedModel(workload.config.page_size)
        self.requests = {request.request_id: request for _, request in workload.arrivals}
        self.live: list[str] = []  # in order of arrival
        self.dying: set[str] = set()  # ended since the plan in flight was made
        self.outputs: dict[str, list[int]] = {name: [] for name in self.requests}
        self.finished: dict[str, str] = {}
        self.decoding: set[str] = set()  # got a token in the last step, so must be in the next
        self.computed: dict[str, int] = {}  # next position of each request, as its rows tell
        self.events: Counter[str] = Counter()

    def run(self) -> Run:
        limit = min(self.config.max_model_len, self.config.pool_tokens)
        self.limit = limit
        # The oldest computes a token in each step and never loses one, so this many steps are always enough.
        work = sum(
            limit if request.params.max_tokens is None else len(request.prompt_token_ids) + request.params.max_tokens
            for request in self.requests.values()
        )
        last = max(step for step, _ in self.workload.arrivals)
        for step in range(last + work + 1):
            for _, request in (arrival for arrival in self.workload.arrivals if arrival[0] == step):
                self.scheduler.add_request(request)
                self.live.append(request.request_id)
            self.step(step)
            if step >= last and not self.live:
                break
        self.check_end()
        return self

    def step(self, step: int) -> None:
        plan = self.scheduler.plan_step()
        assert (plan is None) == (not self.live)
        if plan is not None:
            self.check_plan(plan)
        self.check_conservation()
        self.act(step, in_flight=True)
        if plan is not None:
            sampled = self.model.run(plan, self.requests)
            self.check_updates(plan, sampled, self.scheduler.commit(plan, sampled))
        self.act(step, in_flight=False)

    def act(self, step: int, in_flight: bool) -> None:
        for action in self.workload.actions:
            if (action.step, action.in_flight) != (step, in_flight):
                continue
            if action.kind == "reset":
                self.scheduler.reset_prefix_cache()
            elif self.live:
                self.end(self.live[action.index % len(self.live)], action.kind, in_flight)
            self.check_conservation()

    def end(self, name: str, kind: str, in_flight: bool) -> None:
        if kind == "abort":
            assert self.scheduler.abort(name)
        else:
            update = self.scheduler.finish(name, "END")
            assert update is not None
            assert update[:4] == (name, None, "stop", "END")
        assert not self.scheduler.abort(name)
        assert self.scheduler.finish(name, "END") is None
        self.live.remove(name)
        self.decoding.discard(name)
        self.finished[name] = kind
        if in_flight:
            self.dying.add(name)
        self.events["ended from outside"] += 1

    def check_plan(self, plan: StepPlan) -> None:
        names = [row.request_id for row in plan.scheduled]
        assert len(set(names)) == len(names) <= self.config.max_num_seqs
        assert set(names) <= set(self.live)
        assert len(names) == self.scheduler.stats().running, "every running request advances in every step"
        assert self.live[0] in names, "the oldest request must advance in every step"
        assert self.live[0] not in plan.preempted
        assert self.decoding <= {*names[: plan.num_decode], *plan.preempted}, "a decode row was left out"
        assert [row.is_prefill for row in plan.scheduled] == [i >= plan.num_decode for i in range(len(names))]
        assert plan.num_tokens == sum(len(row.token_ids) for row in plan.scheduled)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        for name in plan.preempted:
            assert name not in names
            self.computed.pop(name, None)
        self.events["preempted"] += len(plan.preempted)
        for row in plan.scheduled:
            self.check_row(row.request_id, row.start, row.token_ids, len(row.pages))
            assert row.is_prefill or len(row.token_ids) == 1
            assert row.is_prefill or row.start >= len(self.requests[row.request_id].prompt_token_ids)

    def check_row(self, name: str, start: int, token_ids: tuple[int, ...], num_pages: int) -> None:
        request = self.requests[name]
        known = (*request.prompt_token_ids, *self.outputs[name])
        end = start + len(token_ids)
        assert token_ids == known[start:end]
        assert len(token_ids) > 0
        assert end <= num_pages * self.config.page_size
        if name in self.computed:
            assert start == self.computed[name], "rows of a request must follow each other"
            assert len(token_ids) <= (self.config.prefill_chunk_tokens or end)
        else:
            reads = not request.capture_hidden and request.params.prompt_logprobs is None
            assert start == 0 or (reads and self.config.enable_prefix_caching and start % self.config.page_size == 0)
            self.events["cached tokens"] += start
        self.computed[name] = end

    def check_updates(self, plan: StepPlan, sampled: dict[str, int], updates: tuple[SequenceUpdate, ...]) -> None:
        self.decoding.clear()
        assert len({update.request_id for update in updates}) == len(updates)
        for update in updates:
            name = update.request_id
            assert name not in self.dying
            if update.token_id is not None:
                assert update.token_id == sampled[name]
                self.outputs[name].append(update.token_id)
                self.decoding.add(name)
            if update.finish_reason is not None:
                self.finished[name] = update.finish_reason
                self.live.remove(name)
                self.decoding.discard(name)
        told = {update.request_id for update in updates}
        assert all(row.request_id in told for row in plan.scheduled if row.sample and row.request_id not in self.dying)
        self.dying.clear()
        self.check_conservation()

    def check_conservation(self) -> None:
        self.scheduler.check_conservation()
        stats = self.scheduler.stats()
        assert stats.free_pages + stats.cached_pages + stats.held_pages == stats.total_pages
        assert stats.running + stats.waiting == len(self.live)
        assert stats.preemptions == self.events["preempted"]

    def check_end(self) -> None:
        assert self.live == [], "starved"
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.held_pages) == (0, 0, 0)
        if not self.config.enable_prefix_caching:
            assert stats.cached_pages == 0
        self.scheduler.reset_prefix_cache()
        assert self.scheduler.stats().free_pages == self.config.num_pages
        for name, request in self.requests.items():
            outputs, reason = run_alone(request, self.limit)
            if self.finished[name] in ("abort", "stop string"):
                assert self.outputs[name] == outputs[: len(self.outputs[name])]
            else:
                assert (self.outputs[name], self.finished[name]) == (outputs, reason)


def draw_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.randint(1, 6)
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 5, 40)),
        max_model_len=rng.randint(20, 60),
        num_pages=rng.randint(12, 40),
        page_size=rng.choice((1, 2, 4)),
        prefill_chunk_tokens=rng.choice((None, 1, 3, 8)),
        enable_prefix_caching=rng.random() < 0.75,
        namespace=rng.choice(("", "model")),
        force_preempt_every=rng.choice((None, None, 1, 2, 3, 7)),
    )


def draw_request(rng: random.Random, name: str, limit: int, stems: list[tuple[int, ...]]) -> Request:
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(0, len(stem))] + tuple(rng.choices(range(VOCAB), k=rng.randint(1, 6)))
    prompt = prompt[: limit - 1]
    room = limit - len(prompt)
    max_tokens = rng.choice((None, rng.randint(0, room), rng.randint(0, min(room, 8))))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(4, room if max_tokens is None else max_tokens)),
        stop_token_ids=rng.choice(((), (3,), (4, 5))),
        ignore_eos=rng.random() < 0.5,
        prompt_logprobs=rng.choice((None, None, None, 0, 2)),
    )
    return Request(
        name,
        prompt,
        params,
        eos_token_ids=rng.choice(((), (1,), (1, 2))),
        cache_salt=rng.choice(("", "", "a", "b")),
        capture_hidden=rng.random() < 0.15,
    )


def draw_workload(rng: random.Random) -> Workload:
    config = draw_config(rng)
    limit = min(config.max_model_len, config.pool_tokens)
    stems = [tuple(rng.choices(range(VOCAB), k=rng.randint(1, limit))) for _ in range(2)]
    pace = rng.choice((0, 1, 6))
    arrivals = [
        (rng.randint(0, index * pace), draw_request(rng, f"r{index}", limit, stems))
        for index in range(rng.randint(1, 14))
    ]
    arrivals.sort(key=lambda arrival: arrival[0])
    actions = [
        Action(rng.randint(0, 40), rng.random() < 0.6, rng.choice(("abort", "stop string", "reset")), rng.randint(0, 9))
        for _ in range(rng.choice((0, 0, 2, 6)))
    ]
    return Workload(config, arrivals, actions)


def test_random_workloads_give_every_request_what_it_gets_alone() -> None:
    events: Counter[str] = Counter()
    for seed in range(500):
        events += Run(draw_workload(random.Random(seed))).run().events
    # The workloads are worth nothing unless they reach the rare paths.
    assert min(events["preempted"], events["cached tokens"], events["ended from outside"]) > 500


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False, note_method_calls=False))
def test_drawn_workloads_give_every_request_what_it_gets_alone(rng: random.Random) -> None:
    Run(draw_workload(rng)).run()


@pytest.mark.parametrize("force_preempt_every", [None, 1, 2])
@pytest.mark.parametrize("num_pages", [9, 12, 60])
def test_the_smallest_pools_only_make_it_slower(num_pages: int, force_preempt_every: int | None) -> None:
    """Requests that each need nearly the whole pool, all there at once, with a shared prefix."""
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=1000,
        num_pages=num_pages,
        page_size=2,
        force_preempt_every=force_preempt_every,
    )
    params = SamplingParams(max_tokens=9)
    arrivals = [(0, Request(f"r{index}", (1, 2, 3, 4, 5, 6, 7, index, 9), params)) for index in range(6)]
    run = Run(Workload(config, arrivals)).run()
    assert run.finished == {f"r{index}": "length" for index in range(6)}
