"""The engine process: `python -m pellucid.engine.process`. Loads a model and steps it for the API process.

It is told what to load over standard input, and lives no longer than the other end of that pipe: an API process that
is killed takes its engine with it. All else goes through the ZeroMQ socket of `messages`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from typing import BinaryIO, Protocol

import zmq

from pellucid.core import InvalidRequestError, PellucidError, Request, SamplingParams
from pellucid.engine.grammars import Grammars
from pellucid.engine.inputs import load_tokenizer
from pellucid.engine.messages import (
    Abort,
    Add,
    Call,
    EngineSpec,
    Failed,
    Finish,
    FromEngine,
    Loading,
    Log,
    Outputs,
    Ready,
    Reply,
    Stop,
    ToEngine,
    decode_spec,
    decode_to_engine,
    encode,
)
from pellucid.engine.prompts import PromptEncoder
from pellucid.engine.startup import DebugModes, load_worker, make_plan, open_model
from pellucid.engine.step_output import RequestFailure, StepOutput
from pellucid.engine.worker import Worker
from pellucid.models.weights import LoadProgress
from pellucid.selection.plan import ExecutionPlan
from pellucid.step_plan import SchedulerStats

HEARTBEAT_S = 0.5
"""An idle engine says so this often."""

STATS_INTERVAL_S = 0.2
"""Counting held pages is not free, so not every step sends statistics."""

PROGRESS_INTERVAL_S = 0.1

MAX_FAILED_STEPS = 3
"""A step that raises costs the requests in it; so many in a row mean that the device or the engine is broken."""

WARMUP_TOKENS = 8

PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""

logger = logging.getLogger(__name__)


class Steps(Protocol):
    """What the loop drives: a `Worker`, or a stand-in that measures everything around it."""

    @property
    def last_step_tokens(self) -> int: ...
    @property
    def dropped(self) -> tuple[str, ...]: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def finish(self, request_id: str, stop_string: str) -> None: ...
    def has_unfinished(self) -> bool: ...
    def step(self) -> list[StepOutput]: ...
    def stats(self) -> SchedulerStats: ...
    def reset_prefix_cache(self) -> None: ...
    def check_conservation(self) -> None: ...


class EngineBrokenError(PellucidError):
    """The engine can't go on; a new process may."""

    exit_code = 3


class Channel:
    """This process's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # Unsent logs and outputs must not keep a process alive whose peer is gone.
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        # Log records may come from the loading threads of libraries.
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        data = encode(message)
        with self._lock:
            self._socket.send(data)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """What has arrived, waiting up to `timeout_s` for the first message."""
        messages: list[ToEngine] = []
        wait = int(timeout_s * 1000)
        while self._socket.poll(0 if messages else wait):
            messages.append(decode_to_engine(self._socket.recv()))
        return messages

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class EngineLoop:
    """Messages in, steps, outputs out, until told to stop."""

    def __init__(self, worker: Steps, channel: Channel) -> None:
        self._worker, self._channel = worker, channel
        self._step = 0
        self._failed_steps = 0
        self._live: set[str] = set()
        self._stats_due = 0.0

    def run(self) -> None:
        """Returns when a `Stop` arrives.

        Raises:
            PellucidError: steps fail one after the other.
        """
        while True:
            busy = self._worker.has_unfinished()
            rejected: list[StepOutput] = []
            for message in self._channel.receive(0.0 if busy else HEARTBEAT_S):
                if isinstance(message, Stop):
                    return
                self._handle(message, rejected)
            steps = self._worker.has_unfinished()
            outputs = self._try_step() if steps else []
            self._send(rejected + outputs, self._worker.last_step_tokens if steps else 0)

    def _handle(self, message: ToEngine, rejected: list[StepOutput]) -> None:
        match message:
            case Add(request):
                try:
                    self._worker.add_request(request)
                    self._live.add(request.request_id)
                except PellucidError as error:
                    failure = RequestFailure.of(error)
                    rejected.append(StepOutput(request.request_id, finish_reason="abort", failure=failure))
            case Abort(request_ids):
                for request_id in request_ids:
                    self._worker.abort(request_id)
                self._live.difference_update(request_ids)
            case Finish(request_id, stop_string):
                self._live.discard(request_id)
                self._worker.finish(request_id, stop_string)
            case Call():
                self._channel.send(self._answer(message))

    def _answer(self, call: Call) -> Reply:
        error = None
        try:
            match call.verb:
                case "ping":
                    pass
                case "reset_prefix_cache":
                    self._worker.check_conservation()
                    self._worker.reset_prefix_cache()
                case _:
                    error = f"the engine knows no {call.verb!r}"
        except RuntimeError as failure:
            error = str(failure)
        return Reply(call.number, self._step, self._worker.stats(), error)

    def _try_step(self) -> list[StepOutput]:
        """One step. When it raises, the requests in it end with the reason; those that wait go on waiting."""
        self._step += 1
        try:
            outputs = self._worker.step()
        except Exception as error:
            self._failed_steps += 1
            logger.exception("step %d failed", self._step)
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise EngineBrokenError(f"{MAX_FAILED_STEPS} steps in a row failed") from error
            failure = RequestFailure("the engine failed in a step that computed this request; its log says why")
            # Without a plan there is no telling whose fault it was.
            ended = self._live.intersection(self._worker.dropped) or set(self._live)
            for request_id in ended:
                self._worker.abort(request_id)
            self._live -= ended
            return [StepOutput(request_id, finish_reason="abort", failure=failure) for request_id in ended]
        self._failed_steps = 0
        self._live.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        return outputs

    def _send(self, outputs: list[StepOutput], step_tokens: int) -> None:
        now = time.monotonic()
        stats = None
        if now >= self._stats_due or not self._live:
            stats = self._worker.stats()
            self._stats_due = now + STATS_INTERVAL_S
        self._channel.send(Outputs(self._step, step_tokens, outputs, stats))


class _ChannelHandler(logging.Handler):
    """Sends this process's log records to the process that writes the log."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        trace = "" if record.exc_info is None else logging.Formatter().formatException(record.exc_info)
        self._channel.send(Log(record.levelno, record.name, record.getMessage(), trace))


