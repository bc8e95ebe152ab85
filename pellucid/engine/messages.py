"""What the API process and the engine process say to each other: msgpack over a ZeroMQ pair socket, no pickle ever.

`client` speaks one side and `process` the other. Outputs are arrays, not maps: one message a step carries a token of
every running request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pellucid.core import Request
from pellucid.engine.step_output import StepOutput
from pellucid.selection.args import EngineArgs
from pellucid.step_plan import SchedulerStats


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages; the tag is the class's name."""


class EngineSpec(_Message, tag=True, frozen=True):
    """What an engine process is to load, sent over its standard input. `address` is the socket to connect to."""

    args: EngineArgs
    address: str
    force_preempt_every: int | None = None


# To the engine ------------------------------------------------------------------------------------------------------


class Add(_Message, tag=True, frozen=True):
    """Begin a request; what can't be served comes back as an output with a failure."""

    request: Request


class Abort(_Message, tag=True, frozen=True):
    """Forget these requests within one step; unknown ids are ignored."""

    request_ids: tuple[str, ...]


class Finish(_Message, tag=True, frozen=True):
    """A stop string was found in the request's text."""

    request_id: str
    stop_string: str


class Call(_Message, tag=True, frozen=True):
    """Do something between two steps, and answer with a `Reply` of the same number."""

    number: int
    verb: str


class Stop(_Message, tag=True, frozen=True):
    """End the process after the step that runs."""


# From the engine ----------------------------------------------------------------------------------------------------


class Loading(_Message, tag=True, frozen=True):
    """How far start-up is. Bytes are 0 in phases that read none."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    eta_s: float | None = None


class Ready(_Message, tag=True, frozen=True):
    """The engine takes requests. `plan` is `ExecutionPlan.to_json()`."""

    plan: dict[str, Any]
    notes: tuple[str, ...]
    load_s: float


class Outputs(_Message, tag=True, frozen=True):
    """What one step did, or a heartbeat of an idle engine (`step_tokens` is 0). `stats` come a few times a second."""

    step: int
    step_tokens: int
    outputs: list[StepOutput]
    stats: SchedulerStats | None = None


class Reply(_Message, tag=True, frozen=True):
    """The answer to a `Call`; `error` is why it failed."""

    number: int
    step: int
    stats: SchedulerStats
    error: str | None = None


class Log(_Message, tag=True, frozen=True):
    """A log record of the engine process, written by the API process so that one writer owns the log."""

    level: int
    logger: str
    message: str
    trace: str = ""


class Failed(_Message, tag=True, frozen=True):
    """The engine can't start or go on, and ends after this. `exit_code` is that of the error in the CLI."""

    message: str
    exit_code: int


ToEngine = Add | Abort | Finish | Call | Stop
FromEngine = Loading | Ready | Outputs | Reply | Log | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_spec = msgspec.msgpack.Decoder(EngineSpec).decode
