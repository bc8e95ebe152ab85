"""When a request ends, and with which reason."""

from __future__ import annotations

import pytest

from pellucid.core import Request, SamplingParams
from pellucid.scheduler.scheduler import Scheduler, SchedulerConfig
from pellucid.step_plan import SequenceUpdate

EOS, STOP = 1, 2


def generate(params: SamplingParams, tokens: list[int], eos: tuple[int, ...] = (EOS,)) -> list[SequenceUpdate]:
    """The updates of one request while the model samples `tokens`, which must all be asked for or cut short."""
    scheduler = Scheduler(SchedulerConfig(2, 16, max_model_len=64, num_pages=8, page_size=8))
    scheduler.add_request(Request("a", (5, 6, 7), params, eos_token_ids=eos))
    updates: list[SequenceUpdate] = []
    queue = iter(tokens)
    while (plan := scheduler.plan_step()) is not None:
        updates += scheduler.commit(plan, {"a": next(queue)} if plan.scheduled[0].sample else {})
    assert scheduler.stats().held_pages == 0
    assert all(update.finish_reason is None for update in updates[:-1])
    return updates


def ending(updates: list[SequenceUpdate]) -> tuple[int, str | None, str | int | None]:
    return len(updates), updates[-1].finish_reason, updates[-1].stop_reason


def test_an_eos_token_ends_with_stop_and_is_reported() -> None:
    updates = generate(SamplingParams(), [9, EOS, 9])
    assert ending(updates) == (2, "stop", None)
    assert updates[-1].token_id == EOS


def test_any_of_several_eos_tokens_ends() -> None:
    assert ending(generate(SamplingParams(), [9, 33], eos=(EOS, 33))) == (2, "stop", None)


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    assert ending(generate(SamplingParams(ignore_eos=True, max_tokens=3), [EOS] * 3)) == (3, "length", None)


def test_a_stop_token_ends_with_its_id_as_the_reason() -> None:
    assert ending(generate(SamplingParams(stop_token_ids=(STOP,)), [9, 9, STOP])) == (3, "stop", STOP)


def test_ignore_eos_leaves_stop_tokens_in_force_even_for_the_same_id() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(EOS,))
    assert ending(generate(params, [9, EOS])) == (2, "stop", EOS)


@pytest.mark.parametrize("token", [EOS, STOP])
def test_min_tokens_holds_eos_and_stop_tokens_back_until_that_many_tokens_are_there(token: int) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(STOP,))
    assert ending(generate(params, [token] * 3))[:2] == (3, "stop")
    assert ending(generate(params, [token, token, 9, 9, token]))[:2] == (5, "stop")


def test_the_last_allowed_token_ends_with_stop_if_it_is_a_stop_token() -> None:
    assert ending(generate(SamplingParams(max_tokens=2), [9, EOS])) == (2, "stop", None)
    assert ending(generate(SamplingParams(max_tokens=2), [9, 9])) == (2, "length", None)


def test_max_tokens_wins_where_min_tokens_equals_it() -> None:
    assert ending(generate(SamplingParams(min_tokens=2, max_tokens=2), [EOS, 9])) == (2, "length", None)


def test_a_stop_token_in_the_prompt_does_not_end_anything() -> None:
    assert ending(generate(SamplingParams(max_tokens=2, stop_token_ids=(5, 6, 7)), [9, 9])) == (2, "length", None)


def test_max_tokens_0_computes_the_prompt_samples_nothing_and_ends_with_length() -> None:
    updates = generate(SamplingParams(max_tokens=0, stop_token_ids=(7,)), [])
    assert ending(updates) == (1, "length", None)
    assert updates[0].token_id is None