def main() -> None:
    _die_with_parent()
    # The API process decides when the engine ends; a terminal's or a service manager's signals reach both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = read_spec(sys.stdin.buffer)
    channel = Channel(spec.address)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_ChannelHandler(channel)])
    code = 0
    try:
        worker, ready = load(spec, channel)
        warm_up(worker)
        channel.send(ready)
        EngineLoop(worker, channel).run()
    except PellucidError as error:
        channel.send(Failed(str(error), error.exit_code))
        code = error.exit_code
    except Exception:
        logger.exception("the engine process failed")
        channel.send(Failed("the engine process failed; the log says why", EngineBrokenError.exit_code))
        code = EngineBrokenError.exit_code
    finally:
        channel.close()
    sys.exit(code)


def _die_with_parent() -> None:
    """The kernel's part: it ends a process that is stopped too, or stuck where Python's threads get no turn."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_spec(stream: BinaryIO) -> EngineSpec:
    """The spec at the head of `stream`; a thread then waits for its end, which is the end of this process."""
    size = int.from_bytes(stream.read(4), "big")
    spec = decode_spec(stream.read(size))

    def outlive_nobody() -> None:
        # Not through `stream`: its lock would be held by this thread when the process ends.
        os.read(stream.fileno(), 1)
        os._exit(1)

    threading.Thread(target=outlive_nobody, name="api-process-watch", daemon=True).start()
    return spec


def load(spec: EngineSpec, channel: Channel) -> tuple[Worker, Ready]:
    """A worker, and what the API process needs to know of it. Raises PellucidError as `LLM` does."""
    begin = time.monotonic()
    channel.send(Loading("reading the model's headers"))
    files = open_model(spec.args.model, spec.args.load_format)
    channel.send(Loading("choosing the plan"))
    plan = make_plan(
        spec.args, files, measure=True, on_progress=lambda what: channel.send(Loading(f"measuring {what}"))
    )
    tokenizer = load_tokenizer(files.checkpoint, spec.args.chat_template)
    eos = PromptEncoder(tokenizer, files.traits.vocab_size, files.traits.eos_token_ids).eos_token_ids

    grammars = Grammars(tokenizer, eos, files.traits.vocab_size)

    channel.send(Loading("loading weights"))
    due = 0.0

    def on_progress(progress: LoadProgress) -> None:
        nonlocal due
        if progress.seconds >= due:
            due = progress.seconds + PROGRESS_INTERVAL_S
            channel.send(Loading("loading weights", progress.done, progress.total, progress.eta_s))

    worker = load_worker(
        files,
        plan,
        on_progress=on_progress,
        debug=DebugModes(spec.force_preempt_every),
        compile_constraint=grammars.compile,
    )
    grammars.prepare()
    if _needs_one_torch_thread(plan):
        import torch

        torch.set_num_threads(1)
    channel.send(Loading("first steps"))
    return worker, Ready(plan.to_json(), files.notes, time.monotonic() - begin)


def _needs_one_torch_thread(plan: ExecutionPlan) -> bool:
    """Whether torch is left with single rows: our own kernels have their own threads, and on a busy machine torch's
    cost a time slice for each small operation of the sampler (30 ms a row instead of 1 with two other processes)."""
    families = [d for d in plan.decisions if d.op.partition(".")[0] in ("attention", "linear", "moe")]
    return plan.device == "cpu" and all(decision.value in ("cpu_native", None) for decision in families)


def warm_up(worker: Worker) -> None:
    """A prefill and two decode steps: ready means that every kernel of the plan has run once.

    Raises:
        PellucidError: a kernel of the plan does not run here.
    """
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    try:
        # `capture_hidden` keeps it out of the prefix cache's statistics, which are about requests of people.
        worker.add_request(Request("warm-up", (0,) * WARMUP_TOKENS, params, capture_hidden=True))
        while worker.has_unfinished():
            for output in worker.step():
                if output.failure is not None:
                    raise output.failure.as_exception()
    except InvalidRequestError:
        # A pool or a context smaller than the warm-up: what fits will run, only unproven.
        logger.warning("the first steps were skipped: %d tokens do not fit this engine", WARMUP_TOKENS + 3)
    except RuntimeError as error:
        raise PellucidError(f"the plan's kernels do not run on this machine: {error}") from error
    worker.reset_prefix_cache()


if __name__ == "__main__":
    main()
