"""Two plans in flight: every request gets what it gets alone, and what a plan computed in vain shows nowhere."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import Request, SamplingParams
from pellucid.scheduler.scheduler import Scheduler
from pellucid.step_plan import UNKNOWN_TOKEN, SequenceUpdate, StepPlan
from tests.scheduler.test_scheduler import add, commit, make_scheduler, plan_step
from tests.scheduler.test_workloads import VOCAB, Run, SimulatedModel, Workload, draw_workload, run_alone


class AheadModel(SimulatedModel):
    """Computes steps in order and keeps the newest token of each request, for the rows that lack it."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.newest: dict[str, int] = {}

    def run(self, plan: StepPlan, requests: dict[str, Request]) -> dict[str, int]:
        rows = [
            row._replace(token_ids=(self.newest[row.request_id],)) if UNKNOWN_TOKEN in row.token_ids else row
            for row in plan.scheduled
        ]
        sampled = super().run(replace(plan, scheduled=tuple(rows)), requests)
        self.newest |= sampled
        return sampled


@dataclass
class InFlight:
    """A plan, who has ended since it was made, and what it sampled once the model has run it."""

    plan: StepPlan
    ended: set[str] = field(default_factory=set)
    sampled: dict[str, int] | None = None


class AheadRun:
    """Runs a workload with `plan_ahead` at random, and checks every promise at every call.

    The model runs a plan right away or as late as its commit, after all that may have ended meanwhile.
    """

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        self.workload, self.config, self.rng = workload, workload.config, rng
        self.scheduler = Scheduler(workload.config)
        self.model = AheadModel(workload.config.page_size)
        self.requests = {request.request_id: request for _, request in workload.arrivals}
        self.limit = min(self.config.max_model_len, self.config.pool_tokens)
        self.eagerness, self.computes_late = rng.choice((0.5, 0.9, 1.0)), rng.choice((0.0, 0.5, 1.0))
        self.live: list[str] = []
        self.in_flight: deque[InFlight] = deque()
        self.outputs: dict[str, list[int]] = {name: [] for name in self.requests}
        self.finished: dict[str, str] = {}
        self.planned: dict[str, int] = {}  # end of the newest row of each request
        self.events: Counter[str] = Counter()

    def run(self) -> AheadRun:
        waiting = deque(self.workload.arrivals)
        step = 0
        while waiting or self.live or self.in_flight:
            while waiting and waiting[0][0] <= step:
                self.scheduler.add_request(waiting[0][1])
                self.live.append(waiting.popleft()[1].request_id)
            self.plan()
            self.act(step)
            self.compute()
            if self.in_flight and (len(self.in_flight) == 2 or self.rng.random() > self.eagerness):
                self.commit()
            step += 1
            assert step < 20_000, "starved"
        self.check_end()
        return self

    def plan(self) -> None:
        ahead = bool(self.in_flight)
        if ahead:
            before = self.scheduler.stats()
            plan = self.scheduler.plan_ahead()
            assert plan is not None or self.scheduler.stats() == before
            self.events["refused to plan ahead"] += plan is None
            if plan is None:
                self.commit()
        else:
            plan = self.scheduler.plan_step()
            assert (plan is None) == (not self.live)
        if plan is not None:
            self.check_plan(plan, ahead)
            self.in_flight.append(InFlight(plan))
        self.check_conservation()

    def check_plan(self, plan: StepPlan, ahead: bool) -> None:
        names = [row.request_id for row in plan.scheduled]
        assert 0 < len(set(names)) == len(names) <= self.config.max_num_seqs
        assert set(names) <= set(self.live)
        assert (
            plan.num_tokens == sum(len(row.token_ids) for row in plan.scheduled) <= self.config.max_num_batched_tokens
        )
        assert [row.is_prefill for row in plan.scheduled] == [i >= plan.num_decode for i in range(len(names))]
        assert not (ahead and plan.preempted)
        self.events["preempted"] += len(plan.preempted)
        for name in plan.preempted:
            self.planned.pop(name, None)
        for row in plan.scheduled:
            name, end = row.request_id, row.start + len(row.token_ids)
            request = self.requests[name]
            known = (*request.prompt_token_ids, *self.outputs[name])
            coming = any(r.sample and r.request_id == name for flight in self.in_flight for r in flight.plan.scheduled)
            assert row.token_ids == ((*known, UNKNOWN_TOKEN) if coming else known)[row.start : end]
            assert row.start == self.planned.get(name, row.start), "rows of a request must follow each other"
            assert 0 < end <= len(row.pages) * self.config.page_size
            max_tokens = request.params.max_tokens
            longest = self.limit if max_tokens is None else len(request.prompt_token_ids) + max_tokens
            assert end < longest or max_tokens == 0, "a row that nobody can need"
            self.planned[name] = end
            self.events["unknown tokens"] += UNKNOWN_TOKEN in row.token_ids
            self.events["chunks planned ahead"] += ahead and row.is_prefill
            self.events["cached tokens"] += row.start if row.is_prefill and not self.outputs[name] else 0

    def act(self, step: int) -> None:
        for action in self.workload.actions:
            if action.step != step:
                continue
            if action.kind == "reset":
                self.scheduler.reset_prefix_cache()
            elif self.live:
                name = self.live[action.index % len(self.live)]
                self.end(name, action.kind)
                assert self.scheduler.abort(name) if action.kind == "abort" else self.scheduler.finish(name, "END")
                assert not self.scheduler.abort(name)
            self.check_conservation()

    def end(self, name: str, reason: str) -> None:
        self.live.remove(name)
        self.finished[name] = reason
        for flight in self.in_flight:
            if any(row.request_id == name for row in flight.plan.scheduled):
                flight.ended.add(name)
                self.events["rows in vain"] += 1

    def compute(self, late: bool = False) -> None:
        for flight in self.in_flight:
            if flight.sampled is None:
                if not late and self.rng.random() < self.computes_late:
                    return
                flight.sampled = self.model.run(flight.plan, self.requests)

    def commit(self) -> None:
        while self.in_flight[0].sampled is None:
            self.compute(late=True)
        flight = self.in_flight.popleft()
        assert flight.sampled is not None
        for name in flight.ended & flight.sampled.keys():
            # Whatever is said of a dropped row must not matter.
            if self.rng.random() < 0.5:
                del flight.sampled[name]
            else:
                flight.sampled[name] = VOCAB + 1
        updates = self.scheduler.commit(flight.plan, flight.sampled)
        self.check_updates(flight, updates)
        self.check_conservation()

    def check_updates(self, flight: InFlight, updates: tuple[SequenceUpdate, ...]) -> None:
        told = [update.request_id for update in updates]
        assert len(set(told)) == len(told)
        assert not flight.ended & set(told), "a request got something after its end"
        sampled = {row.request_id for row in flight.plan.scheduled if row.sample}
        assert sampled - flight.ended <= set(told)
        for update in updates:
            if update.token_id is not None:
                self.outputs[update.request_id].append(update.token_id)
            if update.finish_reason is not None:
                self.end(update.request_id, update.finish_reason)

    def check_conservation(self) -> None:
        self.scheduler.check_conservation()
        stats = self.scheduler.stats()
        assert stats.free_pages + stats.cached_pages + stats.held_pages == stats.total_pages
        assert stats.running + stats.waiting == len(self.live)
        assert stats.preemptions == self.events["preempted"]

    def check_end(self) -> None:
        assert self.scheduler.stats().held_pages == 0
        self.scheduler.reset_prefix_cache()
        assert self.scheduler.stats().free_pages == self.config.num_pages
        for name, request in self.requests.items():
            outputs, reason = run_alone(request, self.limit)
            if self.finished[name] in ("abort", "stop string"):
                assert self.outputs[name] == outputs[: len(self.outputs[name])]
            else:
                assert (self.outputs[name], self.finished[name]) == (outputs, reason)


