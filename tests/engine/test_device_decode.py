"""The GPU runner's host side, over a stand-in for the device: state, deltas, ring, steps ahead, two ways to sample.

The stand-in computes with the layered decoder what the fused kernels do, from what the state on the device says alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.core import StructuredOutputs
from pellucid.engine.engine import DebugModes
from pellucid.models.fused_decoder import TokenRing
from pellucid.runner.device_state import DeviceState
from pellucid.runner.forward_batch import build_forward_batch
from pellucid.runner.gpu_runner import RING, GPURunner
from pellucid.runner.model_runner import ModelRunner
from pellucid.runner.prompt_graphs import PromptGraphs
from pellucid.runner.sampler import _nucleus
from pellucid.selection.bucket import buckets_up_to
from pellucid.step_plan import ScheduledSequence, StepPlan
from tests.engine.test_invariance import prompts, tokens
from tests.engine.tiny import MakeLLM, assert_idle


class LayeredDevice:
    """Takes the place of `FusedDecoder`."""

    def __init__(self, layered: ModelRunner, state: DeviceState, ring: TokenRing) -> None:
        self._layered, self._state, self._ring = layered, state, ring
        self._logits = torch.empty(0)
        self.steps = 0

    def step(self, rows: int) -> None:
        self.steps += 1
        state, layered = self._state, self._layered
        slots = state.row_slots[:rows].tolist()
        real = [row for row in range(rows) if slots[row] != state.scratch_slot]
        scheduled = []
        for row in real:
            start = int(state.positions[slots[row]])
            pages = state.page_table[slots[row], : start // layered.pool.page_size + 1].tolist()
            token = int(state.tokens[slots[row]])
            scheduled.append(ScheduledSequence(str(row), start, (token,), tuple(pages), True, False))
        plan = StepPlan(0, tuple(scheduled), len(real), len(real))
        backends = layered.attention_backend("decode", len(real)), layered.attention_backend("prefill", 1)
        batch = build_forward_batch(plan, layered.pool, layered.device, *backends, frozenset())
        found = layered.model.forward(batch).logits
        self._logits = torch.full((rows, found.shape[1]), float("nan"))
        self._logits[real] = found
        self.sample(self._logits, state.row_slots[:rows])

    def logits(self, rows: int) -> torch.Tensor:
        return self._logits

    def sample(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Draws that are not the host's, by seed and position, from what the host's filters would keep."""
        state, line = self._state, int(self._ring.step) % RING
        self._ring.step.add_(1)
        for row, slot in enumerate(slots.tolist()):
            if slot == state.scratch_slot:
                continue
            values, heat, position = logits[row], float(state.temperatures[slot]), int(state.positions[slot])
            if heat > 0:
                generator = torch.Generator().manual_seed(int(state.seeds[slot]) * 10007 + position)
                noise = -torch.empty_like(values).exponential_(generator=generator).log()
                top_k, top_p = int(state.top_k[slot]) or len(values), float(state.top_p[slot])
                chances = (values / heat).softmax(-1)
                chances = chances.where(chances >= state.min_p[slot] * chances.max(), 0.0)
                kept, tokens = _nucleus(chances, top_k, top_p)
                dropped = torch.full_like(values, float("-inf"))
                values = dropped.index_copy(0, tokens[kept > 0], (values / heat + noise)[tokens[kept > 0]])
            token = int(values.argmax())
            self._ring.tokens[line, row] = token if logits[row].isfinite().all() else -1
            state.tokens[slot], state.positions[slot] = token, position + 1


