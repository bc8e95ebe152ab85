"""A step in flight while the next is planned: the same texts, and nothing of a request after its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pellucid import LLM, InvalidRequestError, PellucidError, SamplingParams
from pellucid.core import Request, StructuredOutputs
from pellucid.engine.engine import DebugModes
from pellucid.engine.step_output import StepOutput
from pellucid.engine.worker import Worker
from pellucid.runner.base import Runner, StepResult
from pellucid.runner.model_runner import ModelRunner
from pellucid.runner.sampler import Constraint
from pellucid.step_plan import UNKNOWN_TOKEN, StepPlan
from tests.engine.test_failures import POISON, break_model
from tests.engine.test_invariance import prompts
from tests.engine.tiny import MakeLLM, assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@dataclass
class Launched:
    """A step that has been computed; whoever collects it learns what came of it."""

    plan: StepPlan
    outcome: StepResult | BaseException


class AheadRunner:
    """Computes each step at its launch, as a device would later, and knows the newest tokens before the host does."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.newest: dict[str, int] = {}
        self.constrained: set[str] = set()
        self.launches = self.launched = self.collected = 0  # the last two are step numbers
        self.ahead = self.unknown = 0
        self.failing_launch: dict[int, BaseException] = {}  # by the number of the launch, from 1
        self.failing_collect: dict[int, BaseException] = {}

    def add_request(self, request: Request, constraint: Constraint | None = None) -> None:
        self.newest.pop(request.request_id, None)
        if constraint is not None:
            self.constrained.add(request.request_id)
        self.inner.add_request(request, constraint)

    def remove_request(self, request_id: str) -> None:
        self.constrained.discard(request_id)
        self.inner.remove_request(request_id)

    def can_run_ahead(self, plan: StepPlan) -> bool:
        return not any(row.sample and row.request_id in self.constrained for row in plan.scheduled)

    def launch(self, plan: StepPlan) -> Launched:
        self.launches += 1
        if self.launches in self.failing_launch:
            raise self.failing_launch[self.launches]
        assert plan.step > self.launched
        self.launched = plan.step
        rows = []
        for row in plan.scheduled:
            if UNKNOWN_TOKEN in row.token_ids:
                assert not row.is_prefill
                self.unknown += 1
                row = row._replace(token_ids=(self.newest[row.request_id],))
            rows.append(row)
        result = self.inner.step(replace(plan, scheduled=tuple(rows)))
        self.newest |= {name: token.token_id for name, token in result.sampled.items()}
        # What can't be sampled still is something on a device.
        self.newest |= dict.fromkeys(result.failed, 0)
        return Launched(plan, self.failing_collect.get(self.launches, result))

    def collect(self, pending: Launched) -> StepResult:
        # Steps in which nobody is left are passed over.
        assert self.collected < pending.plan.step <= self.launched <= pending.plan.step + 1
        self.collected = pending.plan.step
        self.ahead += self.launched > pending.plan.step
        if isinstance(pending.outcome, BaseException):
            raise pending.outcome
        return pending.outcome

    def step(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))


def run_ahead(llm: LLM) -> AheadRunner:
    """Make the engine's runner one that can run ahead."""
    worker = llm.engine._worker
    assert isinstance(worker._runner, ModelRunner)
    runner = AheadRunner(worker._runner)
    as_protocol: Runner[Any] = runner
    worker._runner = as_protocol
    return runner