def test_random_workloads_planned_ahead_give_every_request_what_it_gets_alone() -> None:
    events: Counter[str] = Counter()
    for seed in range(250):
        rng = random.Random(seed)
        events += AheadRun(draw_workload(rng), rng).run().events
    # The workloads are worth nothing unless they reach the rare paths.
    rare = ("unknown tokens", "chunks planned ahead", "rows in vain", "preempted", "refused to plan ahead")
    assert min(events[name] for name in (*rare, "cached tokens")) > 200, events


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False, note_method_calls=False))
def test_drawn_workloads_give_the_same_tokens_planned_ahead_and_plainly(rng: random.Random) -> None:
    workload = replace(draw_workload(rng), actions=[])
    plain, ahead = Run(workload).run(), AheadRun(workload, rng).run()
    assert (ahead.outputs, ahead.finished) == (plain.outputs, plain.finished)


def plan_ahead(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan_ahead()
    assert plan is not None
    return plan


def rows(plan: StepPlan) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(row.request_id, row.start, row.token_ids) for row in plan.scheduled]


def test_a_row_planned_ahead_computes_the_token_that_is_still_being_sampled() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, "a", 3)
    add(scheduler, "b", 7)
    first = plan_step(scheduler)
    assert rows(first) == [("a", 0, (0, 1, 2)), ("b", 0, (0, 1, 2))]
    second = plan_ahead(scheduler)
    assert rows(second) == [("a", 3, (UNKNOWN_TOKEN,)), ("b", 3, (3, 4, 5, 6))]
    assert (second.num_decode, second.num_tokens) == (1, 5)
    commit(scheduler, first)
    assert rows(plan_ahead(scheduler)) == [("a", 4, (UNKNOWN_TOKEN,)), ("b", 7, (UNKNOWN_TOKEN,))]