class StandInRunner(GPURunner):
    """A `GPURunner` over a `ModelRunner` on the CPU."""

    def __init__(self, layered: ModelRunner) -> None:
        plan = layered.plan
        self._layered, self.plan, self.traits, self.device = layered, plan, layered.traits, layered.device
        width = buckets_up_to(plan.max_num_seqs)[-1]
        self._state = DeviceState(
            plan.max_num_seqs, width, -(-plan.max_model_len // plan.page_size) + 1, layered.device
        )
        ring = TokenRing(torch.zeros(RING, width, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
        self._ring, self._line, self._graphs = ring.tokens, 0, None
        self._prompts = PromptGraphs((), (), self._prompt_step)
        self.fused: Any = LayeredDevice(layered, self._state, ring)
        self.ahead = 0

    def can_run_ahead(self, plan: StepPlan) -> bool:
        found = super().can_run_ahead(plan)
        self.ahead += found
        return found


class Event:
    """Of a device that has computed whatever was launched."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def on_stand_in(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> StandInRunner:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    worker = llm.engine._worker
    assert isinstance(worker._runner, ModelRunner)
    runner = StandInRunner(worker._runner)
    worker._runner = runner
    return runner


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "two at a time": {"block_size": 16, "max_num_seqs": 2},
    "smallest pool": {"block_size": 4, "num_kv_pages": 30, "max_num_seqs": 4},
    "preempted every third step": {"block_size": 8, "max_num_seqs": 3, "debug": DebugModes(force_preempt_every=3)},
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"min_tokens": 5, "stop_token_ids": range(2, 160)},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 9, "repetition_penalty": 1.3, "presence_penalty": 0.2},
]
"""Sampled by the device, the device, the host, the host and then the device, the device, the host."""


def params(kinds: list[dict[str, Any]]) -> list[SamplingParams]:
    return [
        SamplingParams(**{"temperature": 0, "seed": 7 + i, "max_tokens": 22 - 2 * i, "ignore_eos": True, **kind})
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kinds", [[{}] * 6, KINDS], ids=["greedy", "mixed"])
def test_every_request_gets_what_it_gets_alone(
    kinds: list[dict[str, Any]], way: str, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the host where it draws, and by the device where the device does, whoever is beside it."""
    alone = make_llm(max_model_len=112, enable_prefix_caching=False)
    expected = [tokens(alone.generate(p, one))[0] for p, one in zip(prompts(), params(kinds), strict=True)]
    warm = make_llm(max_model_len=112, enable_prefix_caching=False)
    on_stand_in(warm, monkeypatch)
    for index, kind in enumerate(kinds):
        if "temperature" in kind and "repetition_penalty" not in kind:
            by_device = tokens(warm.generate(prompts()[index], params(kinds)[index]))[0]
            assert by_device != expected[index]
            expected[index] = by_device
    llm = make_llm(**{"max_model_len": 112, **WAYS[way]})
    runner = on_stand_in(llm, monkeypatch)
    for _ in range(2):
        assert tokens(llm.generate(prompts(), params(kinds))) == expected
        assert_idle(llm)
    assert runner.fused.steps > 10
    assert runner.ahead > 5
    if "pool" in way or "preempted" in way:
        assert llm.engine.stats().preemptions > 0


def test_what_the_host_tells_of_a_row_is_what_it_tells_without_a_device(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [{"logprobs": 2}, {}, {"prompt_logprobs": 1}, {}, {}, {}]
    plain, llm = (make_llm(max_model_len=112) for _ in range(2))
    on_stand_in(llm, monkeypatch)
    expected, found = (one.generate(prompts(), params(kinds)) for one in (plain, llm))
    assert [one.outputs[0].logprobs for one in found] == [one.outputs[0].logprobs for one in expected]
    assert [one.prompt_logprobs for one in found] == [one.prompt_logprobs for one in expected]


def test_a_constraint_is_followed_beside_rows_that_the_device_samples(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(max_model_len=112)
    on_stand_in(llm, monkeypatch)
    words = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputs(choice=("yes", "no")))
    outputs = llm.generate(prompts()[:3], [params([{}])[0], words, params([{}])[0]])
    assert outputs[1].outputs[0].text in ("yes", "no")
    assert len(outputs[0].outputs[0].token_ids) == len(outputs[2].outputs[0].token_ids) == 22


def test_an_abort_in_flight_frees_the_slot_for_the_next(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(make_llm(max_model_len=112).generate(prompts(), params([{}] * 6)))
    llm = make_llm(max_model_len=112, max_num_seqs=2)
    runner = on_stand_in(llm, monkeypatch)
    engine = llm.engine
    for index in range(6):
        engine.add_prompt(prompts()[index], params([{}] * 6)[index], request_id=f"r{index}")
    for _ in range(6):
        engine.step()
    engine.abort("r1")
    engine.add_prompt(prompts()[1], params([{}] * 6)[1], request_id="r1")
    while engine.has_unfinished():
        engine.step()
    assert [engine.take_result(f"r{i}").outputs[0].token_ids for i in range(6)] == expected
    assert runner._state._mirrors == {}
