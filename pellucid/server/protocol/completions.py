"""/v1/completions: `CompletionRequest`. Read by `server.endpoints.completions`."""

from __future__ import annotations

from typing import Annotated, ClassVar, cast

from msgspec import Meta

from pellucid.core import MAX_LOGPROBS
from pellucid.server.errors import bad_request
from pellucid.server.protocol.sampling_fields import Count, SamplingFields

MAX_PROMPTS = 1024


class CompletionRequest(SamplingFields, kw_only=True, frozen=True):
    """A completion request. `prompt` is a text, texts, token ids, or lists of token ids; `prompts` is always a list.

    `best_of` may only say what `n` says, `suffix` may only be empty.

    Raises (in construction):
        ApiError: 400 where fields contradict each other, or the prompt is empty or of mixed kinds.
    """

    # OpenAI's default of this endpoint, whatever the model.
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16

    prompt: str | list[str | Count | list[Count]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of is not supported beyond n; take the best of n samples by logprobs", "best_of")
        if self.suffix:
            raise bad_request("suffix is not supported: this server completes at the end of the prompt only", "suffix")
        prompts = self.prompt
        if isinstance(prompts, str):
            return
        if not prompts:
            raise bad_request("prompt must not be an empty list", "prompt")
        if len({type(item) for item in prompts}) > 1:
            raise bad_request("prompt must be a text, texts, token ids, or lists of token ids, not a mix", "prompt")
        if any(isinstance(item, list) and not item for item in prompts):
            raise bad_request("prompt must not hold an empty list of token ids", "prompt")
        if len(self.prompts) > MAX_PROMPTS:
            raise bad_request(f"prompt holds {len(prompts)} prompts; the most is {MAX_PROMPTS}", "prompt")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or more, all texts or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast(list[int], self.prompt)]
        return cast(list[str] | list[list[int]], self.prompt)

    @property
    def logprobs_limit(self) -> tuple[int | None, str]:
        return self.logprobs, "logprobs"