def test_what_arrives_while_a_step_is_in_flight_is_admitted_to_the_next() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    plan_step(scheduler)
    add(scheduler, "b", 2)
    assert rows(plan_ahead(scheduler)) == [("a", 3, (UNKNOWN_TOKEN,)), ("b", 0, (0, 1))]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_ends_for_certain_with_the_step_in_flight_gets_no_further_row(max_tokens: int) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_tokens=max_tokens)
    plan = plan_step(scheduler)
    assert scheduler.plan_ahead() is None
    add(scheduler, "b", 2, max_tokens=max_tokens)
    ahead = plan_ahead(scheduler)
    assert rows(ahead) == [("b", 0, (0, 1))]
    for one, name in ((plan, "a"), (ahead, "b")):
        assert [(update.request_id, update.finish_reason) for update in commit(scheduler, one)] == [(name, "length")]


def test_a_request_at_the_models_length_gets_no_further_row() -> None:
    scheduler = make_scheduler(max_model_len=5, max_num_batched_tokens=5)
    scheduler.add_request(Request("a", (1, 2, 3), SamplingParams(max_tokens=None)))
    first = plan_step(scheduler)
    second = plan_ahead(scheduler)
    commit(scheduler, first)
    assert scheduler.plan_ahead() is None
    [update] = commit(scheduler, second)
    assert update.finish_reason == "length"


def test_the_pages_of_a_row_in_vain_stay_held_until_it_is_committed_and_its_token_shows_nowhere() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(Request("a", (1, 2, 3, 4), SamplingParams(max_tokens=9), eos_token_ids=(99,)))
    first = plan_step(scheduler)
    second = plan_ahead(scheduler)
    [update] = scheduler.commit(first, {"a": 99})
    assert (update.token_id, update.finish_reason) == (99, "stop")
    assert not scheduler.has_unfinished()
    scheduler.check_conservation()
    assert scheduler.stats().held_pages == 2
    assert scheduler.commit(second, {}) == ()
    scheduler.check_conservation()
    assert scheduler.stats().free_pages == 32


