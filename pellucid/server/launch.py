"""`serve`: starts both processes, keeps them, and ends them in order. Called by `pellucid serve`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import uvicorn
import uvloop

from pellucid import __version__
from pellucid.core import PellucidError
from pellucid.engine.client import ENGINE_COMMAND, EngineClient, EngineDeadError, EngineState
from pellucid.engine.grammars import Grammars
from pellucid.engine.inputs import load_tokenizer
from pellucid.engine.prompts import PromptEncoder
from pellucid.engine.startup import ModelFiles, make_plan, open_model
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.view import op_lines
from pellucid.server.app import create_app
from pellucid.server.args import ServeArgs
from pellucid.server.context import ServerContext
from pellucid.server.generation.sampling import SamplingDefaults
from pellucid.server.generation.tracked import ServerStoppingError
from pellucid.server.http.connection import limited_protocol
from pellucid.server.http.keys import KeyRing
from pellucid.server.parsers.choice import detect_parsers, override
from pellucid.server.telemetry.accounting import Accounting
from pellucid.server.telemetry.logs import LogHandler, configure_logging
from pellucid.server.telemetry.metrics import ServerMetrics
from pellucid.server.telemetry.notify import Notifier
from pellucid.server.telemetry.tracing import create_tracing

LAST_WORDS_S = 1.0
"""How long clients get to be told: those of running requests, and after the engine's death new ones and probes."""

POLL_S = 0.05
KEEP_ALIVE_S = 75
"""Above the 60 s of common load balancers, so that they and not we close idle connections."""

LOADING_NOTICE_S = 60.0

LOOPBACK = ("127.0.0.1", "::1", "localhost")

logger = logging.getLogger(__name__)


def serve(engine_args: EngineArgs, args: ServeArgs, engine_command: Sequence[str] = ENGINE_COMMAND) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    Raises:
        PellucidError: what was asked can't be started.
        EngineDeadError: the engine could not start, or ended by itself.
    """
    listener = _listen(args.host, args.port)
    log = configure_logging(args.log_format, args.log_level, sys.stderr)
    try:
        context, _, _ = prepare(engine_args, args, engine_command)
        if not context.keys.current() and args.host not in LOOPBACK:
            logger.warning("no API key is set and %s may be reached from elsewhere; see --api-key-file", args.host)
        uvloop.run(_Server(context, listener, log).run())
    except PellucidError as error:
        if args.log_format == "text":
            raise
        # Whoever collects JSON lines gets the last one as JSON too.
        logger.error("%s", error)
        sys.exit(error.exit_code)
    finally:
        listener.close()
        log.close()


def prepare(
    engine_args: EngineArgs, args: ServeArgs, engine_command: Sequence[str] = ENGINE_COMMAND
) -> tuple[ServerContext, ModelFiles, ExecutionPlan]:
    """Everything that can be made, and so refused, before a process is started or a weight is read.

    The plan is made here to refuse early, and once more by the engine process, which runs on its own.

    Raises:
        PellucidError: a flag, the model, or what they come to together.
    """
    keys = KeyRing(args.api_key, args.api_key_file)
    files = open_model(engine_args.model, engine_args.load_format)
    here = replace(engine_args, model=str(files.path))
    context = _make_context(here, engine_args.model, args, keys, files, engine_command)
    return context, files, make_plan(here, files, tell=False)


def _listen(host: str, port: int) -> socket.socket:
    """The socket first: a port in use must not be found out after the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Bound alone, it would not keep out another server that starts now.
        listener.listen()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PellucidError(f"can't listen on {host}:{port}: {reason}; choose another --host or --port") from None
    return listener


