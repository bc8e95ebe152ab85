"""`EngineClient`: an engine process, driven from an asyncio event loop. Used by the server.

Text is made on this side: tokenizer, detokenizer and stop strings cost the engine no time between steps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from pellucid.core import PellucidError, SamplingParams
from pellucid.engine.generation import Generation
from pellucid.engine.messages import (
    Abort,
    Add,
    Call,
    EngineSpec,
    Failed,
    Finish,
    Loading,
    Log,
    Outputs,
    Ready,
    Reply,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)
from pellucid.engine.output import TextDelta
from pellucid.engine.output_processor import OutputProcessor
from pellucid.engine.prompts import EncodedPrompt, PromptEncoder
from pellucid.engine.startup import scheduler_config
from pellucid.scheduler.admission import resolve_max_tokens
from pellucid.scheduler.config import SchedulerConfig
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import ExecutionPlan
from pellucid.step_plan import SchedulerStats

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "pellucid.engine.process")
EXIT_GRACE_S = 5.0


class EngineDeadError(PellucidError):
    """The engine process has ended, or never started; the message says why."""

    exit_code = 3


class EngineState(Enum):
    """`DEAD` is final: a client has one engine process in its life."""

    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


class EngineClient:
    """One engine process and the requests it runs. Every method belongs to one event loop.

    Attributes:
        state: loading, ready, dead.
        progress: the newest report of start-up.
        plan, notes: what the engine runs on, and notes on the model; set when it is ready.
        stats: the newest statistics.
        last_step, last_step_time: number of the latest step, and the monotonic time at which it was heard of.
        last_heard: monotonic time of the engine's latest sign of life.
        on_step: called with each step's message, after its outputs were handed over.
    """

    def __init__(self, encoder: PromptEncoder, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._encoder, self._command = encoder, command
        self.state = EngineState.LOADING
        self.progress = Loading("starting the engine process")
        self.plan: ExecutionPlan | None = None
        self.notes: tuple[str, ...] = ()
        self.load_s = 0.0
        self.stats: SchedulerStats | None = None
        self.last_step = 0
        self.last_step_time = self.last_heard = time.monotonic()
        self.on_step: Callable[[Outputs, Sequence[TextDelta]], None] | None = None
        self.failure: EngineDeadError | None = None
        self.ended = asyncio.Event()
        self._ready = asyncio.Event()
        self._limits: SchedulerConfig | None = None
        self._outputs = OutputProcessor(encoder.tokenizer, shares_prompts=True)
        self._generations: dict[str, Generation] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, args: EngineArgs, *, force_preempt_every: int | None = None) -> None:
        """Start the process; returns at once. `wait_ready` waits for the model."""
        self._folder = Path(tempfile.mkdtemp(prefix="pellucid-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        address = f"ipc://{self._folder}/engine"
        self._socket.bind(address)
        # In a session of its own: Ctrl-C is for the server, and this is not Python yet, which could ignore it.
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        spec = encode(EngineSpec(args, address, force_preempt_every))
        assert self._process.stdin is not None
        self._process.stdin.write(len(spec).to_bytes(4, "big") + spec)
        self._keep(self._receive())
        self._keep(self._watch())

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    async def wait_ready(self) -> None:
        """Raises EngineDeadError when the engine could not start; its exit code is that of the reason."""
        await self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def generate(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        arrival_time: float | None = None,
    ) -> Generation:
        """Begin a request, which arrived at `arrival_time` (monotonic seconds; None is now).

        Raises:
            InvalidRequestError: it can never be served; nothing was sent.
            EngineDeadError: there is no engine any more.
        """
        if self.failure is not None:
            raise self.failure
        assert self._limits is not None, "the engine is not ready"
        request = self._encoder.make_request(prompt, params, request_id, cache_salt, arrival_time=arrival_time)
        resolve_max_tokens(request, self._limits)
        members = self._outputs.add(request, prompt.text)
        generation = Generation(request, lambda: self._close(generation))
        self._generations[request_id] = generation
        for member in members:
            self._send(Add(member))
        return generation

    async def call(self, verb: str, timeout_s: float | None = None) -> Reply:
        """Have the engine loop do something between two steps: `ping`, `reset_prefix_cache`.

        Raises:
            TimeoutError: no answer in time: the loop hangs, or runs a long step.
            EngineDeadError: there is no engine any more.
        """
        if self.failure is not None:
            raise self.failure
        number = next(self._numbers)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        self._send(Call(number, verb))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        finally:
            del self._calls[number]

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, prompt and output. Only while ready."""
        assert self._limits is not None, "the engine is not ready"
        return min(self._limits.max_model_len, self._limits.pool_tokens)

    @property
    def sequences(self) -> int:
        """Samples of all prompts in `running`, each of which the scheduler counts for itself."""
        return sum(generation.samples for generation in self._generations.values())

    @property
    def running(self) -> int:
        """Prompts begun and neither finished nor closed."""
        return len(self._generations)

    def fail_all(self, reason: PellucidError) -> None:
        """End every generation with `reason`; their owners close them."""
        for generation in list(self._generations.values()):
            generation.fail(reason)

    def silence_s(self) -> float:
        """Seconds since the engine loop was last heard of; an idle one is heard of twice a second."""
        return time.monotonic() - self.last_heard

    async def close(self) -> None:
        """Stop the engine and wait for its end."""
        # One that still loads reads no messages.
        if self._process.returncode is None and self.state is EngineState.READY:
            self._send(Stop())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), EXIT_GRACE_S)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._check_task)

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A task of ours that raises is a bug; without it, streams would wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the engine client failed", exc_info=error)
            self._fail("the API process lost its engine to an internal error; the log has the traceback", 3)

    def _send(self, message: ToEngine) -> None:
        # Without a high-water mark this never waits: the future that it returns is done already.
        self._socket.send(encode(message))

    async def _receive(self) -> None:
        while True:
            message = decode_from_engine(await self._socket.recv())
            self.last_heard = time.monotonic()
            match message:
                case Outputs():
                    self._take_outputs(message)
                    # When more messages wait, `recv` returns at once: the streams must have their turn between steps.
                    await asyncio.sleep(0)
                case Loading():
                    self.progress = message
                case Ready():
                    self._take_ready(message)
                case Reply(number):
                    self.stats = message.stats
                    if number in self._calls and not self._calls[number].done():
                        self._calls[number].set_result(message)
                case Log():
                    _write_log(message)
                case Failed():
                    self._fail(message.message, message.exit_code)

    def _take_ready(self, message: Ready) -> None:
        self.plan, self.notes, self.load_s = ExecutionPlan.from_json(message.plan), message.notes, message.load_s
        self._limits = scheduler_config(self.plan)
        self._outputs = OutputProcessor(self._encoder.tokenizer, shares_prompts=self.plan.enable_prefix_caching)
        self.state = EngineState.READY
        self._ready.set()

    def _take_outputs(self, message: Outputs) -> None:
        if message.stats is not None:
            self.stats = message.stats
        if message.step != self.last_step:
            self.last_step, self.last_step_time = message.step, self.last_heard
        deltas = []
        touched: dict[str, Generation] = {}
        for output in message.outputs:
            delta, stop_string, released = self._outputs.push(output)
            if stop_string is not None:
                self._send(Finish(output.request_id, stop_string))
            for request in released:
                self._send(Add(request))
            if delta is not None:
                deltas.append(delta)
                generation = touched[delta.request_id] = self._generations[delta.request_id]
                generation.push(delta)
        for request_id, generation in touched.items():
            if generation.lacks_prompt_logprobs:
                generation.prompt_logprobs = self._outputs.prompt_logprobs(request_id)
                generation.lacks_prompt_logprobs = False
            if generation.is_whole:
                self._outputs.abort(request_id)
                del self._generations[request_id]
            generation.wake()
        if self.on_step is not None:
            self.on_step(message, deltas)

    def _close(self, generation: Generation) -> None:
        request_id = generation.request_id
        # Another may have its id by now.
        if self._generations.get(request_id) is generation:
            del self._generations[request_id]
            members = self._outputs.abort(request_id)
            if members and self.failure is None:
                self._send(Abort(members))

    async def _watch(self) -> None:
        code = await self._process.wait()
        # Its last words may still be in the socket.
        await asyncio.sleep(0.1)
        if code < 0:
            memory = " (out of memory, if the kernel's log says so)" if -code == signal.SIGKILL else ""
            how = f"was killed by signal {-code}{memory}"
        else:
            how = f"ended with exit code {code}; the log says why"
        self._fail(f"the engine process {how}", EngineDeadError.exit_code)

    def _fail(self, message: str, exit_code: int) -> None:
        if self.failure is None:
            self.failure = EngineDeadError(message)
            self.failure.exit_code = exit_code
        self.state = EngineState.DEAD
        self.fail_all(self.failure)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(self.failure)
        self._ready.set()
        self.ended.set()


def _write_log(message: Log) -> None:
    """A record of the engine process, as if it had been made here."""
    target = logging.getLogger(message.logger)
    if target.isEnabledFor(message.level):
        record = target.makeRecord(message.logger, message.level, "", 0, "%s", (message.message,), None)
        record.exc_text = message.trace or None
        target.handle(record)
