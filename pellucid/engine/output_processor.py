"""`OutputProcessor`: prompts to requests, step outputs to text. The half of an engine that needs no weights.

Runs beside the worker in `Engine`, and in the server's process for an engine process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pellucid.core import InvalidRequestError, Request, RequestOutput, TokenLogprobs
from pellucid.engine.output import OutputBuilder, TextDelta
from pellucid.engine.step_output import StepOutput
from pellucid.tokenizer.stop_strings import StopAutomaton
from pellucid.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


class Pushed(NamedTuple):
    """What one step output led to.

    `delta` is what became visible, if anything. The caller must pass on to the worker: `stop_string`, found in the text
    of the member that the output belongs to, which ends it; and `released`, requests that waited for their prompt.
    """

    delta: TextDelta | None = None
    stop_string: str | None = None
    released: tuple[Request, ...] = ()


NOTHING = Pushed()


@dataclass(frozen=True, slots=True)
class _Group:
    """One prompt and its samples; `waiting` are those that the worker has not got yet."""

    request: Request
    prompt: str | None
    builders: list[OutputBuilder]
    waiting: list[Request]


class OutputProcessor:
    """The live prompts, each a group of `n` samples that the worker knows by ids of their own.

    `shares_prompts`: with a prefix cache, samples after the first wait until their prompt is in it, and do not compute
    it again.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, shares_prompts: bool) -> None:
        self._tokenizer, self._shares_prompts = tokenizer, shares_prompts
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, tuple[_Group, OutputBuilder]] = {}

    def add(self, request: Request, prompt: str | None) -> tuple[Request, ...]:
        """Begin a group for `request`, whose `params.n` may be above 1; returns what the worker must get now.

        `prompt` is the text that the output goes on from, None for token ids.

        Raises:
            InvalidRequestError: the id is in use.
        """
        group_id, params = request.request_id, request.params
        if group_id in self._groups:
            raise InvalidRequestError(f"request_id {group_id!r} is in use; give each request its own", "request_id")
        members = [
            replace(request, request_id=f"{group_id}#{index}", params=params.single(index)) for index in range(params.n)
        ]
        stops = StopAutomaton(params.stop)
        builders = [
            OutputBuilder(
                member, index, self._tokenizer, stops=stops, continues_text=prompt is not None, group_id=group_id
            )
            for index, member in enumerate(members)
        ]
        first = 1 if self._shares_prompts else len(members)
        group = self._groups[group_id] = _Group(request, prompt, builders, members[first:])
        for member, builder in zip(members, builders, strict=True):
            self._members[member.request_id] = (group, builder)
        return tuple(members[:first])

    def push(self, output: StepOutput) -> Pushed:
        """Take what a step did for one member. Outputs of members that are gone are ignored."""
        member = self._members.get(output.request_id)
        if member is None:
            return NOTHING
        group, builder = member
        delta = builder.push(output)
        stop_string = None
        if delta.finish_reason is not None:
            if output.finish_reason is None:
                stop_string = str(delta.stop_reason)
            del self._members[output.request_id]
        elif not delta.token_ids:
            return NOTHING
        if not group.waiting:
            return Pushed(delta, stop_string)
        released = tuple(group.waiting)
        group.waiting.clear()
        return Pushed(delta, stop_string, released)

    def abort(self, request_id: str) -> tuple[str, ...]:
        """Forget a group; returns the members that the worker must be told of. Unknown ids are ignored."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return ()
        members = [builder.request.request_id for builder in group.builders]
        return tuple(name for name in members if self._members.pop(name, None) is not None)

    def take_result(self, request_id: str) -> RequestOutput:
        """The output of a group, which is forgotten. Raises KeyError for an unknown id."""
        prompt_logprobs = self.prompt_logprobs(request_id)
        group = self._groups.pop(request_id)
        return RequestOutput(
            request_id,
            group.prompt,
            group.request.prompt_token_ids,
            tuple(builder.result() for builder in group.builders),
            prompt_logprobs,
        )

    def prompt_logprobs(self, request_id: str) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry per prompt token, the first None; whole from the first delta on. None where not asked for."""
        group = self._groups[request_id]
        if group.request.params.prompt_logprobs is None:
            return None
        return (None, *group.builders[0].prompt_logprobs)

    def hidden_rows(self, request_id: str) -> torch.Tensor:
        """[prompt tokens, captured layers * hidden] of a prompt added with `capture_hidden`, before `take_result`."""
        return self._groups[request_id].builders[0].hidden_rows()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def ids(self) -> tuple[str, ...]:
        """The groups that were neither taken nor aborted."""
        return tuple(self._groups)

    def is_finished(self, request_id: str) -> bool:
        return all(builder.finish_reason is not None for builder in self._groups[request_id].builders)
