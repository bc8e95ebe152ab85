"""Which requests the device samples for. See `tests/engine/test_device_decode.py` for the runner's host side."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.core import Request, SamplingParams
from pellucid.runner.gpu_runner import _on_device
from pellucid.runner.sampler import SamplingState


class Anything:
    """A constraint that lets every token pass."""

    finished = False

    def allowed(self) -> bytes:
        return b"\xff" * 40

    def accept(self, token_id: int) -> None: ...


def state(*, capture_hidden: bool = False, constraint: Anything | None = None, **params: Any) -> SamplingState:
    request = Request("r", (1, 2), SamplingParams(max_tokens=9, **params), (0,), capture_hidden=capture_hidden)
    return SamplingState(request, 7, constraint)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.7},
        {"temperature": 1.3, "seed": 5},
        {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.1},
        {"temperature": 0, "stop_token_ids": (3, 4), "ignore_eos": True, "stop": ["x"]},
    ],
)
def test_the_device_chooses_greedily_by_temperature_and_by_filters(params: dict[str, Any]) -> None:
    assert _on_device(state(**params))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0, "presence_penalty": 0.1},
        {"temperature": 0, "frequency_penalty": 0.1},
        {"temperature": 0, "logit_bias": {3: 1.0}},
        {"temperature": 0, "allowed_token_ids": (3, 4)},
        {"temperature": 0, "logprobs": 0},
        {"temperature": 0, "prompt_logprobs": 0},
        {"temperature": 0, "constraint": Anything()},
        {"temperature": 0, "capture_hidden": True},
    ],
    ids=lambda params: str(list(params)[-1]),
)
def test_whatever_tells_of_the_logits_or_changes_them_is_sampled_by_the_host(params: dict[str, Any]) -> None:
    assert not _on_device(state(**params))


def test_a_request_that_may_not_end_yet_comes_to_the_device_when_it_may() -> None:
    one = state(temperature=0, min_tokens=2)
    assert not _on_device(one)
    one.append(3)
    assert not _on_device(one)
    one.append(4)
    assert _on_device(one)