def mixed_params(**fields: Any) -> list[SamplingParams]:
    """Greedy, seeded, with penalties, of different lengths, with stop tokens: for the six prompts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "stop_token_ids": range(100, 103)},
        {"temperature": 0.7, "top_p": 0.9, "prompt_logprobs": 1},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.2, "stop_token_ids": range(40, 60)},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "min_tokens": 6, "stop_token_ids": range(2, 200)},
        {"temperature": 1.0, "logit_bias": {7: 2.0}},
    ]
    return [
        SamplingParams(**{"seed": 7 + i, "max_tokens": 24 - 3 * i, "logprobs": 2, **kind, **fields})
        for i, kind in enumerate(kinds)
    ]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "two at a time": {"block_size": 16, "max_num_seqs": 2},
    "whole prompts": {"enable_chunked_prefill": False},
    "smallest pool": {"block_size": 4, "num_kv_pages": 26, "max_model_len": 100},
    "preempted every third step": {"block_size": 8, "max_num_seqs": 3, "debug": DebugModes(force_preempt_every=3)},
}


def told(llm: LLM) -> list[tuple[Any, ...]]:
    """All that `generate` says of the six prompts, but for times."""
    outputs = llm.generate(prompts(), mixed_params())
    return [
        (one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason, output.prompt_logprobs)
        for output in outputs
        for one in output.outputs
    ]


@pytest.mark.parametrize("way", WAYS)
def test_every_request_gets_what_it_gets_without_running_ahead(way: str, make_llm: MakeLLM) -> None:
    expected = told(make_llm(max_model_len=112, enable_prefix_caching=False))
    assert {one[3] for one in expected} == {"stop", "length"}
    llm = make_llm(**{"max_model_len": 112, **WAYS[way]})
    runner = run_ahead(llm)
    assert told(llm) == expected
    assert_idle(llm)
    assert told(llm) == expected, "warm cache"
    assert min(runner.ahead, runner.unknown) > 10
    if "pool" in way or "preempted" in way:
        assert llm.engine.stats().preemptions > 0
    assert llm.engine.stats().prefix_cache_hit_tokens > 0


def test_stop_strings_end_the_text_at_the_same_place_and_cost_the_others_nothing(make_llm: MakeLLM) -> None:
    free = make_llm("llama").generate(prompts(), GREEDY)
    stops = [output.outputs[0].text[3 + i : 6 + i] for i, output in enumerate(free)]
    assert all(stops)
    params = [replace(GREEDY, stop=(stop,)) if i % 2 else GREEDY for i, stop in enumerate(stops)]
    expected = [output.outputs for output in make_llm("llama").generate(prompts(), params)]
    assert {one.finish_reason for [one] in expected} == {"stop", "length"}
    llm = make_llm("llama", max_num_seqs=4)
    runner = run_ahead(llm)
    found = [output.outputs for output in llm.generate(prompts(), params)]
    assert [replace(one, metrics=None) for [one] in found] == [replace(one, metrics=None) for [one] in expected]
    assert runner.ahead > 10


def test_samples_of_one_prompt_and_streams_that_are_closed_early(make_llm: MakeLLM) -> None:
    params = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=10, ignore_eos=True)
    expected = [one.token_ids for one in make_llm("llama").generate(prompts()[0], params)[0].outputs]
    llm = make_llm("llama", block_size=16)
    run_ahead(llm)
    closed = llm.stream([5, 6, 7], GREEDY)
    next(closed)
    assert [one.token_ids for one in llm.generate(prompts()[0], params)[0].outputs] == expected
    closed.close()
    assert_idle(llm)


@pytest.mark.parametrize("debug", [DebugModes(), DebugModes(force_preempt_every=2)], ids=["plain", "preempting"])
def test_an_abort_with_a_step_in_flight_frees_the_pages_and_changes_nobody_elses_output(
    debug: DebugModes, make_llm: MakeLLM
) -> None:
    given = prompts()[:5]
    expected = [output.outputs[0].token_ids for output in make_llm("llama").generate(given, GREEDY)]
    for steps in range(10):
        llm = make_llm("llama", block_size=16, max_num_batched_tokens=24, max_num_seqs=3, debug=debug)
        run_ahead(llm)
        ids = [llm.engine.add_prompt(prompt, GREEDY) for prompt in given]
        for _ in range(steps):
            llm.engine.step()
            llm.engine.check_conservation()
        llm.engine.abort(ids[1])
        llm.engine.abort(ids[3])
        llm.engine.check_conservation()
        rest = [ids[0], ids[2], ids[4]]
        while not all(llm.engine.is_finished(one) for one in rest):
            llm.engine.step()
            llm.engine.check_conservation()
        assert [llm.engine.take_result(one).outputs[0].token_ids for one in rest] == expected[::2]
        assert_idle(llm)


def test_abort_of_all_leaves_nothing_in_flight(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    runner = run_ahead(llm)
    request_id = llm.engine.add_prompt([5, 6], GREEDY)
    llm.engine.step()
    assert (runner.collected, runner.launched) == (1, 2)
    llm.engine.abort(request_id)
    assert not llm.engine.has_unfinished()
    assert_idle(llm)


@pytest.mark.parametrize("ends_by", ["abort", "stop token"])
def test_an_id_is_free_as_soon_as_its_request_has_ended(ends_by: str, make_llm: MakeLLM) -> None:
    """Its last row is in flight still, next to a row of another request that keeps the step from being abandoned."""
    expected = [output.outputs[0].token_ids for output in make_llm("llama").generate([[9] * 20, [5, 6, 7]], GREEDY)]
    llm = make_llm("llama", block_size=8, enable_prefix_caching=False)
    run_ahead(llm)
    other = llm.engine.add_prompt([9] * 20, GREEDY)
    stops = replace(GREEDY, stop_token_ids=expected[1][2:3], prompt_logprobs=0)
    llm.engine.add_prompt([5, 6, 7], GREEDY if ends_by == "abort" else stops, request_id="mine")
    for _ in range(3):
        llm.engine.step()
    if ends_by == "abort":
        llm.engine.abort("mine")
    else:
        assert llm.engine.is_finished("mine")
        llm.engine.take_result("mine")
    llm.engine.add_prompt([5, 6, 7], GREEDY, request_id="mine")
    llm.engine.check_conservation()
    while not all(llm.engine.is_finished(one) for one in ("mine", other)):
        llm.engine.step()
        llm.engine.check_conservation()
    assert [llm.engine.take_result(one).outputs[0].token_ids for one in (other, "mine")] == expected


def outputs_of(worker: Worker) -> Iterator[StepOutput]:
    while worker.has_unfinished():
        yield from worker.step()
        worker.check_conservation()


def test_a_request_gets_nothing_after_its_end_and_each_token_once(make_llm: MakeLLM) -> None:
    llm = make_llm("llama", max_num_batched_tokens=16, max_num_seqs=3)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts(), mixed_params())]
    run_ahead(llm)
    worker = llm.engine._worker
    for index, (prompt, params) in enumerate(zip(prompts(), mixed_params(), strict=True)):
        worker.add_request(Request(str(index), tuple(prompt), params, eos_token_ids=(1,)))
    found: dict[str, list[int]] = {}
    ended: set[str] = set()
    for output in outputs_of(worker):
        assert output.request_id not in ended
        if output.token_id is not None:
            assert (output.scheduled_time is not None) == (output.request_id not in found), "with the first token only"
            found.setdefault(output.request_id, []).append(output.token_id)
        if output.finish_reason is not None:
            ended.add(output.request_id)
    assert [tuple(found[str(index)]) for index in range(6)] == expected


def test_tokens_that_cannot_be_sampled_end_their_own_request_alone(make_llm: MakeLLM) -> None:
    given = [[5, 6, 7], [9] * 70]
    expected = [output.outputs[0].token_ids for output in make_llm("llama").generate(given, GREEDY)]
    llm = make_llm("llama", max_num_batched_tokens=32)
    break_model(llm)
    run_ahead(llm)
    ids = [llm.engine.add_prompt(prompt, GREEDY) for prompt in (given[0], [8, POISON], given[1])]
    deltas = []
    while not all(llm.engine.is_finished(one) for one in ids):
        deltas += llm.engine.step()
    [end] = [delta for delta in deltas if delta.request_id == ids[1]]
    assert end.finish_reason == "abort"
    assert "not finite" in str(end.error)
    assert [llm.engine.take_result(ids[i]).outputs[0].token_ids for i in (0, 2)] == expected


def test_what_a_row_in_vain_gives_is_told_to_nobody(make_llm: MakeLLM) -> None:
    """Scores of a prompt that was given up, and logits that are not finite after the end."""
    llm = make_llm("llama", max_num_batched_tokens=16)
    break_model(llm)
    run_ahead(llm)
    worker = llm.engine._worker
    poisoned = SamplingParams(temperature=0, max_tokens=9, logit_bias={POISON: 100.0}, stop_token_ids=(POISON,))
    worker.add_request(Request("keeps the steps wanted", (5, 6), GREEDY))
    worker.add_request(Request("poisoned", (7, 8), poisoned))
    worker.add_request(Request("scored", tuple(range(2, 72)), SamplingParams(max_tokens=1, prompt_logprobs=0)))
    first = {output.request_id: output for output in worker.step()}
    assert len(first["scored"].prompt_logprobs) == 12
    assert (first["poisoned"].token_id, first["poisoned"].finish_reason) == (POISON, "stop")
    worker.abort("scored")
    assert {output.request_id for output in outputs_of(worker)} == {"keeps the steps wanted"}


def test_a_launch_that_raises_ends_those_whose_first_row_it_has(make_llm: MakeLLM) -> None:
    llm = make_llm("llama", max_num_seqs=2)
    runner = run_ahead(llm)
    worker = llm.engine._worker
    worker.add_request(Request("a", (5, 6), GREEDY))
    worker.step()
    worker.add_request(Request("b", (7, 8), GREEDY))
    worker.add_request(Request("c", (7, 8), GREEDY))
    runner.failing_launch[3] = MemoryError("x")
    with pytest.raises(MemoryError):
        worker.step()
    assert worker.dropped == ("a", "b")
    assert {output.request_id for output in outputs_of(worker)} == {"c"}


@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), PellucidError("x")], ids=repr)
def test_a_step_that_raises_ends_the_requests_in_flight_and_no_others(
    error: BaseException, where: str, number: int, make_llm: MakeLLM
) -> None:
    given = [[5, 6, 7], [9] * 20, [10, 11]]
    expected = [output.outputs[0].token_ids for output in make_llm("llama").generate(given, GREEDY)]
    llm = make_llm("llama", max_num_batched_tokens=8, max_num_seqs=2)
    runner = run_ahead(llm)
    (runner.failing_launch if where == "launch" else runner.failing_collect)[number] = error
    worker = llm.engine._worker
    for name, prompt in zip("abc", given, strict=True):
        worker.add_request(Request(name, tuple(prompt), GREEDY))
    found: dict[str, list[int]] = {}

    def run() -> None:
        for output in outputs_of(worker):
            if output.token_id is not None:
                found.setdefault(output.request_id, []).append(output.token_id)

    with pytest.raises(type(error)):
        run()
    assert worker.dropped == ("a", "b")
    worker.check_conservation()
    run()
    assert tuple(found["c"]) == expected[2]
    assert_idle(llm)
    assert [output.outputs[0].token_ids for output in llm.generate(given, GREEDY)] == expected


def test_constraints_keep_the_step_after_theirs_from_running_ahead(make_llm: MakeLLM) -> None:
    forms: list[StructuredOutputs | None] = [StructuredOutputs(regex=r"[a-z]{3,6} [0-9]{2}"), None, None]
    params = [SamplingParams(seed=5 + i, max_tokens=24, structured_outputs=form) for i, form in enumerate(forms)]
    texts = ["the quick brown fox", "pack my box", "jumps over"]
    expected = [output.outputs[0].token_ids for output in make_llm().generate(texts, params)]
    llm = make_llm(max_num_batched_tokens=8)
    runner = run_ahead(llm)
    assert [output.outputs[0].token_ids for output in llm.generate(texts, params)] == expected
    assert runner.ahead > 0
    with pytest.raises(InvalidRequestError):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(regex="(")))


def test_hidden_states_are_those_of_the_plain_loop(make_llm: MakeLLM) -> None:
    expected = make_llm("llama", capture_layers=(0, 1), max_num_batched_tokens=16).hidden_states(prompts())
    llm = make_llm("llama", capture_layers=(0, 1), max_num_batched_tokens=16)
    runner = run_ahead(llm)
    found = llm.hidden_states(prompts())
    assert all(one.rows.equal(other.rows) for one, other in zip(found, expected, strict=True))
    assert runner.ahead > 5


def test_the_runner_of_today_never_runs_ahead(make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    llm.engine.add_prompt([5, 6], GREEDY)
    llm.engine.step()
    assert not llm.engine._worker._in_flight
    llm.generate([7, 8], GREEDY)