def test_a_step_that_would_take_a_preemption_is_not_planned_ahead_and_costs_nobody_a_page() -> None:
    scheduler = make_scheduler(num_pages=5)
    add(scheduler, "a", 7, max_tokens=5)
    add(scheduler, "b", 7, max_tokens=5)
    commit(scheduler, plan_step(scheduler))
    in_flight = plan_step(scheduler)
    before = scheduler.stats()
    assert scheduler.plan_ahead() is None
    assert scheduler.stats() == before
    commit(scheduler, in_flight)
    assert plan_step(scheduler).preempted == ("b",)


def test_a_forced_preemption_is_not_planned_ahead() -> None:
    scheduler = make_scheduler(force_preempt_every=2)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    commit(scheduler, plan_step(scheduler))
    # The second step preempts, the third is planned ahead, the fourth would preempt.
    preempting = plan_step(scheduler)
    assert preempting.preempted == ("b",)
    third = plan_ahead(scheduler)
    commit(scheduler, preempting)
    assert scheduler.plan_ahead() is None
    commit(scheduler, third)


def test_pages_become_readable_with_their_commit_and_not_with_their_plan() -> None:
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, "a", 8, max_tokens=8)
    first = plan_step(scheduler)
    add(scheduler, "b", 8)
    second = plan_ahead(scheduler)
    assert rows(second)[-1] == ("b", 0, tuple(range(8)))
    commit(scheduler, first)
    add(scheduler, "c", 8)
    assert rows(plan_ahead(scheduler))[-1] == ("c", 4, tuple(range(4, 8)))


def test_a_chunk_that_is_in_flight_is_not_read_by_others_yet() -> None:
    scheduler = make_scheduler(enable_prefix_caching=True, prefill_chunk_tokens=4)
    add(scheduler, "a", 12)
    first = plan_step(scheduler)
    plan_ahead(scheduler)
    commit(scheduler, first)
    add(scheduler, "b", 12)
    assert rows(plan_ahead(scheduler)) == [("a", 8, tuple(range(8, 12))), ("b", 4, tuple(range(4, 8)))]


def test_plans_are_committed_in_their_order_and_two_are_the_most() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    with pytest.raises(RuntimeError, match="0 plans are in flight"):
        scheduler.plan_ahead()
    first = plan_step(scheduler)
    second = plan_ahead(scheduler)
    with pytest.raises(RuntimeError, match="2 plans are in flight"):
        scheduler.plan_ahead()
    with pytest.raises(RuntimeError, match="not committed"):
        scheduler.plan_step()
    with pytest.raises(RuntimeError, match="oldest"):
        commit(scheduler, second)
    commit(scheduler, first)
    commit(scheduler, second)


def test_an_id_that_was_forgotten_is_free_while_its_row_is_in_flight() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    first = plan_step(scheduler)
    scheduler.forget_ended("a")
    assert scheduler.stats().held_pages == 1, "it has not ended"
    scheduler.abort("a")
    scheduler.forget_ended("a")
    assert scheduler.stats().held_pages == 0
    add(scheduler, "a", 6, max_tokens=1)
    second = plan_ahead(scheduler)
    assert rows(second) == [("a", 0, tuple(range(6)))]
    assert scheduler.commit(first, {"a": 7}) == ()
    scheduler.check_conservation()
    assert [(update.token_id, update.finish_reason) for update in commit(scheduler, second)] == [(99, "length")]
    assert scheduler.stats().free_pages == 32


def test_a_commit_that_is_broken_off_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    for name in ("a", "b", "c"):
        add(scheduler, name, 3)
    plan = plan_step(scheduler)
    assert scheduler.plan_ahead() is not None
    advance, calls = scheduler._advance, iter(range(3))

    def break_off(*args: object) -> SequenceUpdate | None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return advance(*args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(scheduler, "_advance", break_off)
        scheduler.commit(plan, {"a": 5, "b": 6, "c": 7})
    for name in ("a", "b", "c"):
        scheduler.abort(name)
    scheduler.drop_in_flight()
    scheduler.check_conservation()
    assert scheduler.stats().held_pages == 0
    assert not scheduler.has_unfinished()
    add(scheduler, "a", 3)
    assert commit(scheduler, plan_step(scheduler)) is not None
