"""`LLM`: the offline Python API. The engine runs in this process, in the caller's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core import InvalidRequestError, PellucidError, RequestOutput, SamplingParams
from pellucid.engine.engine import DebugModes, Engine
from pellucid.engine.hidden_states import HiddenStates
from pellucid.engine.output import TextDelta
from pellucid.engine.prompts import EncodedPrompt, Prompt
from pellucid.models.weights import LoadProgress
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import ExecutionPlan

if TYPE_CHECKING:
    from pellucid.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A model to call from Python.

        llm = LLM("path/to/model")
        print(llm.generate("Once upon a time", SamplingParams(temperature=0))[0].outputs[0].text)

    `model` is a Hugging Face directory, a GGUF file, a hub name, `demo-mla`, or `smollm2` for the embedded default.
    Keyword arguments are the fields of `EngineArgs` (names as in vLLM), plus:

    Args:
        capture_layers: 0-based layers that `hidden_states` returns.
        on_progress: called while weights load.
        debug: modes that force rare paths.

    Raises:
        PellucidError: before weights are read wherever it can be known then.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        capture_layers: Sequence[int] = (),
        on_progress: Callable[[LoadProgress], None] | None = None,
        debug: DebugModes | None = None,
        **engine_args: Any,
    ) -> None:
        engine = Engine(
            EngineArgs(model=str(model), **engine_args),
            capture_layers=capture_layers,
            on_progress=on_progress,
            debug=debug,
        )
        self._attach(engine)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An `LLM` around an engine that is already there."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self.engine = engine
        self._streams: dict[str, deque[TextDelta]] = {}

    @property
    def plan(self) -> ExecutionPlan:
        """The decisions this engine runs on, each with its reasons."""
        return self.engine.plan

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt is text or a list of token ids; `sampling_params` one, or one each.

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served; no prompt of the call is run.
            PellucidError: a request could not go on, such as where the model's logits are NaN.
        """
        batch = _as_batch(prompts)
        ids = self._run(batch, _params_for(batch, sampling_params))
        return [self.engine.take_result(request_id) for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Like `generate` for one conversation or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.apply_chat_template(c, tools=tools, **template_arguments) for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """Deltas of one prompt as they come. Closing the iterator early aborts the request."""
        params = sampling_params or SamplingParams()
        request_id = self.engine.add_prompt(prompt, params)
        deltas = self._streams[request_id] = deque()
        unfinished = params.n
        try:
            while unfinished:
                if not deltas:
                    self._step()
                    if not self.engine.knows(request_id):
                        raise PellucidError(f"{request_id} was aborted")
                while deltas:
                    delta = deltas.popleft()
                    if delta.error is not None:
                        raise delta.error
                    unfinished -= delta.finish_reason is not None
                    yield delta
        finally:
            del self._streams[request_id]
            self.engine.abort(request_id)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> Iterator[TextDelta]:
        """`stream` for one conversation."""
        return self.stream(self.apply_chat_template(messages, tools=tools, **template_arguments), sampling_params)

    def apply_chat_template(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **arguments: Any
    ) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequestError without tokenizer or template."""
        if self.engine.tokenizer is None:
            raise InvalidRequestError("this model directory has no tokenizer, so no chat template", "messages")
        return self.engine.tokenizer.apply_chat_template(messages, tools, **arguments)

    def hidden_states(self, prompts: Prompt | Sequence[Prompt]) -> list[HiddenStates]:
        """Rows for every prompt token, whatever the prefix cache holds and however prefill is chunked.

        Raises:
            InvalidRequestError: the engine was made without `capture_layers`, or a prompt can't be served.
        """
        if not self.engine.capture_layers:
            raise InvalidRequestError("no layers to capture; make the LLM with capture_layers=[...]", "capture_layers")
        batch = _as_batch(prompts)
        ids = self._run(batch, [SamplingParams(max_tokens=0)] * len(batch), capture_hidden=True)
        states = []
        for request_id in ids:
            rows = self.engine.hidden_rows(request_id)
            prompt_ids = self.engine.take_result(request_id).prompt_token_ids
            states.append(HiddenStates(prompt_ids, self.engine.capture_layers, rows))
        return states

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, capture_hidden: bool = False
    ) -> list[str]:
        """Add all and step until they are finished; their ids, whose results are to be taken."""
        ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(self.engine.add_prompt(prompt, one, capture_hidden=capture_hidden))
            mine = frozenset(ids)
            for request_id in ids:
                while not self.engine.is_finished(request_id):
                    for delta in self._step():
                        if delta.error is not None and delta.request_id in mine:
                            raise delta.error
        except BaseException:
            # Whatever stopped us (a bad prompt, Ctrl-C), leave no request of this call behind.
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return ids

    def _step(self) -> list[TextDelta]:
        """One step of the engine, in which every open stream gets what is its own."""
        deltas = self.engine.step()
        for delta in deltas:
            if delta.request_id in self._streams:
                self._streams[delta.request_id].append(delta)
        return deltas


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """`generate` takes one prompt or several; a flat list of ids is one prompt."""
    if isinstance(prompts, str | EncodedPrompt):
        return [prompts]
    if len(prompts) and hasattr(prompts[0], "__index__"):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequestError(f"{len(prompts)} prompts but {len(params)} SamplingParams", "sampling_params")
    return params