def _make_context(
    engine_args: EngineArgs,
    asked_model: str,
    args: ServeArgs,
    keys: KeyRing,
    files: ModelFiles,
    engine_command: Sequence[str],
) -> ServerContext:
    """All parts, before anything runs."""
    tokenizer = load_tokenizer(files.checkpoint, engine_args.chat_template)
    traits = files.traits
    encoder = PromptEncoder(tokenizer, traits.vocab_size, traits.eos_token_ids)
    added = frozenset[str]() if tokenizer is None else tokenizer.added_tokens
    detected = detect_parsers(added, None if tokenizer is None else tokenizer.chat_template)
    use_config = args.generation_config == "auto"
    name = engine_args.served_model_name or asked_model
    metrics = ServerMetrics(args.metrics_prefix, name, traits.max_position)
    return ServerContext(
        args=args,
        engine_args=engine_args,
        engine=EngineClient(encoder, engine_command),
        encoder=encoder,
        parsers=override(detected, args.tool_call_parser, args.reasoning_parser),
        defaults=SamplingDefaults.from_checkpoint(files.path) if use_config else SamplingDefaults(),
        metrics=metrics,
        accounting=Accounting(metrics),
        tracing=create_tracing(args.otlp_traces_endpoint),
        grammars=Grammars(tokenizer, encoder.eos_token_ids, traits.vocab_size),
        keys=keys,
        model_name=name,
        model_root=files.path.name,
        trained_max_len=traits.max_position,
        fingerprint=f"pellucid-{__version__}",
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: `_Server` drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """The life of a server: load, serve, drain, end."""

    def __init__(self, context: ServerContext, listener: socket.socket, log: LogHandler) -> None:
        self._context, self._listener = context, listener
        self._notifier = Notifier()
        self._stop_signals = 0
        self._stopping = asyncio.Event()
        engine, metrics = context.engine, context.metrics
        metrics.watch(
            engine_up=lambda: engine.state is EngineState.READY and not self._is_silent(),
            step_age_s=engine.silence_s,
            log_lines_dropped=lambda: log.dropped,
            tasks=lambda: len(asyncio.all_tasks()),
        )
        engine.on_step = context.accounting.on_step

    async def run(self) -> None:
        """Raises EngineDeadError when the engine ended by itself."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        # Its default would end the server; keys are read again without it, and there is nothing else to reload.
        loop.add_signal_handler(signal.SIGHUP, logger.info, "SIGHUP: keys are read again by themselves; nothing to do")
        context, engine = self._context, self._context.engine
        await engine.start(context.engine_args)
        server = self._make_uvicorn()
        tasks = [
            asyncio.create_task(server.serve(sockets=[self._listener])),
            asyncio.create_task(self._announce()),
            asyncio.create_task(self._notifier.keep_watchdog()),
            asyncio.create_task(self._watch_silence()),
        ]
        try:
            await self._wait_for_end(tasks[0])
            if engine.failure is None:
                await self._drain(server)
            else:
                logger.error("%s; %d requests are told and the server ends", engine.failure, engine.running)
                await asyncio.sleep(LAST_WORDS_S)
        finally:
            server.should_exit = True
            await tasks[0]
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
            failure = engine.failure
            await engine.close()
            context.grammars.close()
            if context.tracing is not None:
                context.tracing.shutdown()
        # A service manager's SIGTERM may reach an engine that is too young to ignore it: the end that was asked for.
        if failure is not None and not (self._stop_signals and engine.plan is None):
            raise failure
        logger.info("stopped")

    def _make_uvicorn(self) -> _Uvicorn:
        args = self._context.args
        config = uvicorn.Config(
            create_app(self._context),
            http=limited_protocol(int(args.max_header_kb * 1000)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        return _Uvicorn(config)

    def _on_stop_signal(self) -> None:
        self._stop_signals += 1
        self._stopping.set()

    async def _wait_for_end(self, http: asyncio.Task[None]) -> None:
        """A signal, the engine's end, or that of `http`, which would leave a server that hears nothing."""
        ends = [
            asyncio.create_task(self._stopping.wait()),
            asyncio.create_task(self._context.engine.ended.wait()),
        ]
        await asyncio.wait([http, *ends], return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def _announce(self) -> None:
        """Tell people and the service manager of the start, as it goes on and when it is over."""
        context, engine = self._context, self._context.engine
        host, port = self._listener.getsockname()[:2]
        logger.info("listening on http://%s:%d; the model loads", host, port)
        ready = asyncio.create_task(engine.wait_ready())
        told = ""
        while not ready.done():
            if engine.progress.phase != told:
                told = engine.progress.phase
                logger.info("%s", told)
            self._notifier.loading(told, LOADING_NOTICE_S)
            await asyncio.wait({ready}, timeout=1.0)
        if ready.exception() is not None:
            return
        assert engine.plan is not None
        plan = engine.plan
        context.metrics.set_plan(plan.to_json())
        for line in _startup_lines(context, plan):
            logger.info("%s", line)
        _spare_the_collector()
        text = f"{context.model_name} ready on http://{host}:{port} after {engine.load_s:.1f} s"
        logger.info("%s", text)
        self._notifier.ready(text)

    def _in_flight(self) -> int:
        """Requests with the engine, and sequences on their way to it."""
        return self._context.engine.running + self._context.lifecycle.preparing

    def _is_silent(self) -> bool:
        return self._context.engine.silence_s() > self._context.args.health_timeout

    async def _watch_silence(self) -> None:
        """Into the log when the engine stops answering, and when it answers again."""
        engine, silent_since = self._context.engine, None
        while True:
            await asyncio.sleep(min(1.0, self._context.args.health_timeout / 2))
            if engine.state is not EngineState.READY:
                continue
            if silent_since is None and self._is_silent():
                silent_since = engine.last_heard
                logger.warning(
                    "the engine has not answered for %.1f s, in step %d with %d requests in flight; new ones get 503",
                    engine.silence_s(),
                    engine.last_step + 1,
                    engine.running,
                )
            elif silent_since is not None and not self._is_silent():
                logger.warning("the engine answers again, after %.1f s", engine.last_heard - silent_since)
                silent_since = None

    async def _drain(self, server: _Uvicorn) -> None:
        """No new requests; the running ones get their time; a second signal takes it from them."""
        context, engine = self._context, self._context.engine
        context.lifecycle.draining = True
        seconds = context.args.drain_timeout
        logger.info("stopping: %d requests run and get up to %.0f s", engine.running, seconds)
        self._notifier.stopping(f"draining {engine.running} requests")
        begin = time.monotonic()
        idle = await self._until(lambda: self._in_flight() == 0 or self._stop_signals > 1, seconds)
        # What the engine is done with may be on its way to a slow reader; what comes from now on is refused anyway.
        answers, rest = set(server.server_state.tasks), seconds - (time.monotonic() - begin)
        await self._until(lambda: all(one.done() for one in answers) or self._stop_signals > 1, rest)
        if not idle or engine.running:
            logger.warning("giving up %d requests that still run", engine.running)
            engine.fail_all(ServerStoppingError("the server is shutting down and gave this request up"))
            await self._until(lambda: engine.running == 0, LAST_WORDS_S)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `condition` came true in time, or the engine ended."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                return False
            await asyncio.sleep(POLL_S)
        return True


def _spare_the_collector() -> None:
    """What lives as long as the server (a vocabulary, mostly) is looked at no more, and the rest less often.

    Otherwise the cycle collector takes a third of the time between a step's tokens and their chunks.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _startup_lines(context: ServerContext, plan: ExecutionPlan) -> Iterator[str]:
    """What runs, how much fits and who may ask: what one looks for in a log afterwards."""

    def told(op: str) -> str:
        decision = plan.decision(op)
        return f"{op}={decision.value} ({decision.how})"

    yield f"model: {context.model_root}, {told('device')}, {told('dtype')}, {told('kv.dtype')}"
    tokens = plan.num_kv_pages * plan.page_size
    pool = f"{tokens} tokens of KV in {plan.num_kv_pages} pages"
    yield f"capacity: {told('max_model_len')}, {pool}, {told('max_num_seqs')}"
    for line in op_lines([d for d in plan.decisions if _is_kernel(d.op)]):
        yield f"kernels: {line}"
    yield "reasons of every choice: at /plan, or pellucid explain"
    if context.encoder.tokenizer is None:
        yield "no tokenizer: text is refused; /v1/completions takes token ids, and return_token_ids gives them back"
    yield f"parsers: {context.parsers.because}"
    defaults = ", ".join(f"{name}={value}" for name, value in context.defaults.given().items()) or "none of the model's"
    keys = len(context.keys.current())
    yield f"sampling defaults: {defaults}; API keys: {keys or 'none, everybody may ask'}"


def _is_kernel(op: str) -> bool:
    return op.partition(".")[0] in ("attention", "linear", "moe")


__all__ = ["EngineDeadError", "serve"]
