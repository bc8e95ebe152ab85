"""The step loop of the engine process when steps fail: who ends, who goes on, and when it gives up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from pellucid.core import Request, SamplingParams
from pellucid.engine.messages import Add, Call, FromEngine, Outputs, Reply, Stop, ToEngine
from pellucid.engine.process import MAX_FAILED_STEPS, EngineBrokenError, EngineLoop
from pellucid.engine.step_output import StepOutput
from pellucid.step_plan import SchedulerStats


@dataclass
class ScriptedChannel:
    """Gives one batch of messages a turn, then stops the loop; keeps what is sent."""

    script: deque[list[ToEngine]]
    sent: list[FromEngine] = field(default_factory=list)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        return self.script.popleft() if self.script else [Stop()]

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def outputs(self) -> list[StepOutput]:
        return [output for message in self.sent if isinstance(message, Outputs) for output in message.outputs]


@dataclass
class ScriptedSteps:
    """Runs at most `slots` requests; the steps whose numbers are in `failing` raise."""

    failing: frozenset[int]
    slots: int = 2
    waiting: list[str] = field(default_factory=list)
    number: int = 0
    last_step_tokens: int = 1
    dropped: tuple[str, ...] = ()

    def add_request(self, request: Request) -> None:
        self.waiting.append(request.request_id)

    def abort(self, request_id: str) -> bool:
        known = request_id in self.waiting
        self.waiting = [one for one in self.waiting if one != request_id]
        return known

    def finish(self, request_id: str, stop_string: str) -> None:
        self.abort(request_id)

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[StepOutput]:
        self.number += 1
        running = tuple(self.waiting[: self.slots])
        if self.number in self.failing:
            self.dropped = running
            raise RuntimeError("device says: secret path /x/y")
        for one in running:
            self.abort(one)
        return [StepOutput(one, token_id=7, finish_reason="length") for one in running]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(0, len(self.waiting), 1, 0, 0, 1, self.number, 0, 0, 0, 0)

    def reset_prefix_cache(self) -> None: ...
    def check_conservation(self) -> None: ...


def add(name: str) -> Add:
    return Add(Request(name, (1,), SamplingParams(max_tokens=1)))


def run(steps: ScriptedSteps, *script: list[ToEngine]) -> ScriptedChannel:
    channel = ScriptedChannel(deque(script))
    EngineLoop(steps, channel).run()  # type: ignore[arg-type]
    return channel


def test_a_step_that_fails_costs_the_requests_in_it_and_no_others() -> None:
    channel = run(ScriptedSteps(frozenset({1})), [add("a"), add("b"), add("c")], [])
    ends = {output.request_id: output for output in channel.outputs()}
    assert {name: end.finish_reason for name, end in ends.items()} == {"a": "abort", "b": "abort", "c": "length"}
    assert ends["a"].failure is not None
    assert "secret" not in ends["a"].failure.message


def test_failures_with_successes_between_them_go_on_for_ever() -> None:
    script = [[add(str(number))] for number in range(10)]
    channel = run(ScriptedSteps(frozenset({1, 2, 4, 5, 7, 8})), *script)
    assert len(channel.outputs()) == 10


def test_failures_in_a_row_end_the_engine_with_the_code_that_supervisors_start_again() -> None:
    script = [[add(str(number))] for number in range(MAX_FAILED_STEPS)]
    with pytest.raises(EngineBrokenError) as broken:
        run(ScriptedSteps(frozenset(range(1, 100))), *script)
    assert broken.value.exit_code == 3
    assert "secret" not in str(broken.value)


def test_calls_are_answered_between_steps() -> None:
    channel = run(ScriptedSteps(frozenset()), [add("a"), Call(5, "ping")], [Call(6, "nonsense")])
    replies = [message for message in channel.sent if isinstance(message, Reply)]
    assert [(reply.number, reply.error is None) for reply in replies] == [(5, True), (6, False)]
