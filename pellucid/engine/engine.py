"""`Engine`: a loaded model that takes prompts and gives text, step by step. Under `LLM` and `AsyncLLM`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pellucid.core import RequestOutput, SamplingParams
from pellucid.engine.grammars import Grammars
from pellucid.engine.inputs import check_tokenizer, load_tokenizer
from pellucid.engine.output import TextDelta
from pellucid.engine.output_processor import OutputProcessor
from pellucid.engine.prompts import EncodedPrompt, Prompt, PromptEncoder
from pellucid.engine.startup import DebugModes, load_worker, make_plan, open_model
from pellucid.hardware.facts import Hardware
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fingerprint import fingerprint
from pellucid.models.weights import LoadProgress
from pellucid.runner.base import Runner
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import ExecutionPlan
from pellucid.step_plan import SchedulerStats

if TYPE_CHECKING:
    import torch

__all__ = ["DebugModes", "Engine"]


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
        on_measure: Callable[[str], None] | None = None,
        debug: DebugModes | None = None,
        requires: Literal["ids", "text", "chat"] = "ids",
    ) -> None:
        self.args = args
        files = open_model(args.model, args.load_format)
        self.path, self.traits, self.notes = files.path, files.traits, files.notes
        self.plan: ExecutionPlan = make_plan(args, files, hardware, measure=True, on_progress=on_measure)
        self.tokenizer = load_tokenizer(files.checkpoint, args.chat_template)
        check_tokenizer(self.tokenizer, requires, args.model)
        self._encoder = PromptEncoder(self.tokenizer, self.traits.vocab_size, self.traits.eos_token_ids)
        self.capture_layers = tuple(capture_layers)
        grammars = Grammars(self.tokenizer, self._encoder.eos_token_ids, self.traits.vocab_size)
        self._worker = load_worker(
            files,
            self.plan,
            capture_layers=self.capture_layers,
            on_progress=on_progress,
            debug=debug,
            compile_constraint=grammars.compile,
        )
        self._outputs = OutputProcessor(self.tokenizer, shares_prompts=self.plan.enable_prefix_caching)
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
        encoded = self.encode_prompt(prompt)
        group_id = request_id or next(name for i in self._ids if (name := f"request-{i}") not in self._outputs)
        request = self._encoder.make_request(encoded, params, group_id, cache_salt, capture_hidden)
        members = self._outputs.add(request, encoded.text)
        try:
            # The samples differ in their seed alone: the first is refused, or none.
            for member in members:
                self._worker.add_request(member)
        except BaseException:
            self.abort(group_id)
            raise
        return group_id

    def encode_prompt(self, prompt: Prompt) -> EncodedPrompt:
        """Token ids of a prompt, checked; see `PromptEncoder`. May run in another thread than the engine's."""
        return self._encoder.encode_prompt(prompt)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises InvalidRequestError when the model came without a tokenizer."""
        return self._encoder.encode(text)

    def step(self) -> list[TextDelta]:
        """Run one step; returns what became visible, with the ids that `add_prompt` returned.

        A request that alone can't go on ends with a delta that holds its `error`. When the step itself raises, every
        request is forgotten, and the engine takes new ones.
        """
        try:
            outputs = self._worker.step()
        except BaseException:
            for group_id in self._outputs.ids():
                self.abort(group_id)
            raise
        deltas = []
        for output in outputs:
            delta, stop_string, released = self._outputs.push(output)
            if stop_string is not None:
                self._worker.finish(output.request_id, stop_string)
            for request in released:
                self._worker.add_request(request)
            if delta is not None:
                deltas.append(delta)
        return deltas

    @cached_property
    def model_sha256(self) -> str:
        """Names the checkpoint by its content; see `models.fingerprint`."""
        return fingerprint(Checkpoint.open(self.path))

    @property
    def runner(self) -> Runner[Any]:
        """What computes the steps: measured by `bench`, driven by nobody else."""
        return self._worker.runner

    def abort(self, request_id: str) -> None:
        """Forget a prompt and all its samples; unknown ids are ignored."""
        for member in self._outputs.abort(request_id):
            self._worker.abort(member)

    def take_result(self, request_id: str) -> RequestOutput:
        """The finished output of a prompt, which is forgotten. Raises KeyError for an unknown id."""
        return self._outputs.take_result(request_id)

    def hidden_rows(self, request_id: str) -> torch.Tensor:
        """[prompt tokens, captured layers * hidden] of a prompt added with `capture_hidden`, before `take_result`."""
        return self._outputs.hidden_rows(request_id)

    def knows(self, request_id: str) -> bool:
        """Whether the prompt is still here: neither taken nor aborted."""
        return request_id in self._outputs

    def is_finished(self, request_id: str) -> bool:
        return self._outputs.is_finished(request_id)

    def has_unfinished(self) -> bool:
        return self._worker.has_unfinished()

    def stats(self) -> SchedulerStats:
        return self._worker.stats()

    def reset_prefix_cache(self) -> None:
        self._worker.reset_prefix_cache()

    def check_conservation(self) -> None:
        """Raises ConservationError unless free + cached + held pages are all pages."""
        self._worker.check_conservation()
