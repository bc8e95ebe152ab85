"""Whether a request can ever be served. Called by `Scheduler.add_request`, before anything is queued."""

from __future__ import annotations

from pellucid.core import ContextLengthError, InvalidRequestError, Request
from pellucid.scheduler.config import SchedulerConfig


def resolve_max_tokens(request: Request, config: SchedulerConfig) -> int:
    """The most tokens `request` may generate: `params.max_tokens`, or all that fits when that is None.

    Prompt and output together must fit both `max_model_len` and the KV pool. A request that asks for more is refused
    here and not cut short: one that can never run would wait for ever and hold up everybody behind it.

    Raises:
        InvalidRequestError: an empty prompt, or one that does not fit with `max_tokens` (with one token where
            `max_tokens` is None) or `min_tokens`. The message names the sizes, the limit and the remedy.
    """
    prompt = len(request.prompt_token_ids)
    if prompt == 0:
        raise InvalidRequestError(
            f"request {request.request_id!r} has an empty prompt; send at least one token", "prompt_token_ids"
        )
    params = request.params
    room = min(config.max_model_len, config.pool_tokens) - prompt
    if params.max_tokens is not None:
        asked, named, param = params.max_tokens, f"max_tokens {params.max_tokens}", "max_tokens"
    elif params.min_tokens:
        asked, named, param = params.min_tokens, f"min_tokens {params.min_tokens}", "min_tokens"
    else:
        asked, named, param = 1, "one generated token", "prompt_token_ids"
    if asked > room:
        raise ContextLengthError(
            f"the prompt of {prompt} tokens and {named} make {prompt + asked} tokens; {_tightest_limit(config)}",
            param if room >= 0 else "prompt_token_ids",
        )
    return room if params.max_tokens is None else params.max_tokens


def _tightest_limit(config: SchedulerConfig) -> str:
    # The words that clients look for, to shorten a conversation by themselves.
    if config.max_model_len <= config.pool_tokens:
        limit, flags = f"{config.max_model_len} tokens (max_model_len)", "--max-model-len"
    else:
        limit = f"{config.pool_tokens} tokens (the KV pool: {config.num_pages} pages of {config.page_size})"
        flags = "--num-kv-pages or --gpu-memory-utilization"
    return (
        f"this model's maximum context length is {limit}; shorten the prompt, ask for fewer tokens, or start with a "
        f"larger {flags}"
    )
