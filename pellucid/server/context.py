"""`ServerContext`: what every endpoint is given. Made once by `launch`, never changed."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from starlette.requests import Request

from pellucid.core import InvalidRequestError, PellucidError, StructuredOutputs
from pellucid.engine.client import EngineClient, EngineState
from pellucid.engine.grammars import Grammars
from pellucid.engine.prompts import PromptEncoder
from pellucid.selection.args import EngineArgs
from pellucid.server.args import ServeArgs
from pellucid.server.errors import ApiError, bad_request, engine_dead, from_pellucid, not_found, overloaded, quote
from pellucid.server.generation.sampling import SamplingDefaults
from pellucid.server.http.keys import KeyRing
from pellucid.server.parsers.choice import Detected
from pellucid.server.telemetry.accounting import Accounting
from pellucid.server.telemetry.metrics import ServerMetrics
from pellucid.server.telemetry.record import current_record
from pellucid.server.telemetry.tracing import Tracing
from pellucid.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_CHECKING = 64
"""Grammars that may wait for their check, which takes milliseconds as a rule and a second at most."""

MAX_WARNED_FIELDS = 1000
"""Unknown names after these are no longer logged: a client must not fill the memory with made-up ones."""

LOADING_RETRY_S = 5
DRAINING_RETRY_S = 10
BUSY_RETRY_S = 1


@dataclass(slots=True)
class Lifecycle:
    """What changes: while `draining` no new request is taken; `ignored_fields` are those that were warned of.

    `preparing` counts sequences that were admitted and are not with the engine yet, `checking` grammars that wait for
    their check or are checked.
    """

    draining: bool = False
    preparing: int = 0
    checking: int = 0
    ignored_fields: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The server's parts, and the questions that all endpoints ask of them.

    `grammars` checks structured outputs before anything is queued.
    `model_root` is the model's file or folder name, `trained_max_len` its context in tokens. `started` is Unix time.
    """

    args: ServeArgs
    engine_args: EngineArgs
    engine: EngineClient
    encoder: PromptEncoder
    parsers: Detected
    defaults: SamplingDefaults
    metrics: ServerMetrics
    accounting: Accounting
    tracing: Tracing | None
    grammars: Grammars
    keys: KeyRing
    model_name: str
    model_root: str
    trained_max_len: int
    fingerprint: str
    grammar_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammars"))
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError for a model that came without one."""
        if self.encoder.tokenizer is None:
            raise InvalidRequestError(
                "this model came without a tokenizer: send token ids to /v1/completions", "messages"
            )
        return self.encoder.tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest sequence that is served, in tokens; while the engine loads, the longest that the model allows."""
        return self.trained_max_len if self.engine.plan is None else self.engine.longest

    def tell_ignored(self, names: Sequence[str], why: str) -> None:
        """Name what a request has to no effect: in its answer's header, and each name once in the log."""
        headers = current_record().response_headers
        headers["X-Ignored-Fields"] = ", ".join(filter(None, (headers.get("X-Ignored-Fields"), *names)))
        warned = self.lifecycle.ignored_fields
        fresh = [name for name in names if name not in warned]
        if fresh and len(warned) < MAX_WARNED_FIELDS:
            warned.update(fresh)
            logger.warning("ignored in requests: %s: %s", ", ".join(fresh), why)

    async def check_structured(self, outputs: StructuredOutputs | None) -> None:
        """Raises ApiError 400 for a constraint that can't be compiled: the engine must never see it."""
        if outputs is None:
            return
        if self.lifecycle.checking >= MAX_CHECKING:
            raise overloaded(f"{MAX_CHECKING} grammars wait to be checked", BUSY_RETRY_S)
        self.lifecycle.checking += 1
        try:
            # A thread of its own: they are checked one by one, and slow ones must not hold up chat templates.
            await asyncio.get_running_loop().run_in_executor(self.grammar_thread, self.grammars.check, outputs)
        except PellucidError as error:
            raise from_pellucid(error) from None
        finally:
            self.lifecycle.checking -= 1

    def now(self) -> int:
        """Unix seconds, for `created`."""
        return int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here. None means whichever is served."""
        if name is not None and name != self.model_name:
            raise not_found(f"the model {quote(name)} is not served here; served: {self.model_name}", "model")

    def check_admission(self, sequences: int = 1) -> None:
        """Raises ApiError: 503 while no new request is taken, 400 for more sequences than ever are."""
        reason = self._refusal(sequences)
        if reason is not None:
            self.metrics.request_rejected(reason[0])
            raise reason[1]

    def _refusal(self, sequences: int) -> tuple[str, ApiError] | None:
        engine = self.engine
        if engine.state is EngineState.DEAD:
            return "dead", engine_dead()
        if self.lifecycle.draining:
            message = "the server is shutting down; send this to another"
            return "draining", overloaded(message, DRAINING_RETRY_S, "draining")
        if engine.state is EngineState.LOADING:
            phase = engine.progress.phase
            message = f"the model is not ready yet ({phase}); see /health/ready"
            return "loading", overloaded(message, LOADING_RETRY_S, "loading")
        silence = engine.silence_s()
        if silence > self.args.health_timeout:
            message = f"the engine has not answered for {silence:.0f} s; see /health/ready"
            return "unresponsive", overloaded(message, BUSY_RETRY_S, "unresponsive")
        assert engine.plan is not None
        limit = engine.plan.max_num_seqs + self.args.max_num_queued_reqs
        if sequences > limit:
            raise bad_request(f"{sequences} sequences in one request; this server takes {limit} at a time", "n")
        in_flight = engine.sequences + self.lifecycle.preparing
        if in_flight + sequences > limit:
            message = f"{in_flight} sequences run or wait (limit {limit}: --max-num-seqs + --max-num-queued-reqs)"
            return "max_num_queued_reqs", overloaded(message, BUSY_RETRY_S)
        return None


def context_of(request: Request) -> ServerContext:
    """The context of the application that serves `request`."""
    context = request.scope["pellucid.context"]
    assert isinstance(context, ServerContext)
    return context


def new_id(prefix: str) -> str:
    """A response id such as `chatcmpl-3f...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
