"""An engine process without a model, for `bench.server`: every request gets a token in every step, at once.

It speaks the engine's own messages through the engine's own loop, so that all but the model is what is measured.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import click

from pellucid.core import Request
from pellucid.engine.inputs import load_tokenizer
from pellucid.engine.messages import Ready
from pellucid.engine.process import Channel, EngineLoop, read_spec
from pellucid.engine.startup import make_plan, open_model
from pellucid.engine.step_output import StepOutput
from pellucid.step_plan import SchedulerStats
from pellucid.tokenizer.tokenizer import Tokenizer

MAX_STEPS = 4096
"""Steps that have a token of their own: a client tells by a chunk's text which step made it."""

STAMP = struct.Struct("<d")


def step_tokens(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """(id, text) of `MAX_STEPS` tokens that are ASCII letters and digits, and all different."""
    found: dict[str, int] = {}
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
        if text.isascii() and text.isalnum() and token_id not in tokenizer.special_token_ids:
            found.setdefault(text, token_id)
        if len(found) == MAX_STEPS:
            break
    return [(token_id, text) for text, token_id in found.items()]


class StubSteps:
    """What `EngineLoop` drives instead of a worker. `step_s` is the time that a step takes; 0 is none at all."""

    def __init__(self, token_ids: Sequence[int], step_s: float, stamps: mmap.mmap | None) -> None:
        self._token_ids, self._step_s, self._stamps = token_ids, step_s, stamps
        self._left: dict[str, int] = {}
        self._steps = itertools.count()
        self._due = time.monotonic()
        self.last_step_tokens = 0
        self.dropped = ()

    def add_request(self, request: Request) -> None:
        self._left[request.request_id] = request.params.max_tokens or 1

    def abort(self, request_id: str) -> bool:
        return self._left.pop(request_id, None) is not None

    def finish(self, request_id: str, stop_string: str) -> None:
        self.abort(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def step(self) -> list[StepOutput]:
        self._due = max(self._due + self._step_s, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))
        step = next(self._steps) % len(self._token_ids)
        token_id = self._token_ids[step]
        outputs = []
        for request_id, left in list(self._left.items()):
            last = left == 1
            outputs.append(StepOutput(request_id, 0, token_id, finish_reason="length" if last else None))
            if last:
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
        self.last_step_tokens = len(outputs)
        if self._stamps is not None:
            STAMP.pack_into(self._stamps, step * STAMP.size, time.monotonic())
        return outputs

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._left), 0, 1, 0, 0, 1, 0, 0, 0, 0, 0)

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def check_conservation(self) -> None:
        """There are no pages."""


@click.command()
@click.option("--step-s", type=float, default=0.0)
@click.option("--stamps", type=click.Path(path_type=Path))
def main(step_s: float, stamps: Path | None) -> None:
    """Takes an engine's place behind `pellucid.server.launch.serve`."""
    import sys

    spec = read_spec(sys.stdin.buffer)
    channel = Channel(spec.address)
    files = open_model(spec.args.model)
    plan = make_plan(spec.args, files)
    tokenizer = load_tokenizer(files.checkpoint)
    assert tokenizer is not None
    token_ids = [token_id for token_id, _ in step_tokens(tokenizer)]
    memory = None
    if stamps is not None:
        with stamps.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), MAX_STEPS * STAMP.size)
    channel.send(Ready(plan.to_json(), files.notes, 0.0))
    EngineLoop(StubSteps(token_ids, step_s, memory), channel).run()
    channel.close()


if __name__ == "__main__":
    main()
