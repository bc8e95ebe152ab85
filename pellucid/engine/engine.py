"""`Engine`: a loaded model that takes prompts and gives text, step by step. Under `LLM` and `AsyncLLM`."""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pellucid.core import InvalidRequestError, Request, RequestOutput, SamplingParams, check_token_id
from pellucid.engine.inputs import check_installed, check_tokenizer, load_tokenizer, slow_path_reasons
from pellucid.engine.output import OutputBuilder, TextDelta
from pellucid.engine.worker import Worker
from pellucid.hardware.facts import Hardware
from pellucid.hardware.probe import probe
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fingerprint import fingerprint
from pellucid.models.hub import resolve_model
from pellucid.models.weights import LoadProgress
from pellucid.runner.model_runner import ModelRunner
from pellucid.scheduler.config import SchedulerConfig
from pellucid.scheduler.scheduler import Scheduler
from pellucid.selection.args import EngineArgs
from pellucid.selection.memory import stored_bytes
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.resolve import resolve
from pellucid.step_plan import SchedulerStats
from pellucid.traits.model import ModelTraits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt ready for the engine. `text` is None when it came as token ids."""

    text: str | None
    token_ids: tuple[int, ...]


Prompt = str | Sequence[int] | EncodedPrompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DebugModes:
    """Modes that force rare paths. `None` is off."""

    force_preempt_every: int | None = None


class Engine:
    """Everything of one model in one process.

    Start-up refuses what it can before weights are read: the order is files, traits, plan, tokenizer, tensors, weights.
    `requires`: what prompts will be; text needs a tokenizer, a chat its template too.

    Raises:
        PellucidError: one line that names the thing and the remedy.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        hardware: Hardware | None = None,
        capture_layers: Sequence[int] = (),
        on_progress: Callable[[LoadProgress], None] | None = None,
        debug: DebugModes | None = None,
        requires: Literal["ids", "text", "chat"] = "ids",
    ) -> None:
        check_installed()
        self.args = args
        self.path = resolve_model(args.model)
        checkpoint = Checkpoint.open(self.path)
        report = checkpoint.report()
        report.require_supported()
        checkpoint.require_weights()
        self.traits: ModelTraits = report.traits
        self.notes = (*report.notes, *report.conflicts)
        for conflict in report.conflicts:
            logger.warning("%s: %s", self.path.name, conflict)
        stored = stored_bytes(checkpoint.tensors, self.traits.num_layers)
        self.plan: ExecutionPlan = resolve(args, self.traits, hardware or probe(), stored_bytes=stored)
        self.plan.check_startable()
        for reason in slow_path_reasons(self.plan):
            logger.warning("%s", reason)
        self.tokenizer = load_tokenizer(checkpoint, args.chat_template)
        check_tokenizer(self.tokenizer, requires, args.model)
        self.capture_layers = _check_layers(capture_layers, self.traits.num_layers)
        runner = ModelRunner(self.traits, checkpoint.tensors, self.plan, self.capture_layers, on_progress)
        known = (*self.traits.eos_token_ids, *(self.tokenizer.eos_token_ids if self.tokenizer is not None else ()))
        # A tokenizer may know more tokens than the model has rows for.
        self._eos_token_ids = tuple(dict.fromkeys(i for i in known if i < self.traits.vocab_size))
        self._worker = Worker(Scheduler(_scheduler_config(self.plan, debug or DebugModes())), runner)
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, tuple[str, OutputBuilder]] = {}
        self._ids = itertools.count()

    def add_prompt(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        capture_hidden: bool = False,
    ) -> str:
        """Queue a prompt (text, or token ids) and return its id; all `params.n` samples share it.

        Raises:
            InvalidRequestError: it can never be served as asked, or its id is in use; nothing is queued.
        """
        if request_id is not None and request_id in self._groups:
            raise InvalidRequestError(f"request_id {request_id!r} is in use; give each request its own", "request_id")
        encoded = self.encode_prompt(prompt)
        params.check_vocabulary(self.traits.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; this model came without one", "stop")
        group_id = request_id or next(name for i in self._ids if (name := f"request-{i}") not in self._groups)
        request = Request(
            request_id=group_id,
            prompt_token_ids=encoded.token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            cache_salt=cache_salt,
            capture_hidden=capture_hidden,
            arrival_time=time.monotonic(),
        )
        members = [
            replace(request, request_id=f"{group_id}#{index}", params=params.single(index)) for index in range(params.n)
        ]
        builders = [
            OutputBuilder(member, index, self.tokenizer, continues_text=encoded.text is not None)
            for index, member in enumerate(members)
        ]
        # The samples differ in their seed alone: the first is refused, or none. The others come when its prompt is in
        # the prefix cache, and do not compute it again.
        first = 1 if self.plan.enable_prefix_caching else len(members)
        group = _Group(request, encoded.text, builders, members[first:])
        for member in members[:first]:
            self._worker.add_request(member)
        for member, builder in zip(members, builders, strict=True):
            self._members[member.request_id] = (group_id, builder)
        self._groups[group_id] = group
        return group_id

    def encode_prompt(self, prompt: Prompt) -> EncodedPrompt:
        """Token ids of a prompt, checked. May run in another thread than the engine's.

        Raises:
            InvalidRequestError: no tokens, ids outside the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, EncodedPrompt):
            return prompt
        is_text = isinstance(prompt, str)
        token_ids = tuple(self.encode(prompt)) if isinstance(prompt, str) else _checked_ids(prompt)
        for token_id in token_ids:
            check_token_id(token_id, self.traits.vocab_size, "prompt")
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; send at least one token", "prompt")
        return EncodedPrompt(str(prompt) if is_text else None, token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequestError when the model came without a tokenizer."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this model came without a tokenizer (tokenizer.json, tiktoken.model, or in its GGUF); give token ids",
                "prompt",
            )
        return self.tokenizer.encode(text)

    def step(self) -> list[TextDelta]:
        """Run one step; returns what became visible, with the ids that `add_prompt` returned.

        A request that alone can't go on ends with a delta that holds its `error`. When the step itself raises, every
        request is forgotten, and the engine takes new ones.
        """
        try:
            outputs = self._worker.step()
        except BaseException:
            for group_id in list(self._groups):
                self.abort(group_id)
            raise
        deltas = []
        for output in outputs:
            group_id, builder = self._members[output.request_id]
            delta = replace(builder.push(output), request_id=group_id)
            if delta.finish_reason is not None:
                if output.finish_reason is None:
                    self._worker.finish(output.request_id, str(delta.stop_reason))
                del self._members[output.request_id]
            if delta.token_ids or delta.finish_reason is not None:
                deltas.append(delta)
                self._release_waiting(group_id)
        return deltas

    def _release_waiting(self, group_id: str) -> None:
        """The prompt of a group has been computed: its other samples may come."""
        waiting = self._groups[group_id].waiting
        while waiting:
            self._worker.add_request(waiting.pop(0))

    @cached_property
    def model_sha256(self) -> str:
        """Names the checkpoint by its content; see `models.fingerprint`."""
        return fingerprint(Checkpoint.open(self.path))

    def abort(self, request_id: str) -> None:
        """Forget a prompt and all its samples; unknown ids are ignored."""
        group = self._groups.pop(request_id, None)
        for builder in group.builders if group is not None else ():
            self._worker.abort(builder.request.request_id)
            self._members.pop(builder.request.request_id, None)

    def take_result(self, request_id: str) -> RequestOutput:
        """The finished output of a prompt, which is forgotten. Raises KeyError for an unknown id."""
        group = self._groups.pop(request_id)
        first = group.builders[0]
        prompt_logprobs = None
        if group.request.params.prompt_logprobs is not None:
            prompt_logprobs = (None, *first.prompt_logprobs)
        return RequestOutput(
            request_id,
            group.prompt,
            group.request.prompt_token_ids,
            tuple(builder.result() for builder in group.builders),
            prompt_logprobs,
        )

    def hidden_rows(self, request_id: str) -> torch.Tensor:
        """[prompt tokens, captured layers * hidden] of a prompt added with `capture_hidden`, before `take_result`."""
        return self._groups[request_id].builders[0].hidden_rows()

    def knows(self, request_id: str) -> bool:
        """Whether the prompt is still here: neither taken nor aborted."""
        return request_id in self._groups

    def is_finished(self, request_id: str) -> bool:
        return all(builder.finish_reason is not None for builder in self._groups[request_id].builders)

    def has_unfinished(self) -> bool:
        return self._worker.has_unfinished()

    def stats(self) -> SchedulerStats:
        return self._worker.stats()

    def reset_prefix_cache(self) -> None:
        self._worker.reset_prefix_cache()

    def check_conservation(self) -> None:
        """Raises ConservationError unless free + cached + held pages are all pages."""
        self._worker.check_conservation()


@dataclass(frozen=True, slots=True)
class _Group:
    """One prompt and its samples; `waiting` are those that the worker has not got yet."""

    request: Request
    prompt: str | None
    builders: list[OutputBuilder]
    waiting: list[Request]


def _checked_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Plain ints of a list, an array or a tensor."""
    try:
        return tuple(operator.index(token_id) for token_id in prompt)
    except TypeError:
        raise InvalidRequestError("a prompt is text or a list of token ids", "prompt") from None


def _scheduler_config(plan: ExecutionPlan, debug: DebugModes) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_pages=plan.num_kv_pages,
        page_size=plan.page_size,
        enable_prefix_caching=plan.enable_prefix_caching,
        enable_chunked_prefill=plan.enable_chunked_prefill,
        force_preempt_every=debug.force_preempt_every,
    )


def _check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise InvalidRequestError(f"layer {layer} to capture is outside [0, {num_layers})", "capture_layers")
    return tuple(layers)
